"""Steps that verify draft tokens, every sequence with as many rows, at a few row counts and a ladder of sizes.

A sequence's rows are its last token and the drafts after it. All tokens come from the host, which has read the step before: it
must, to propose drafts. The body notes the best token of every row; which drafts were right is told where the results are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.backends.batch import I32, Batch
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, DeviceTable
from quire.runner.device.ladder import CHANGES, Inputs, Ladder, Room, at_least, up_to
from quire.runner.device.state import DeviceState

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = 512  # more rows than this are an eager step's business


class Kind(NamedTuple):
    """Rows of a sequence, and sequences."""

    rows: int
    sequences: int


def row_counts(drafts: int) -> list[int]:
    """Rows of a sequence, for up to so many drafts."""
    return sorted({2, 1 + -(-drafts // 2), 1 + drafts} - {1}) if drafts else []


class VerifySteps:
    """Logits and tokens of a step are valid until the next one."""

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
        self._program, self._reach = program, max_context
        most = min(TOKENS, max_tokens)
        self._sizes = {rows: [n for n in up_to(SEQUENCES, max_seqs) if n * rows <= most] for rows in row_counts(drafts)}
        kinds = [Kind(rows, n) for rows, sizes in self._sizes.items() for n in sizes]
        whole = max((rows * n for rows, n in kinds), default=0)
        self._count = torch.arange(whole + 1, dtype=torch.int32, device=program.device)
        rooms = {
            kind: Room(kind.rows * kind.sequences, kind.sequences, CHANGES * kind.sequences, kind.rows * kind.sequences)
            for kind in kinds
        }
        self.hidden = program.hidden_buffers(whole)
        self.ladder = Ladder(program, state, rooms, self._body, vocab=vocab)

    def rows_for(self, needed: int, sequences: int) -> int | None:
        """The least rows a sequence that hold what is needed, where so many sequences fit."""
        fits = (rows for rows, sizes in self._sizes.items() if rows >= needed and sizes and sizes[-1] >= sequences)
        return min(fits, default=None)

    def run(
        self, batch: Batch, slots: I32, where: I32, pages: Sequence[I32], more: Sequence[np.ndarray]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """One step: logits of every row, the best token of each (int64), and `more`, sent along for later."""
        rows = batch.tokens // batch.sequences
        kind = Kind(rows, at_least(batch.sequences, self._sizes[rows]))
        writes = [batch.table(g).write for g in range(len(pages))]
        sent = self.ladder.run(kind, Inputs(batch.ids, batch.pos, slots, where, writes, list(pages)), more)
        return self.ladder.logits[: batch.tokens], self.ladder.tokens[: batch.tokens], sent

    def _body(
        self, kind: Kind, inputs: Inputs[torch.Tensor], tables: list[DeviceTable], host: Inputs[I32] | None
    ) -> None:
        (rows, sequences), whole = kind, kind.rows * kind.sequences
        told = None
        if host is not None:
            q_start = np.arange(sequences + 1, dtype=np.int32) * rows
            told = host.batch(q_start, host.pos[rows - 1 :: rows] + 1, np.arange(whole, dtype=np.int32))
        logits = self._program.launch(
            DeviceBatch(
                ids=inputs.ids,
                pos=inputs.pos,
                q_start=self._count[: sequences + 1] * rows,
                kv_len=inputs.pos[rows - 1 :: rows] + 1,
                pages=tables[0].pages,
                write=tables[0].write,
                more=tuple(tables[1:]),
                logit_rows=self._count[:whole],
                all_taken=True,
                longest=rows,
                uniform=True,
                reach=self._reach,
                host=told,
                into=self.ladder.logits,
                hidden_into=self.hidden,
            )
        )
        self.ladder.tokens[:whole].copy_(self._program.sampler.greedy(logits))
