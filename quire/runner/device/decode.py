"""Decode steps: one row a sequence, all of them sampled, at a ladder of batch sizes.

The body takes each row's token from the host or from what the device sampled last, runs the program and notes the best token
of every row. Rows that are sampled otherwise are chosen by the runner afterwards. Where a program has adapters, a second,
coarser list of sizes is for steps with some in them; where it shares prefixes, a third is for steps that share some.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.backends.batch import I32
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, DeviceTable, Shared
from quire.runner.device.ladder import CHANGES, Field, Inputs, Ladder, Room, at_least, up_to
from quire.runner.device.sharing import GROUPS, Sharing
from quire.runner.device.state import DeviceState

SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32), *range(576, 1025, 64))
SHARED_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # where rows share prefixes: a step costs less
ADAPTED_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # with adapters in a step


class Kind(NamedTuple):
    """A size, and whether its steps share prefixes or have adapters: never both."""

    size: int
    shared: bool = False
    adapted: bool = False


class DecodeSteps:
    """Runs decode steps. Logits and tokens of a step are valid until the next one."""

    def __init__(self, program: DeviceProgram, state: DeviceState, max_seqs: int, max_context: int, vocab: int):
        self._program, self._state, self._reach = program, state, max_context
        self.sizes = up_to(SIZES, max_seqs)
        self._shared_sizes = up_to(SHARED_SIZES, max_seqs) if program.shares else []
        self.adapted_sizes = up_to(ADAPTED_SIZES, max_seqs) if program.adapts else []
        every = [Kind(size) for size in self.sizes] + [Kind(size, shared=True) for size in self._shared_sizes]
        every += [Kind(size, adapted=True) for size in self.adapted_sizes]
        few = [k for k in every if k.shared or k.adapted or k.size <= 64 or k.size == max_seqs or k.size % 128 == 0]
        self._count = torch.arange(max_seqs + 1, dtype=torch.int32, device=program.device)
        rooms = {kind: Room(kind.size, kind.size, CHANGES * kind.size, kind.size) for kind in every}
        self.hidden = program.hidden_buffers(max_seqs)  # rows that the program keeps, of the last step
        self.ladder = Ladder(program, state, rooms, self._body, vocab=vocab, extra=self._extra, warm_up=few)

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
        """Run one step. Gives logits [n, V], the best token of each row (int64 [n]), and `more`, sent along for later.

        With `sharing`, rows are in its order. `adapters` are the slots of theirs; then nothing is shared.
        """
        given, n = Inputs(ids, pos, slots, where, list(writes), list(pages)), ids.size
        if adapters is not None:
            kind, given.extra = Kind(at_least(n, self.adapted_sizes), adapted=True), [adapters]
        elif sharing is not None:
            kind, given.extra = Kind(at_least(n, self._shared_sizes), shared=True), self._groups(sharing, slots)
        else:
            kind = Kind(at_least(n, self.sizes))
        sent = self.ladder.run(kind, given, more)
        return self.ladder.logits[:n], self.ladder.tokens[:n], sent

    def _extra(self, kind: Kind) -> list[Field]:
        size, spare = kind.size, self._state.spare
        if kind.adapted:
            return [Field(size, -1)]
        # Starts, lengths and leading slots of the groups, and the prefix of every row. Rows that share nothing come last.
        counts = GROUPS + 2, GROUPS + 1, GROUPS + 1, size
        fills = size, 0, spare, 0
        blanks = (0,), (), (), ()
        return [Field(*own) for own in zip(counts, fills, blanks, strict=True)] if kind.shared else []

    def _groups(self, sharing: Sharing, slots: I32) -> list[I32]:
        """The inputs of a step that shares prefixes, in the order that `_extra` lists."""
        starts = np.cumsum([0, *sharing.counts])
        lengths = np.array(sharing.pages) * self._program.kv.page_size
        found = starts, lengths, slots[starts[:-1]], np.repeat(lengths, sharing.counts)
        return [own.astype(np.int32) for own in found]

    def _body(
        self, kind: Kind, inputs: Inputs[torch.Tensor], tables: list[DeviceTable], host: Inputs[I32] | None
    ) -> None:
        size, state, shared = kind.size, self._state, None
        if kind.shared:
            start, length, leaders, own_from = inputs.extra
            shared = Shared(start, length, state.tables[0].index_select(0, leaders.long()), own_from)
        batch = DeviceBatch(
            ids=state.tokens(inputs.ids),
            pos=inputs.pos,
            q_start=self._count[: size + 1],
            kv_len=inputs.pos + 1,
            pages=tables[0].pages,
            write=tables[0].write,
            more=tuple(tables[1:]),
            logit_rows=self._count[:size],
            all_taken=True,
            longest=1,
            reach=self._reach,
            shared=shared,
            adapters=inputs.extra[0] if kind.adapted else None,
            into=self.ladder.logits,
            hidden_into=self.hidden,
        )
        logits = self._program.launch(batch)
        tokens = self.ladder.tokens[:size].copy_(self._program.sampler.greedy(logits))
        state.set_last(inputs.slots, tokens)
