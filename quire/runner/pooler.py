"""Pooling: the hidden rows of a text become its vector.

Every runner pools here: on the host, in the order of positions and in float64. So a text's vector depends neither on what else is
in a step nor on how the text was cut into steps. Knows rows and work, never programs or slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.backends.batch import Batch
from quire.backends.outputs import FINAL, Hidden
from quire.layouts import Floats
from quire.models.embedding import Pooling
from quire.runner.plan import Row, Work

Wide = npt.NDArray[np.float64]


class TextPart(NamedTuple):
    """A text's part of a step: its place in the plan, its work, and which of the rows that were kept it needs."""

    place: int
    work: Work
    first: int
    end: int


class Pooler:
    """One kind of pooling, and the sums so far of texts whose last token is not computed yet."""

    def __init__(self, pooling: Pooling, head: Callable[[Floats], Floats] | None = None):
        """`head` makes a score of the pooled row."""
        self._pooling = pooling
        self._head = head
        self._sums: dict[int, Wide] = {}  # by slot: the sum of a text's rows so far
        # What a program must keep for it: the row of a last token is a logit row anyway.
        self.keep = Hidden(FINAL, taken=pooling.kind == "last")

    def wanted(self, work: Work, first: int, end: int) -> tuple[int, int]:
        """The part of a work's rows in a step, [first, end), that its vector is made of."""
        if self._pooling.kind == "cls":
            end = first + 1 if work.start == 0 else first
        elif self._pooling.kind == "last":
            first = end - 1 if work.sample else end
        return first, end

    def find(self, works: Mapping[int, Work], batch: Batch) -> list[TextPart]:
        """Find the texts in a step. Their rows are numbered as the program keeps them."""
        found: list[TextPart] = []
        bounds = batch.q_start.tolist()
        for (place, work), begin, stop in zip(works.items(), bounds[:-1], bounds[1:], strict=True):
            if work.vector:
                first, end = self.wanted(work, begin, stop)
                if self.keep.taken and first < end:
                    first = int(np.argmax(batch.logit_rows == first))
                    end = first + 1
                found.append(TextPart(place, work, first, end))
        return found

    def row(self, work: Work, rows: Floats) -> Row:
        """Add a chunk's rows to the sum of its text. The row of the answer has the vector once the text is whole."""
        total = np.add.reduce(rows, axis=0, dtype=np.float64)
        before = self._sums.pop(work.slot, None)
        if before is not None and work.start:  # what begins anew has nothing before it: a sum in its slot is another's
            total = before + total
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
