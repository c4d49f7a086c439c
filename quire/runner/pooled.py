"""The runner of an engine that embeds or scores: whole texts become one vector each, without a sampler.

Slots, page tables, checks and the batch are those of every runner (host_state.py). What differs is what a program gives and what
becomes of it: hidden rows, pooled here in the order of their positions, in float64. So a text's vector depends neither on what else
is in the step nor on how it was cut into steps. An encoder's text comes whole, and has no KV.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV, Program
from quire.layouts import Floats
from quire.models import Encoder
from quire.models.pooling import Pooling
from quire.runner.host_state import HostState, Pending
from quire.runner.plan import Plan, Result, Row, Work
from quire.runner.sampler import Masks

Wide = npt.NDArray[np.float64]


@dataclass(slots=True)
class Done:
    """A step that has happened."""

    rows: list[Row]

    def result(self) -> Result:
        return Result(rows=self.rows)


class PooledRunner:
    """Runs a program that gives hidden rows, and pools the rows of each text into a vector."""

    def __init__(
        self,
        program: Program,
        *,
        kv: KV,
        vocab_size: int,
        max_seqs: int,
        max_tokens: int,
        max_context: int,
        pooling: Pooling,
        encoder: Encoder | None,
        head: Callable[[Floats], Floats] | None,
    ):
        """`kv` says which pages a plan names. An encoder's program has no use for them."""
        self._program = program
        self._pooling = pooling
        self._encoder = encoder
        self._head = head
        self._host = HostState(
            kv,
            vocab_size=vocab_size,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_context=max_context,
            max_rows=max_seqs,
        )
        self._sums: dict[int, Wide] = {}  # by slot, of texts that are not whole yet: what their rows come to so far

    def forward(self, plan: Plan) -> Done:
        """Compute the step's tokens and pool what is whole."""
        pending = Pending(plan)
        try:
            self._host.apply(plan)
            for slot in (*plan.closed, *(new.slot for new in plan.opened)):
                self._sums.pop(slot, None)
            batch = self._host.build(pending)
            if batch is not None:
                self._run(pending, batch)
        except Exception as error:
            self._host.fail_step(pending, error)
        return Done(pending.rows)

    def sample(self, pending: Done, masks: Masks | None = None) -> Done:
        """The rows of the step: no token is sampled."""
        return pending

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""

    def _run(self, pending: Pending, batch: Batch) -> None:
        works = list(pending.works.values())
        ends = zip(works, batch.q_start[:-1].tolist(), batch.q_start[1:].tolist(), strict=True)
        wanted = [self._wanted(work, first, end) for work, first, end in ends]
        batch = replace(batch, logit_rows=np.concatenate(wanted))
        given = {}
        if self._encoder is not None:
            second = [np.arange(w.start, w.start + w.n) >= w.second if w.second else np.zeros(w.n) for w in works]
            given = self._encoder.given(batch.pos, np.concatenate(second).astype(np.int32))
            batch = replace(batch, pages=np.full((len(works), 1), -1, np.int32), write=np.zeros_like(batch.write))
        out = self._program.run(batch, given)
        self._host.slots.length[[w.slot for w in works]] = batch.kv_len
        at = 0
        for (i, work), rows in zip(pending.works.items(), wanted, strict=True):
            pending.rows[i] = self._row(work, out[at : at + rows.size])
            at += rows.size

    def _wanted(self, work: Work, first: int, end: int) -> I32:
        """The rows of a work that its vector is made of."""
        if self._pooling.kind == "cls":
            end = first + 1 if work.start == 0 else first
        elif self._pooling.kind == "last":
            first = end - 1 if work.sample else end
        return np.arange(first, end, dtype=np.int32)

    def _row(self, work: Work, rows: Floats) -> Row:
        """Add a chunk's rows to what is known of its text; the row of the answer has the vector once the text is whole."""
        total = np.add.reduce(rows, axis=0, dtype=np.float64)
        if work.slot in self._sums:
            total = self._sums.pop(work.slot) + total
        if not work.sample:
            self._sums[work.slot] = total
            return Row(accepted=work.n)
        whole = total / (work.start + work.n) if self._pooling.kind == "mean" else total
        if self._head is not None:
            made = self._head(whole.astype(np.float32))
        else:
            made = (whole / max(float(np.sqrt(whole @ whole)), 1e-12) if self._pooling.normalize else whole).astype(
                np.float32
            )
        if not np.isfinite(made).all():
            return Row(accepted=0, error="the model's numbers for this text are not finite")
        return Row(accepted=work.n, vector=made.astype("<f4").tobytes())
