"""The runner of an engine that embeds or scores: whole texts become one vector each, without a sampler.

A Plan's work is tokens of sequences, each with pages of its own where the model keeps keys and values. A decoder's text may
come in several steps, at most one text being open between two; an encoder's comes whole. Rows are pooled here in the order of
their positions, in float64, so a text's vector does not depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV, Program
from quire.layouts import Floats
from quire.models import Encoder
from quire.models.pooling import Pooling
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
    """One program of a model's hidden rows."""

    def __init__(
        self,
        program: Program,
        *,
        kv: KV,
        pooling: Pooling,
        encoder: Encoder | None,
        head: Callable[[Floats], Floats] | None,
    ):
        self._program = program
        self._kv = kv
        self._pooling = pooling
        self._encoder = encoder
        self._head = head
        self._open: tuple[int, Wide] | None = None  # the text that is not whole yet, and what its rows come to so far

    def forward(self, plan: Plan) -> Done:
        """Compute the step's tokens and pool what is whole."""
        batch, wanted = self._batch(plan.work)
        given = {}
        if self._encoder is not None:
            second = [np.arange(w.start, w.start + w.n) >= w.second if w.second else np.zeros(w.n) for w in plan.work]
            given = self._encoder.given(batch.pos, np.concatenate(second).astype(np.int32))
        out = self._program.run(batch, given)
        rows, at = [], 0
        for work, count in zip(plan.work, wanted, strict=True):
            rows.append(self._row(work, out[at : at + count]))
            at += count
        return Done(rows)

    def sample(self, pending: Done, masks: Masks | None = None) -> Done:
        """There is nothing to choose."""
        return pending

    def close(self) -> None:
        """There is nothing to stop."""

    def _batch(self, work: Sequence[Work]) -> tuple[Batch, list[int]]:
        """The ragged batch, and how many of its rows are wanted for each work."""
        size = self._kv.page_size
        n = np.array([w.n for w in work], np.int32)
        q_start: I32 = np.concatenate([[0], np.cumsum(n)]).astype(np.int32)
        pos = np.concatenate([np.arange(w.start, w.start + w.n, dtype=np.int32) for w in work])
        pages = np.full((len(work), max(1, *(len(w.pages) for w in work))), -1, np.int32)
        write = np.zeros(pos.size, np.int32)
        wanted: list[I32] = []
        for b, w in enumerate(work):
            first, end = int(q_start[b]), int(q_start[b + 1])
            pages[b, : len(w.pages)] = w.pages
            if w.pages:
                write[first:end] = pages[b, pos[first:end] // size] * size + pos[first:end] % size
            wanted.append(self._wanted(w, first, end))
        return (
            Batch(
                ids=np.concatenate([np.array(w.tokens, np.int32) for w in work]),
                pos=pos,
                q_start=q_start,
                kv_len=np.array([w.start + w.n for w in work], np.int32),
                pages=pages,
                write=write,
                logit_rows=np.concatenate(wanted),
            ),
            [len(rows) for rows in wanted],
        )

    def _wanted(self, work: Work, first: int, end: int) -> I32:
        """The rows of a work that its vector is made of."""
        if self._pooling.kind == "cls":
            end = first + 1 if work.start == 0 else first
        elif self._pooling.kind == "last":
            first = end - 1 if work.sample else end
        return np.arange(first, end, dtype=np.int32)

    def _row(self, work: Work, rows: Floats) -> Row:
        """What has come of a text so far, and its vector where it is whole."""
        total = np.add.reduce(rows, axis=0, dtype=np.float64)
        if self._open is not None and self._open[0] == work.key and work.start:
            total = self._open[1] + total
        if not work.sample:
            self._open = (work.key, total)
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
