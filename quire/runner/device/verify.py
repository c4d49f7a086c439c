"""Steps that verify draft tokens, every sequence with as many rows, at a few row counts and a ladder of sizes.

A sequence's rows are its last token and its draft tokens. They, and where they go, are read from the device's own state: the
host need not know how many draft tokens of the step before were right. A sequence with fewer draft tokens has rows in vain,
on the spare page. The body notes the best token of every row; which draft tokens were right is found behind it
(drafting.Drafting.accept).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from quire.backends.batch import I32
from quire.backends.torch.backend import DeviceProgram
from quire.backends.torch.batch import DeviceBatch, DeviceTable
from quire.runner.device.ladder import CHANGES, Field, Inputs, Ladder, Room, at_least, up_to
from quire.runner.device.state import DeviceState

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENS = 512  # more rows than this are an eager step's business


class Kind(NamedTuple):
    """Rows of a sequence, and sequences."""

    rows: int
    sequences: int


def row_counts(drafts: int) -> list[int]:
    """Rows of a sequence, for up to so many draft tokens."""
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
        self._program, self._state, self._reach = program, state, max_context
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
        self.ladder = Ladder(
            program, state, rooms, self._body, vocab=vocab, extra=lambda kind: [Field(kind.sequences, 0)]
        )

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
        """Run one step. Gives logits of every row, the best token of each (int64), and `more`, sent along for later.

        `bounds` are the least and the most tokens that each sequence can have computed before the step.
        """
        least, most = bounds
        kind, whole = Kind(rows, at_least(slots.size, self._sizes[rows])), rows * slots.size
        none = np.zeros(
            0, np.int32
        )  # the device fills in tokens and places; positions are for kernels that ask the host
        pos = (least[:, None] + np.arange(rows, dtype=np.int32)).ravel()
        given = Inputs(none, pos, slots, where, [none] * len(pages), list(pages), [most + np.int32(rows)])
        sent = self.ladder.run(kind, given, more)
        return self.ladder.logits[:whole], self.ladder.tokens[:whole], sent

    def _body(
        self, kind: Kind, inputs: Inputs[torch.Tensor], tables: list[DeviceTable], host: Inputs[I32] | None
    ) -> None:
        (rows, sequences), whole = kind, kind.rows * kind.sequences
        told = None
        if host is not None:
            q_start = np.arange(sequences + 1, dtype=np.int32) * rows
            told = host.batch(q_start, host.extra[0], np.arange(whole, dtype=np.int32))
        ids, pos, kv_len, writes = self._state.verifying(inputs.slots, rows, self._program.kv.page_size)
        tables = [DeviceTable(table.pages, write.flatten()) for table, write in zip(tables, writes, strict=True)]
        logits = self._program.launch(
            DeviceBatch(
                ids=ids.flatten(),
                pos=pos.flatten(),
                q_start=self._count[: sequences + 1] * rows,
                kv_len=kv_len,
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
