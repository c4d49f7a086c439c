"""Short steps with prompts in them, at a ladder of sizes: launching their kernels one by one would take longer than running them.

A step of any mix of prompt rows and decode rows is padded to a number of tokens and of sequences. The rows that are too many
belong to one sequence of their own; sequences that are too many have no rows. Longer steps are launched as they come: the
device is busy with one kernel while the host launches the next. Where a program has adapters, every other size is captured once
more for steps with some in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.backends.batch import I32, Batch
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, DeviceTable
from quire.runner.device.ladder import CHANGES, Field, Inputs, Ladder, Room, buffers
from quire.runner.device.state import DeviceState

# (tokens, sequences): alone or nearly so in fine steps, among many others in coarse ones.
SIZES = (
    *((tokens, 16) for tokens in (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)),
    *((tokens, 256) for tokens in (288, 384, 512, 768, 1024)),
)
# Programs with more launches for less work, mixtures, are bound by the host for longer.
LONGER = tuple((tokens, 16) for tokens in (1280, 1536, 1792, 2048))


class Kind(NamedTuple):
    """A size, and whether rows have adapters."""

    tokens: int
    sequences: int
    adapted: bool = False


class PrefillSteps:
    """The logits of a step are valid until the next one."""

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
        self._program, self._state, self._reach = program, state, max_context
        sizes = (*SIZES, *LONGER) if program.sparse else SIZES
        within = {(tokens, min(seqs, max_seqs + 1)) for tokens, seqs in sizes if tokens <= max_tokens}
        self.sizes = sorted(within)
        self.adapted_sizes = self.sizes[::-2][::-1] if program.adapts else []  # the largest among them
        self._plain = [Kind(*size) for size in self.sizes]
        self._adapted = [Kind(*size, adapted=True) for size in self.adapted_sizes]
        rooms = {kind: self._room(kind) for kind in (*self._plain, *self._adapted)}
        few = [*self._plain[::2], *self._adapted]
        self.hidden = buffers(program, max((tokens for tokens, _ in self.sizes), default=0))
        self.ladder = Ladder(program, state, rooms, self._body, vocab=vocab, extra=self._extra, warm_up=few)

    def _room(self, kind: Kind) -> Room:
        tokens, sequences, _ = kind
        changes = CHANGES * (sequences + tokens // self._program.kv.page_size)
        return Room(tokens, sequences, changes, logits=sequences)

    def kind_for(self, batch: Batch) -> Kind | None:
        """The smallest kind that the step fits, if any does."""
        wanted = max(batch.sequences, batch.logit_rows.size)
        for kind in self._plain if batch.adapters is None else self._adapted:
            # Rows that are too many need a sequence to belong to.
            if batch.tokens <= kind.tokens and wanted + (batch.tokens < kind.tokens) <= kind.sequences:
                return kind
        return None

    def run(
        self, kind: Kind, batch: Batch, slots: I32, where: I32, pages: Sequence[I32], more: Sequence[np.ndarray]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run one step. Gives the logits of batch.logit_rows, and `more`, sent along for later."""
        writes = [batch.table(g).write for g in range(len(pages))]
        extra = [batch.q_start, batch.kv_len, batch.logit_rows]
        if batch.adapters is not None:
            extra.append(batch.adapters)
        sent = self.ladder.run(kind, Inputs(batch.ids, batch.pos, slots, where, writes, list(pages), extra), more)
        return self.ladder.logits[: batch.logit_rows.size], sent

    def _extra(self, kind: Kind) -> list[Field]:
        """Starts and lengths of the sequences, rows whose logits are wanted, and adapters."""
        tokens, sequences, adapted = kind
        found = [Field(sequences + 1, tokens, (0,)), Field(sequences, 1), Field(sequences, 0)]
        return [*found, Field(tokens, -1)] if adapted else found

    def _body(
        self, kind: Kind, inputs: Inputs[torch.Tensor], tables: list[DeviceTable], host: Inputs[I32] | None
    ) -> None:
        q_start, kv_len, rows = inputs.extra[:3]
        self._program.launch(
            DeviceBatch(
                ids=self._state.tokens(inputs.ids),
                pos=inputs.pos,
                q_start=q_start,
                kv_len=kv_len,
                pages=tables[0].pages,
                write=tables[0].write,
                more=tuple(tables[1:]),
                logit_rows=rows,
                longest=kind.tokens,
                reach=self._reach,
                host=None if host is None else host.batch(*host.extra[:3]),
                into=self.ladder.logits,
                hidden_into=self.hidden,
                adapters=inputs.extra[3] if kind.adapted else None,
            )
        )
