"""Thread counts: what is tried, what is chosen, what is kept, and that a broken file is as good as none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.backends.native import available, tune
from quire.backends.native.tune import Candidate, Speed
from quire.machine import Cores
from tests.effort import at_most


def alike(n: int, quota: float | None = None) -> Cores:
    cores = tuple((i,) for i in range(n))
    return Cores(cores, cores, quota)


def siblings(n: int) -> Cores:
    cores = tuple((i, n + i) for i in range(n))
    return Cores(cores, cores)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Measuring is counted, not done: bandwidth ends at 3 threads, arithmetic does not."""
    counted: list[int] = []

    def measure(ways: list[Candidate], isa: str) -> list[Speed]:
        counted.append(len(ways))
        return [Speed(w, 1e9 * min(w.threads, 3), 1e11 * w.threads) for w in ways]

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "_load_per_core", lambda: 0.0)
    return counted


def test_what_is_tried() -> None:
    counts = {c.threads for c in tune.candidates(siblings(4))}
    assert counts == {1, 4, 8}
    assert {c.threads for c in tune.candidates(siblings(8))} == {1, 4, 8, 16}
    assert {c.threads for c in tune.candidates(alike(16, quota=5.5))} == {1, 6}
    big = Cores(((0,), (1,), (2,), (3,), (4,), (5,)), ((4,), (5,)))
    ways = tune.candidates(big)
    assert {c.threads for c in ways} == {1, 2, 6} and ways[0].threads == 2
    assert Candidate(2, (4, 5)) in ways  # pinned to the fast ones
    assert Candidate(4, (0, 1, 2, 3)) in tune.candidates(siblings(4))  # one on each core, not two on one
    assert all(c.threads <= 3 for c in tune.candidates(alike(8, quota=3.0)))


def test_the_fastest_wins_and_ties_go_to_fewer() -> None:
    one, two, pinned = Candidate(1), Candidate(2), Candidate(2, (0, 1))
    assert tune.best([Speed(one, 9e9, 1e11), Speed(two, 18e9, 2e11)]).candidate == two
    assert tune.best([Speed(two, 9.1e9, 1.01e11), Speed(one, 9e9, 1e11)]).candidate == one
    assert tune.best([Speed(pinned, 18.2e9, 2e11), Speed(two, 18e9, 2e11)]).candidate == two
    assert tune.best([Speed(two, 18e9, 2e11), Speed(pinned, 22e9, 2.4e11)]).candidate == pinned
    # More threads that add nothing to decoding and a lot to prefill are worth having.
    assert tune.best([Speed(one, 9e9, 1e11), Speed(two, 9e9, 2e11)]).candidate == two


@pytest.mark.parametrize(
    ("cores", "threads", "why"),
    [
        (alike(1), 1, "one core"),
        (alike(8, quota=1.0), 1, "a quota of 1 cores"),
        (alike(2), 2, "nothing measured"),
    ],
)
def test_where_there_is_nothing_to_choose(
    tmp_path: Path, stopwatch: list[int], cores: Cores, threads: int, why: str
) -> None:
    made = tune.decide(tmp_path, cores, "avx2")
    assert made.candidate == Candidate(threads) and why in made.line
    assert not stopwatch and not list(tmp_path.iterdir())


def test_two_hardware_threads_of_one_core_are_measured(tmp_path: Path, stopwatch: list[int]) -> None:
    tune.decide(tmp_path, siblings(1), "avx2")
    assert stopwatch


def test_measured_once_and_kept(tmp_path: Path, stopwatch: list[int]) -> None:
    made = tune.decide(tmp_path / "home", alike(4), "avx2")
    assert made.candidate.threads == 4 and made.kept
    assert made.line.startswith("threads: 4 of 4 cores (measured 20") and "1 thread 1.0 GB/s" in made.line
    again = tune.decide(tmp_path / "home", alike(4), "avx2")
    assert len(stopwatch) == 1
    assert again == made
    assert tune.decide(tmp_path / "home", alike(4), "avx2", again=True).candidate == made.candidate
    assert len(stopwatch) == 2


def test_another_machine_is_measured_for_itself(tmp_path: Path, stopwatch: list[int], monkeypatch) -> None:
    tune.decide(tmp_path, alike(4), "avx2")
    for cores, isa in ((alike(5), "avx2"), (alike(4), "scalar"), (alike(4, quota=3.0), "avx2"), (siblings(2), "avx2")):
        n = len(stopwatch)
        tune.decide(tmp_path, cores, isa)
        assert len(stopwatch) == n + 1
    monkeypatch.setattr(tune, "cpu_model", lambda: "another CPU")
    tune.decide(tmp_path, alike(4), "avx2")
    monkeypatch.setattr(tune, "VERSION", "99")
    tune.decide(tmp_path, alike(4), "avx2")
    assert len(stopwatch) == 7
    assert len(json.loads((tmp_path / tune.FILE).read_text())) == 7  # and none was forgotten
    for n in range(3, 30):
        tune.decide(tmp_path, alike(n), "avx2")
    assert len(json.loads((tmp_path / tune.FILE).read_text())) == tune.KEEP


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        '{"KEY": 5}',
        '{"KEY": {"measured": "today", "speeds": []}}',
        '{"KEY": {"measured": "today", "speeds": [{"threads": 0, "cores": [], "stream": 1, "compute": 1}]}}',
        '{"KEY": {"measured": "today", "speeds": [{"threads": 99999, "cores": [], "stream": 1, "compute": 1}]}}',
        '{"KEY": {"measured": "today", "speeds": [{"threads": 2, "cores": [], "stream": -1, "compute": 1}]}}',
        '{"KEY": {"measured": "today", "speeds": [{"threads": 2, "cores": "x", "stream": 1, "compute": 1}]}}',
        "[" * 100_000,
        "\udcff",
    ],
)
def test_a_broken_file_is_ignored_and_written_anew(tmp_path: Path, stopwatch: list[int], text: str) -> None:
    path = tmp_path / tune.FILE
    key = json.dumps(tune.key_of(alike(4), "avx2"))
    path.write_bytes(text.replace('"KEY"', key).encode("utf-8", "surrogateescape"))
    assert tune.decide(tmp_path, alike(4), "avx2").candidate.threads == 4
    assert len(stopwatch) == 1
    tune.decide(tmp_path, alike(4), "avx2")
    assert len(stopwatch) == 1


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path, stopwatch: list[int]) -> None:
    (tmp_path / "file").write_text("")
    assert tune.decide(tmp_path / "file", alike(4), "avx2").candidate.threads == 4
    (tmp_path / "home" / tune.FILE).mkdir(parents=True)
    assert tune.decide(tmp_path / "home", alike(4), "avx2").candidate.threads == 4
    assert [p.name for p in (tmp_path / "home").iterdir()] == [tune.FILE]  # nothing half-written stays


def test_a_busy_machine_is_measured_and_not_remembered(tmp_path: Path, stopwatch: list[int], monkeypatch) -> None:
    monkeypatch.setattr(tune, "_load_per_core", lambda: 2.0)
    made = tune.decide(tmp_path, alike(4), "avx2")
    assert made.candidate.threads == 4 and "busy" in made.line and not list(tmp_path.iterdir())


def test_measuring_is_real_and_short() -> None:
    with at_most(5.0):  # a third of a second on each core
        speeds = list(tune.measure([Candidate(1), Candidate(2)], available()[0], budget=0.3))
    assert speeds[0].candidate == Candidate(1)
    assert all(s.stream > 1e8 and s.compute > 1e8 for s in speeds)
    assert len(list(tune.measure([Candidate(1)] * 50, available()[0], budget=0.0))) == 1  # and it stops
