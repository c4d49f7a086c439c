"""Runs: turns, what is kept when one is stopped, and the estimate of what is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.figures import OURS, Figure, Group, Side
from benchmarks.record import Record, load, newest, save
from benchmarks.session import Progress, clock, run


def group(ours: Callable[[], float], theirs: Callable[[], float], rounds: int = 3) -> Group:
    figure = Figure("decode", "depth 0", "smollm2-135m", "q4_0")
    sides = [
        Side(OURS, lambda: {("depth 0", ""): ours()}, 1),
        Side("peer", lambda: {("depth 0", "a"): theirs()}, 3),
    ]
    return Group("decode", [figure], sides, rounds)


def record(folder: Path) -> Record:
    return Record(folder, {"threads": 2})


def test_sides_take_turns_and_take_turns_at_beginning(tmp_path: Path) -> None:
    order: list[str] = []

    def note(who: str) -> Callable[[], float]:
        return lambda: float(len(order)) if order.append(who) is None else 0.0

    assert run([group(note("ours"), note("theirs"))], record(tmp_path), quiet=True)
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the peer fell over")])
def test_stopping_keeps_the_rounds_that_were_finished(
    tmp_path: Path, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def theirs() -> float:
        calls.append(1)
        if len(calls) == 3:
            raise error
        return 10.0

    kept = record(tmp_path)
    assert not run([group(lambda: 20.0, theirs, rounds=5)], kept, quiet=True)
    assert kept.path is not None
    head, figures = load(kept.path)
    assert figures[0].values == {OURS: {"": [20.0, 20.0]}, "peer": {"a": [10.0, 10.0]}}
    assert head["settings"] == {"threads": 2}
    printed = capsys.readouterr()
    assert "2.00x (2.00 to 2.00)" in printed.out
    assert "stopped" in printed.err


def test_a_record_is_there_after_every_round_and_never_half_written(tmp_path: Path) -> None:
    kept = record(tmp_path)
    seen: list[int] = []

    def ours() -> float:
        assert kept.path is not None
        seen.append(load(kept.path)[1][0].rounds if kept.path.exists() else 0)
        assert not list(tmp_path.glob("*.part"))
        return 1.0

    run([group(ours, lambda: 1.0, rounds=4)], kept, quiet=True)
    assert seen == [0, 1, 2, 3]


def test_finish_runs_on_what_there_is(tmp_path: Path) -> None:
    done: list[int] = []
    g = group(lambda: 1.0, lambda: 1.0, rounds=2)
    g.finish = lambda whole: done.append(whole.figures[0].rounds)
    run([g], record(tmp_path), quiet=True)
    assert done == [2]


def test_the_estimate_learns_from_what_was_measured() -> None:
    first, second = (group(lambda: 1.0, lambda: 1.0, rounds=2) for _ in range(2))
    progress = Progress([first, second], quiet=True)
    assert progress.remaining() == 16  # four rounds of a guessed 1 + 3 seconds
    progress.done(first, 8.0)  # twice the guess
    assert progress.remaining() == 24


def test_clock() -> None:
    assert clock(75) == "1 min 15 s"
    assert clock(3 * 3600 + 61) == "3 h 01 min"


def test_a_record_says_what_was_measured_and_where(tmp_path: Path) -> None:
    kept = record(tmp_path)
    run([group(lambda: 1.0, lambda: 2.0, rounds=1)], kept, quiet=True)
    assert kept.path is not None
    body = json.loads(kept.path.read_text())
    assert {"cpu", "cores", "architecture", "commit", "date", "quire", "python"} <= body["machine"].keys()
    assert body["figures"][0]["values"]["peer"] == {"a": [2.0]}


def test_each_figure_comes_from_the_latest_record_that_has_it(tmp_path: Path) -> None:
    # The names are in the other order than the dates.
    late = write_record(tmp_path / "a.json", "2030-01-02T00:00:00", "b", ["depth 0"], [2.0])
    early = write_record(tmp_path / "b.json", "2030-01-01T00:00:00", "a", ["depth 0", "depth 2048"], [1.0, 1.0])
    found = newest([late, early])
    assert [f.ours for f, _ in found.values()] == [[2.0], [1.0, 1.0]]


def test_a_run_broken_off_does_not_replace_more_rounds_of_its_commit(tmp_path: Path) -> None:
    whole = write_record(tmp_path / "a.json", "2030-01-01T00:00:00", "a", ["depth 0"], [1.0, 1.0, 1.0])
    broken = write_record(tmp_path / "b.json", "2030-01-02T00:00:00", "a", ["depth 0"], [2.0])
    again = write_record(tmp_path / "c.json", "2030-01-03T00:00:00", "a", ["depth 0"], [3.0, 3.0, 3.0])
    assert [f.ours for f, _ in newest([whole, broken]).values()] == [[1.0, 1.0, 1.0]]
    assert [f.ours for f, _ in newest([whole, broken, again]).values()] == [[3.0, 3.0, 3.0]]


def write_record(path: Path, date: str, commit: str, whats: list[str], values: list[float]) -> Path:
    figures = [Figure("decode", w, "s", "f", values={OURS: {"": values}}).to_json() for w in whats]
    path.write_text(json.dumps({"machine": {"date": date, "commit": commit}, "figures": figures}))
    return path


def test_a_record_of_another_shape(tmp_path: Path) -> None:
    path = save("gpu-x", {"rows": [1]}, tmp_path)
    assert path.parent == tmp_path
    assert path.name.startswith("gpu-x-")
    body = json.loads(path.read_text())
    assert body["rows"] == [1]
    assert "cpu" in body["machine"]
