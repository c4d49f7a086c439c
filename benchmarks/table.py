"""Figures as lines of text: for the terminal while a run goes on, and for the page that keeps them."""

from __future__ import annotations

import statistics

from benchmarks import targets
from benchmarks.figures import OURS, Figure, Group, spread


def lines(group: Group) -> list[str]:
    """A group's figures for the terminal, notes last."""
    wide = max((len(f.what) for f in group.figures), default=0)
    rows = [f"  {f.what:{wide}}  " + "   ".join(cells(f)) for f in group.figures if f.values]
    return [group.title, *rows, *(f"  ({note})" for note in group.notes)]


def cells(f: Figure, machine: str = "") -> list[str]:
    """The parts of a line: ours, each peer's, the ratio, the floor, the verdict, how often."""
    parts = [f"{OURS} {spread(f.ours)} {f.unit}"] if f.ours else []
    for side in f.peers():
        setting, values = f.best(side)
        parts.append(f"{side} {spread(values)}{f' [{setting}]' if setting else ''}")
    parts += [spread(r, "x") for side in f.peers() if (r := f.ratios(side))]
    if verdict := judged(f, machine):
        parts.append(f"target {verdict.target}  {verdict.word}")
    if f.floor is not None and f.ours:
        parts.append(f"floor {f.floor:.3g}, {share(f):.0%} of it")
    if f.note:
        parts.append(f.note)
    parts.append(f"n={f.rounds}")
    return parts


def share(f: Figure) -> float:
    """How near ours is to the floor: 1 is there."""
    assert f.floor is not None
    ours = statistics.median(f.ours)
    return ours / f.floor if f.more else f.floor / ours


def reached(f: Figure) -> tuple[targets.Target, float] | None:
    """A figure's target and what it bounds, as measured: the ratio, or our value. None where either is missing."""
    target = targets.find(f.section, f.what, f.shape, f.format)
    if target is None:
        return None
    if target.of == "value":
        return (target, statistics.median(f.ours)) if f.ours else None
    ratios = [statistics.median(r) for side in f.peers() if (r := f.ratios(side))]
    return (target, ratios[0]) if ratios else None


def judged(f: Figure, machine: str = "") -> targets.Verdict | None:
    """The verdict on a figure that has a target and was measured."""
    found = reached(f)
    return targets.judge(*found, f.shape, machine) if found else None
