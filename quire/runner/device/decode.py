"""Decode steps at a ladder of batch sizes: one body, replayed as a CUDA graph where the device can, run as it is elsewhere.

A decode step has one row a sequence, all of them sampled. Its inputs lie at fixed places of one staging buffer; the batch
is padded up to the next size of the ladder with rows that read and write a page of their own. The body applies the changes
of page tables, takes each row's token from the host or from what the device sampled last, runs the program and notes
the best token of every row. Rows that want something else than the best are chosen by the runner afterwards.

Where a program has adapters there is a second, coarser ladder for steps with some in them: a row more of numbers says whose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.backends.batch import I32
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, Shared
from quire.runner.device.sharing import GROUPS, Sharing
from quire.runner.device.staging import Staging
from quire.runner.device.state import DeviceState

SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
SHARED_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # where rows share prefixes: a step costs less
ADAPTED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # with adapters in a step
CHANGES = 2  # page-table entries that a captured step can change, per row
MORE = 64  # numbers per row that may travel with a step without a copy of their own


class DecodeSteps:
    """The ladder. `logits` and `tokens` of a step are valid until the next one."""

    def __init__(self, program: DeviceProgram, state: DeviceState, max_seqs: int, max_context: int, vocab: int):
        self.sizes = [size for size in SIZES if size < max_seqs] + [max_seqs]
        self._program = program
        self._state = state
        self._reach = max_context
        most = self.sizes[-1]
        self._kinds = len(state.tables)  # groups of layers
        self._staging = Staging(program.device, self._numbers(most, True) + (MORE + 1) * most, fixed=True)
        self._spill = Staging(program.device)  # for what does not fit, which is rare
        self._count = torch.arange(most + 1, dtype=torch.int32, device=program.device)
        # Graphs of every size leave their results here: each of its own would add up to gigabytes.
        self._logits = torch.empty(most, vocab, dtype=torch.float32, device=program.device)
        self._tokens = torch.empty(most, dtype=torch.int64, device=program.device)
        self.hidden = program.hidden_buffers(most)  # rows that the program keeps, of the last step
        self.shared_sizes = [size for size in SHARED_SIZES if size < max_seqs] + [max_seqs] if program.shares else []
        self.adapted_sizes = [size for size in ADAPTED_SIZES if size < max_seqs] + [max_seqs] if program.adapts else []
        # By size, whether prefixes are shared, and whether rows have adapters; never both.
        self._graphs: dict[tuple[int, bool, bool], torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> int:
        """How many sizes are graphs."""
        return len(self._graphs)

    def run(
        self,
        ids: I32,
        pos: I32,
        writes: Sequence[I32],
        slots: I32,
        where: I32,
        pages: Sequence[I32],
        *,
        sharing: Sharing | None = None,
        adapters: I32 | None = None,
        more: Sequence[np.ndarray] = (),
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """One step: logits [n, V], the best token of each row (int64 [n]), and `more`, sent along for later.

        With `sharing`, rows are in its order. `adapters` are the slots of theirs; then nothing is shared.
        """
        n, state = ids.size, self._state
        if adapters is not None:
            sharing = None
        sizes = self.sizes if sharing is None else self.shared_sizes
        sizes = sizes if adapters is None else self.adapted_sizes
        size = sizes[bisect_left(sizes, n)]
        if where.size > CHANGES * size:  # rare: many pages at once; they are placed ahead of the step
            state.set_pages(*self._spill.send([where, *pages]))
            where, pages = where[:0], [own[:0] for own in pages]
        groups = [] if sharing is None else self._groups(sharing, slots, size)
        if adapters is not None:
            groups = [pad(adapters, size - n, -1)]
        fixed = self._numbers(size, sharing is not None) + size
        fits = fixed + sum(2 + a.size * (a.itemsize // 4) for a in more) <= self._staging.capacity
        known = [*self._padded(size, ids, pos, writes, slots, where, pages), *groups]
        told = self._staging.send([*known, *(more if fits else ())], len(known))
        told = told if fits else self._spill.send(more)
        kind = size, sharing is not None, adapters is not None
        graph = self._graphs.get(kind)
        if graph is not None:
            graph.replay()
        else:
            self._body(*kind)
        return self._logits[:n], self._tokens[:n], told

    def _padded(
        self, size: int, ids: I32, pos: I32, writes: Sequence[I32], slots: I32, where: I32, pages: Sequence[I32]
    ) -> list[I32]:
        state, spare, room = self._state, size - ids.size, CHANGES * size - where.size
        made = [pad(ids, spare, 0), pad(pos, spare, 0), pad(slots, spare, state.spare)]
        made.append(pad(where, room, state.spare * state.max_pages))
        for g, (write, own) in enumerate(zip(writes, pages, strict=True)):
            made += [pad(write, spare, state.spare_writes[g]), pad(own, room, state.spare_pages[g])]
        return made

    def _numbers(self, size: int, sharing: bool = False) -> int:
        """int32s that a step of that size is given."""
        own = 3 + CHANGES + self._kinds * (1 + CHANGES)
        return own * size + ((3 * GROUPS + 4 + size) if sharing else 0)

    def _groups(self, sharing: Sharing | None, slots: I32, size: int) -> list[I32]:
        """Starts, lengths and leading slots of the groups, and the prefix of every row; rows that share nothing come last."""
        counts = [] if sharing is None else sharing.counts
        lengths = [] if sharing is None else [pages * self._program.kv.page_size for pages in sharing.pages]
        firsts = [0, *np.cumsum(counts).tolist()]
        spare = GROUPS - len(counts)
        start = [*firsts, *[size] * (spare + 1)]
        leaders = [*(int(slots[first]) for first in firsts[:-1]), *[self._state.spare] * (spare + 1)]
        own = np.zeros(size, np.int32)
        own[: firsts[-1]] = np.repeat(lengths, counts)
        whole = start, [*lengths, *[0] * (spare + 1)], leaders
        return [*(np.array(x, np.int32) for x in whole), own]

    @torch.inference_mode()
    def _body(self, size: int, sharing: bool, adapted: bool) -> None:
        view, state = self._staging.view, self._state
        ids, pos, slots, where = (view(at * size, n * size) for at, n in ((0, 1), (1, 1), (2, 1), (3, CHANGES)))
        ends = [3 + CHANGES + g * (1 + CHANGES) for g in range(self._kinds)]
        state.set_pages(where, *(view((at + 1) * size, CHANGES * size) for at in ends))
        own = slots.long()
        tables = state.page_tables(own, [view(at * size, size) for at in ends])
        shared = None
        if sharing:
            at = self._numbers(size)
            start, length = view(at, GROUPS + 2), view(at + GROUPS + 2, GROUPS + 1)
            leaders, begin = view(at + 2 * GROUPS + 3, GROUPS + 1), view(at + 3 * GROUPS + 4, size)
            shared = Shared(start, length, state.tables[0].index_select(0, leaders.long()), begin)
        batch = DeviceBatch(
            ids=state.tokens(ids),
            pos=pos,
            q_start=self._count[: size + 1],
            kv_len=pos + 1,
            pages=tables[0].pages,
            write=tables[0].write,
            more=tuple(tables[1:]),
            logit_rows=self._count[:size],
            all_taken=True,
            longest=1,
            reach=self._reach,
            shared=shared,
            adapters=view(self._numbers(size), size) if adapted else None,
            into=self._logits,
            hidden_into=self.hidden,
        )
        logits = self._program.launch(batch)
        tokens = self._tokens[:size].copy_(self._program.sampler.greedy(logits))
        state.set_last(own, tokens)

    def _blank(self, size: int, sharing: bool, adapted: bool) -> None:
        """Fill the buffer with padding rows alone."""
        none = np.zeros(0, np.int32)
        blank = self._padded(size, none, none, [none] * self._kinds, none, none, [none] * self._kinds)
        blank += [pad(none, size, -1)] if adapted else []
        self._staging.send([*blank, *(self._groups(None, none, size) if sharing else [])])

    def _every(self, plain: Sequence[int]) -> list[tuple[int, bool, bool]]:
        """Kinds of steps, with these sizes of plain ones."""
        found = [(size, False, False) for size in plain] + [(size, True, False) for size in self.shared_sizes]
        return found + [(size, False, True) for size in self.adapted_sizes]

    def warm_up(self) -> None:
        """One step of every kind that a kernel might be chosen by."""
        few = [size for size in self.sizes if size <= 64 or size == self.sizes[-1] or size % 128 == 0]
        for kind in self._every(few):
            self._blank(*kind)
            self._body(*kind)

    def capture(self) -> None:
        """Every size, the largest first, so that the others live in its memory."""
        device = self._program.device
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        for kind in sorted(self._every(self.sizes), reverse=True):
            self._blank(*kind)
            self._graphs[kind] = graph_of(partial(self._body, *kind), device, pool, stream)
        torch.cuda.synchronize(device)


def graph_of(
    body: Callable[[], None], device: torch.device, pool: Any, stream: torch.cuda.Stream
) -> torch.cuda.CUDAGraph:
    """What `body` launches, as a graph. It runs once before: whatever is set up at a first run must not be captured."""
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        body()
    return graph


def pad(array: I32, count: int, value: int) -> I32:
    """The array, and so many of the value after it."""
    return np.concatenate((array, np.full(count, value, np.int32))) if count else np.ascontiguousarray(array, np.int32)
