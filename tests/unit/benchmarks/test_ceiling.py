"""The section that compares prefill with the ceiling of the CPU's int8 products."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import floors, ours
from benchmarks.floors import Cost, Peaks
from benchmarks.sections import ceiling
from benchmarks.world import World

FILE = Path("file.gguf")


def share(monkeypatch: pytest.MonkeyPatch, *rates: float) -> float:
    """Of a ceiling that is measured at these rates, one after the other."""
    coming = iter(rates)
    monkeypatch.setattr(floors, "measure", lambda *_, **__: Peaks(2, {"avx2": {"2": next(coming)}}, {}, {}))
    monkeypatch.setattr(ours, "measure", lambda *_: [{"tokens/s": 10.0}])
    best_of_the_run = Peaks(2, {"avx2": {"2": 1000.0}}, {}, {})
    world = World(Path(), 2, peaks=best_of_the_run, costs={FILE: Cost(0, 0, 2_000_000_000, 0)})
    found = ceiling.quire(world, FILE)
    assert found[ceiling.RATE, ""] == pytest.approx(20)
    assert next(coming, None) is None
    return found[ceiling.SHARE, ""]


def test_the_better_ceiling_around_a_turn_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(monkeypatch, 40.0, 80.0) == pytest.approx(0.25)
    assert share(monkeypatch, 50.0, 25.0) == pytest.approx(0.4)


def test_a_ceiling_that_cannot_be_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "measure", lambda *_, **__: "no cmake here")
    with pytest.raises(RuntimeError, match="no cmake here"):
        ceiling.quire(World(Path(), 2), FILE)
