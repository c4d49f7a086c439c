"""Adapters as a backend sees them: low-rank pairs that a row of a step may add to a product, y + scale * b (a x).

A `Target` is a weight matrix that adapters may add to (one of PEFT's target modules), a `Pair` the two matrices that one
adapter adds to it. A program with targets has slots, each for one adapter; `Adapts.place` fills and clears them between steps,
and the batch says which slot each row uses.
Knows no files, no names of adapters and no requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from quire.layouts import Dense


@dataclass(frozen=True, slots=True)
class Pair:
    """The two matrices that one adapter adds to one target."""

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
class Target:
    """A weight [n, k] that adapters may add to. Two are equal only if they are the same object."""

    name: str  # for messages
    n: int
    k: int
    slots: int  # adapters at once
    rank: int  # of the largest pair
    pairs: Mapping[int, Pair] = field(default_factory=dict)  # by slot: what is there from the start


@runtime_checkable
class Adapts(Protocol):
    """A compiled model whose weights adapters can add to."""

    def place(self, slot: int, pairs: Mapping[Target, Pair]) -> None:
        """Let slot `slot` hold these pairs and no others, from the next run on; none at all clears it."""
        ...


def by_slot(targets: list[Target]) -> dict[int, dict[Target, Pair]]:
    """The pairs that targets have from the start, by slot and then by target, as `place` takes them."""
    found: dict[int, dict[Target, Pair]] = {}
    for target in targets:
        for slot, pair in target.pairs.items():
            found.setdefault(slot, {})[target] = pair
    return found
