"""What a benchmark is made of: figures, the sides that measure them, and groups of sides that take turns.

A side measures once and returns a value for each (figure, setting). Ours has one setting; a peer may have several (its
attention kernels, say), of which the one with the best median is held against us. Ratios are of the same round, so that a
machine that drifts drifts under both. Nothing here runs anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

OURS = "quire"
Sample = Mapping[tuple[str, str], float]  # (figure, setting) -> value


@dataclass(slots=True)
class Side:
    """Who measures, how, and about how many seconds it takes (a first guess for the progress line)."""

    name: str
    measure: Callable[[], Sample]
    seconds: float = 10.0


@dataclass(slots=True)
class Figure:
    """One line of the output, with every round's values by side and setting."""

    section: str
    what: str
    shape: str
    format: str
    unit: str = "tokens/s"
    more: bool = True  # more is better
    floor: float | None = None  # what the machine could do at best, in the same unit
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.section, self.shape, self.format, self.what

    def add(self, side: str, setting: str, value: float) -> None:
        self.values.setdefault(side, {}).setdefault(setting, []).append(value)

    @property
    def ours(self) -> list[float]:
        return self.values.get(OURS, {}).get("", [])

    @property
    def rounds(self) -> int:
        return len(self.ours)

    def peers(self) -> list[str]:
        return [side for side in self.values if side != OURS]

    def best(self, side: str) -> tuple[str, list[float]]:
        """The setting of a side with the best median, and its values."""
        pick = max if self.more else min
        return pick(self.values[side].items(), key=lambda item: statistics.median(item[1]))

    def ratios(self, side: str) -> list[float]:
        """Ours over theirs, round by round; rounds that only one side finished are left out."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.best(side)[1], strict=False) if theirs]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Figure:
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})


@dataclass(slots=True)
class Group:
    """Sides that take turns over the same figures, for some rounds."""

    title: str
    figures: list[Figure]
    sides: list[Side]
    rounds: int
    notes: list[str] = field(default_factory=list)  # peers that are missing, settings chosen
    finish: Callable[[Group], None] | None = None  # after the last round: derived figures, plots

    def figure(self, what: str) -> Figure:
        return next(f for f in self.figures if f.what == what)

    def add(self, side: Side, sample: Sample) -> None:
        for (what, setting), value in sample.items():
            self.figure(what).add(side.name, setting, value)


def spread(values: list[float], unit: str = "") -> str:
    """median (lowest to highest), with as many digits as the size of the number deserves"""
    middle = statistics.median(values)
    digits = 0 if abs(middle) >= 1000 else 1 if abs(middle) >= 10 else 2 if abs(middle) >= 0.1 else 4
    if len(values) == 1:
        return f"{middle:.{digits}f}{unit}"
    return f"{middle:.{digits}f}{unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"
