"""Adapters as a backend sees them: low-rank pairs that a row of a step may add to a product, y + scale * b (a x).

A `Site` is a weight that adapters may add to, a `Pair` what one adapter adds there. A program with sites has slots, each
for one adapter; `Adapts.place` fills and clears them between steps, and the batch says which slot each row uses.
Knows no files, no names of adapters and no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from quire.layouts import Dense


@dataclass(frozen=True, slots=True)
class Pair:
    """What one adapter adds at one site."""

    a: Dense  # [r, k]
    b: Dense  # [n, r]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A weight [n, k] that adapters may add to. Known by identity."""

    name: str  # for messages
    n: int
    k: int
    slots: int  # adapters at once
    rank: int  # of the largest pair
    pairs: Mapping[int, Pair] = field(default_factory=dict)  # by slot: what is there from the start


@runtime_checkable
class Adapts(Protocol):
    """A program with sites."""

    def place(self, slot: int, pairs: Mapping[Site, Pair]) -> None:
        """From the next run on, slot `slot` holds these pairs and no others; none at all clears it."""
        ...


def by_slot(sites: list[Site]) -> dict[int, dict[Site, Pair]]:
    """What is there from the start, for `place`."""
    found: dict[int, dict[Site, Pair]] = {}
    for site in sites:
        for slot, pair in site.pairs.items():
            found.setdefault(slot, {})[site] = pair
    return found
