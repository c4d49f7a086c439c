"""Hidden rows of texts on their way to the host, where they are pooled: the vectors of a step on a device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.backends.outputs import Hidden
from quire.runner.device.staging import Arrival
from quire.runner.plan import Row
from quire.runner.pooler import Pooler, TextPart


class TextRows:
    """The rows that the texts of one step need. They are copied at once: the next launch writes over what a program keeps."""

    def __init__(self, pooler: Pooler, parts: list[TextPart], hidden: Mapping[Hidden, torch.Tensor]):
        self._pooler, self._parts = pooler, parts
        kept = hidden[pooler.keep]
        self._rows = Arrival(torch.cat([kept[part.first : part.end] for part in parts]).float())

    def answer(self, rows: list[Row]) -> None:
        """Replace the answers to texts in the rows of a step, once the step is read. Steps are read in their order."""
        numbers, at = self._rows.wait(), 0
        for place, work, first, end in self._parts:
            if rows[place].error is None:
                rows[place] = self._pooler.row(work, numbers[at : at + end - first])
            at += end - first
