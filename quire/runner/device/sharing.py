"""Decode rows that share the beginning of their contexts, found from page tables, so that attention reads a shared prefix once.

Sequences that hit the same prefix have the same page numbers in front. Rows with a common beginning form a group; a group
that splits further on is cut where that saves more reading. Rows of a group must follow one another in the batch, so the
answer is an order as well. Pure: no slots, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32

GROUPS = 8  # at most so many prefixes in a step: the arrays of a captured step have a fixed size
LEAST = 8  # pages that rows must share to be worth a look


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rows in groups. `order` has the rows of every group one after another, then those that share nothing."""

    order: npt.NDArray[np.intp]
    counts: list[int]  # rows of each group
    pages: list[int]  # that a group shares

    @property
    def saved(self) -> int:
        """Pages that need not be read again."""
        return sum((rows - 1) * pages for rows, pages in zip(self.counts, self.pages, strict=True))


def find(table: I32, full: I32) -> Sharing | None:
    """Groups among the rows of `table` [B, P], of which the first full[b] pages are complete. None: nothing is shared."""
    rows = np.flatnonzero(full >= LEAST)
    groups = [found for part in _parts(rows, table[rows, 0]) for found in _split(table, full, part)]
    groups = sorted(groups, key=lambda g: (1 - g[0].size) * g[1])[:GROUPS]
    if not groups:
        return None
    inside = np.concatenate([rows for rows, _ in groups])
    rest = np.setdiff1d(np.arange(full.size), inside)
    return Sharing(np.concatenate((inside, rest)), [rows.size for rows, _ in groups], [pages for _, pages in groups])


def _parts(rows: npt.NDArray[np.intp], by: I32) -> list[npt.NDArray[np.intp]]:
    """Rows that have the same number, where there are at least two."""
    order = np.argsort(by, kind="stable")
    cuts = np.flatnonzero(np.diff(by[order])) + 1
    return [part for part in np.split(rows[order], cuts) if part.size > 1]


def _split(table: I32, full: I32, rows: npt.NDArray[np.intp]) -> list[tuple[npt.NDArray[np.intp], int]]:
    """The groups of rows that begin alike: one, or several that share more each."""
    most = int(full[rows].min())
    same = (table[rows, :most] == table[rows[0], :most]).all(axis=0)
    pages = most if same.all() else int(same.argmin())
    whole = [(rows, pages)] if pages >= LEAST else []
    if pages == most:  # the shortest row ends here: those that go on may still share more
        on = rows[full[rows] > most]
    else:
        on = rows
    inner = [g for part in _parts(on, table[on, pages]) for g in _split(table, full, part)] if on.size > 1 else []
    return inner if _saved(inner) > _saved(whole) else whole


def _saved(groups: list[tuple[npt.NDArray[np.intp], int]]) -> int:
    return sum((rows.size - 1) * pages for rows, pages in groups)
