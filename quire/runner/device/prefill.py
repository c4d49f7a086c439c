"""Short steps with prompts in them, as CUDA graphs: launching their kernels one by one would take longer than running them.

A step of any mix of prompt rows and decode rows is padded to a number of tokens and of sequences that was captured. The rows
that are too many belong to one sequence of their own, which reads and writes the spare page; sequences that are too many have no
rows. Longer steps are launched as they come: the device is busy with one kernel while the host launches the next. Where a
program has adapters, every other size is captured once more for steps with some in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from quire.backends.batch import I32, Batch, Table
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch
from quire.runner.device.decode import MORE, graph_of
from quire.runner.device.staging import Staging
from quire.runner.device.state import DeviceState

# (tokens, sequences): alone or nearly so in fine steps, among many others in coarse ones.
SIZES = (
    *((tokens, 16) for tokens in (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)),
    *((tokens, 256) for tokens in (288, 384, 512, 768, 1024)),
)
CHANGES = 2  # page-table entries that a captured step can change, per sequence and per page of new tokens


class PrefillSteps:
    """The sizes. The logits of a step are valid until the next one."""

    def __init__(
        self,
        program: DeviceProgram,
        state: DeviceState,
        *,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        vocab: int,
    ):
        self._program = program
        self._state = state
        self._reach = max_context
        within = {(tokens, min(seqs, max_seqs + 1)) for tokens, seqs in SIZES if tokens <= max_tokens}
        self.sizes = sorted(within)
        self.adapted_sizes = self.sizes[::-2][::-1] if program.adapts else []  # the largest among them
        capacity = max((self._numbers(*size) + size[0] + MORE * size[1] for size in self.sizes), default=0)
        self._staging = Staging(program.device, capacity, fixed=True)
        self._spill = Staging(program.device)  # for what does not fit, which is rare
        most = max((seqs for _, seqs in self.sizes), default=0)
        self._logits = torch.empty(most, vocab, dtype=torch.float32, device=program.device)
        self.hidden = program.hidden_buffers(max((tokens for tokens, _ in self.sizes), default=0))
        self._graphs: dict[tuple[tuple[int, int], bool], torch.cuda.CUDAGraph] = {}  # by size, and whether adapted

    def size_for(self, batch: Batch) -> tuple[int, int] | None:
        """The smallest size that the step fits, if any does."""
        wanted = max(batch.sequences, batch.logit_rows.size)
        for tokens, seqs in self.sizes if batch.adapters is None else self.adapted_sizes:
            # Rows that are too many need a sequence to belong to.
            if batch.tokens <= tokens and wanted + (batch.tokens < tokens) <= seqs:
                return tokens, seqs
        return None

    def run(
        self,
        size: tuple[int, int],
        batch: Batch,
        slots: I32,
        where: I32,
        pages: Sequence[I32],
        more: Sequence[np.ndarray],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One step: the logits of batch.logit_rows, and `more`, sent along for later."""
        room = self._changes(*size)
        if where.size > room:  # a long prefix that was found: its pages are placed ahead of the step
            self._state.set_pages(*self._spill.send([where, *pages]))
            where, pages = where[:0], [own[:0] for own in pages]
        arrays, adapted = self._padded(size, batch, slots, where, pages), batch.adapters is not None
        if batch.adapters is not None:
            arrays.append(_fill(batch.adapters, size[0], -1))
        needed = self._numbers(*size) + adapted * size[0] + sum(2 + a.size * (a.itemsize // 4) for a in more)
        fits = needed <= self._staging.capacity
        told = self._staging.send([*arrays, *more])[len(arrays) :] if fits else []
        if not fits:
            self._staging.send(arrays)
            told = self._spill.send(more)
        graph = self._graphs.get((size, adapted))
        if graph is not None:
            graph.replay()
        else:
            ids, pos, q_start, kv_len, _, rows = arrays[:6]
            blank = np.zeros((size[1], 1), np.int32)
            first, *others = [Table(blank, write) for write in arrays[7 : 7 + 2 * len(pages) : 2]]
            self._body(size, adapted, Batch(ids, pos, q_start, kv_len, blank, first.write, rows, tuple(others)))
        return self._logits[: batch.logit_rows.size], told

    def _changes(self, tokens: int, seqs: int) -> int:
        return CHANGES * (seqs + tokens // self._program.kv.page_size)

    def _numbers(self, tokens: int, seqs: int) -> int:
        """int32s that a step of that size is given."""
        kinds, room = len(self._state.tables), self._changes(tokens, seqs)
        return (2 + kinds) * tokens + 4 * seqs + 1 + (1 + kinds) * room

    def _padded(self, size: tuple[int, int], batch: Batch, slots: I32, where: I32, pages: Sequence[I32]) -> list[I32]:
        tokens, seqs = size
        state, room = self._state, self._changes(tokens, seqs)
        made = [
            _fill(batch.ids, tokens, 0),
            _fill(batch.pos, tokens, 0),
            _fill(batch.q_start, seqs + 1, tokens),
            _fill(batch.kv_len, seqs, 1),
            _fill(slots, seqs, state.spare),
            _fill(batch.logit_rows, seqs, 0),
            _fill(where, room, state.spare * state.max_pages),
        ]
        for g, own in enumerate(pages):
            write = batch.table(g).write
            made += [_fill(write, tokens, state.spare_writes[g]), _fill(own, room, state.spare_pages[g])]
        return made

    @torch.inference_mode()
    def _body(self, size: tuple[int, int], adapted: bool, host: Batch | None = None) -> None:
        tokens, seqs = size
        state, room = self._state, self._changes(tokens, seqs)
        views, at = [], 0
        for count in (tokens, tokens, seqs + 1, seqs, seqs, seqs, room, *(tokens, room) * len(state.tables)):
            views.append(self._staging.view(at, count))
            at += count
        ids, pos, q_start, kv_len, slots, rows, where = views[:7]
        state.set_pages(where, *views[8::2])
        tables = state.page_tables(slots, views[7::2])
        self._program.launch(
            DeviceBatch(
                ids=state.tokens(ids),
                pos=pos,
                q_start=q_start,
                kv_len=kv_len,
                pages=tables[0].pages,
                write=tables[0].write,
                more=tuple(tables[1:]),
                logit_rows=rows,
                longest=tokens,
                reach=self._reach,
                host=host,
                into=self._logits,
                hidden_into=self.hidden,
                adapters=self._staging.view(at, tokens) if adapted else None,
            )
        )

    def _blank(self, size: tuple[int, int], adapted: bool) -> None:
        """Fill the buffer with padding rows alone."""
        none = np.zeros(0, np.int32)
        kinds, rows = len(self._state.tables), np.zeros((0, 1), np.int32)
        others = (Table(rows, none),) * (kinds - 1)
        blank = Batch(none, none, np.zeros(1, np.int32), none, rows, none, none, others)
        self._staging.send(
            [*self._padded(size, blank, none, none, [none] * kinds), *([_fill(none, size[0], -1)] if adapted else [])]
        )

    def warm_up(self) -> None:
        """One step of every kind that a kernel might be chosen by."""
        for kind in [(size, False) for size in self.sizes[::2]] + [(size, True) for size in self.adapted_sizes]:
            self._blank(*kind)
            self._body(*kind)

    def capture(self) -> None:
        """Every size, the largest first, so that the others live in its memory."""
        device, pool = self._program.device, torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        every = [(size, False) for size in self.sizes] + [(size, True) for size in self.adapted_sizes]
        for kind in sorted(every, reverse=True):
            self._blank(*kind)
            self._graphs[kind] = graph_of(partial(self._body, *kind), device, pool, stream)
        torch.cuda.synchronize(device)


def _fill(array: I32, size: int, value: int) -> I32:
    """The array, and `value` after it up to that size."""
    out = np.full(size, value, np.int32)
    out[: array.size] = array
    return out
