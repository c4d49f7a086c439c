"""Steps that verify draft tokens, every sequence with as many rows: at a few row counts and sizes, as graphs where the device can.

A sequence's rows are its last token and its draft tokens. They, and where they go, are read from the device's own state: the
host need not know how many draft tokens of the step before were right. The batch is padded up to the next size with sequences
that read and write the spare page, and so are the rows of a sequence with fewer draft tokens. The body notes the best token of
every row; which draft tokens were right is found behind it (drafting.Drafting.accept).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from quire.backends.batch import I32, Batch, Table
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch
from quire.runner.device.decode import MORE, graph_of, pad
from quire.runner.device.staging import Staging
from quire.runner.device.state import DeviceState

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = 512  # more rows than this are an eager step's business
CHANGES = 2  # page-table entries that a captured step can change, per sequence


def ladder(drafts: int) -> list[int]:
    """Rows of a sequence, for up to so many draft tokens."""
    return sorted({2, 1 + -(-drafts // 2), 1 + drafts} - {1}) if drafts else []


class VerifySteps:
    """The sizes, as rows of a sequence and sequences. Logits and tokens of a step are valid until the next one."""

    def __init__(
        self,
        program: DeviceProgram,
        state: DeviceState,
        *,
        drafts: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        vocab: int,
    ):
        self._program = program
        self._state = state
        self._reach = max_context
        most = min(TOKENS, max_tokens)
        self._sizes = {
            rows: sorted({n for n in (*SEQUENCES, max_seqs) if n <= max_seqs and n * rows <= most})
            for rows in ladder(drafts)
        }
        whole = max((rows * n for rows, sizes in self._sizes.items() for n in sizes), default=0)
        held = max((n for sizes in self._sizes.values() for n in sizes), default=0)
        capacity = self._numbers(held)
        self._staging = Staging(program.device, capacity + MORE * held, fixed=True)
        self._spill = Staging(program.device)  # for what does not fit, which is rare
        self._count = torch.arange(whole + 1, dtype=torch.int32, device=program.device)
        self._logits = torch.empty(whole, vocab, dtype=torch.float32, device=program.device)
        self._tokens = torch.empty(whole, dtype=torch.int64, device=program.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> int:
        """How many sizes are graphs."""
        return len(self._graphs)

    def rows_for(self, needed: int, sequences: int) -> int | None:
        """The least rows a sequence that hold what is needed, where so many sequences fit."""
        fits = (rows for rows, sizes in self._sizes.items() if rows >= needed and sizes and sizes[-1] >= sequences)
        return min(fits, default=None)

    def run(
        self,
        rows: int,
        slots: I32,
        bounds: tuple[I32, I32],
        where: I32,
        pages: Sequence[I32],
        more: Sequence[np.ndarray],
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """One step: logits of every row, the best token of each (int64), and `more`, sent along for later.

        `bounds` are the least and the most tokens that each sequence can have computed before the step.
        """
        sizes = self._sizes[rows]
        size = sizes[bisect_left(sizes, slots.size)]
        if where.size > CHANGES * size:  # rare: many pages at once; they are placed ahead of the step
            self._state.set_pages(*self._spill.send([where, *pages]))
            where, pages = where[:0], [own[:0] for own in pages]
        arrays = self._padded(size, slots, where, pages)
        needed = self._numbers(size) + sum(2 + a.size * (a.itemsize // 4) for a in more)
        fits = needed <= self._staging.capacity
        told = self._staging.send([*arrays, *(more if fits else ())], len(arrays))
        told = told if fits else self._spill.send(more)
        graph = self._graphs.get((rows, size))
        if graph is not None:
            graph.replay()
        else:
            self._body(rows, size, self._host(rows, size, *bounds))
        return self._logits[: rows * slots.size], self._tokens[: rows * slots.size], told

    def _numbers(self, size: int) -> int:
        """int32s that a step of that size is given."""
        return size * (1 + CHANGES + len(self._state.tables) * CHANGES)

    def _padded(self, size: int, slots: I32, where: I32, pages: Sequence[I32]) -> list[I32]:
        state, room = self._state, CHANGES * size - where.size
        made = [pad(slots, size - slots.size, state.spare), pad(where, room, state.spare * state.max_pages)]
        return [*made, *(pad(own, room, spare) for own, spare in zip(pages, state.spare_pages, strict=True))]

    def _host(self, rows: int, size: int, least: I32, most: I32) -> Batch:
        """What the host knows of a step that is launched as it is: from where on, and how far, each sequence may look."""
        spare = size - least.size
        first, end = pad(least, spare, 0), pad(most, spare, 0) + rows
        blank, write = np.zeros((size, 1), np.int32), np.zeros(rows * size, np.int32)
        others = (Table(blank, write),) * (len(self._state.tables) - 1)
        pos = (first[:, None] + np.arange(rows, dtype=np.int32)).ravel()
        q_start = np.arange(size + 1, dtype=np.int32) * rows
        return Batch(write, pos, q_start, end, blank, write, np.arange(rows * size, dtype=np.int32), others)

    @torch.inference_mode()
    def _body(self, rows: int, size: int, host: Batch | None = None) -> None:
        state, kinds, whole = self._state, len(self._state.tables), rows * size
        views, at = [], 0
        for count in (size, CHANGES * size, *(CHANGES * size,) * kinds):
            views.append(self._staging.view(at, count))
            at += count
        slots, where = views[:2]
        state.set_pages(where, *views[2:])
        ids, pos, kv_len, writes = state.verifying(slots, rows, self._program.kv.page_size)
        tables = state.page_tables(slots, [write.flatten() for write in writes])
        logits = self._program.launch(
            DeviceBatch(
                ids=ids.flatten(),
                pos=pos.flatten(),
                q_start=self._count[: size + 1] * rows,
                kv_len=kv_len,
                pages=tables[0].pages,
                write=tables[0].write,
                more=tuple(tables[1:]),
                logit_rows=self._count[:whole],
                all_taken=True,
                longest=rows,
                uniform=True,
                reach=self._reach,
                host=host,
                into=self._logits,
            )
        )
        self._tokens[:whole].copy_(self._program.sampler.greedy(logits))

    def _blank(self, size: int) -> None:
        """A step of that size with nothing in it but padding."""
        none = np.zeros(0, np.int32)
        self._staging.send(self._padded(size, none, none, [none] * len(self._state.tables)))

    def warm_up(self) -> None:
        """One step of every kind that a kernel might be chosen by."""
        for rows, sizes in self._sizes.items():
            for size in sizes:
                self._blank(size)
                self._body(rows, size)

    def capture(self) -> None:
        """Every size, the largest first, so that the others live in its memory."""
        device, pool = self._program.device, torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        every = [(rows, size) for rows, sizes in self._sizes.items() for size in sizes]
        for rows, size in sorted(every, key=lambda kind: kind[0] * kind[1], reverse=True):
            self._blank(size)
            self._graphs[rows, size] = graph_of(partial(self._body, rows, size), device, pool, stream)
        torch.cuda.synchronize(device)
