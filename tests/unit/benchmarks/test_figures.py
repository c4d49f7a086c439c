"""Figures: which of a peer's settings counts, ratios of the same round, and what a line says."""

from __future__ import annotations

import pytest

from benchmarks.figures import OURS, Figure, spread
from benchmarks.table import cells, judged


def decode(**values: dict[str, list[float]]) -> Figure:
    return Figure("decode", "depth 0", "smollm2-135m", "q4_1", values={**values})


def test_the_peers_best_setting_is_the_one_with_the_best_median() -> None:
    f = decode(peer={"a": [10, 11, 99], "b": [12, 13, 14]})
    assert f.best("peer") == ("b", [12, 13, 14])
    f.more = False
    assert f.best("peer") == ("a", [10, 11, 99])


def test_ratios_are_of_the_same_round() -> None:
    f = decode(**{OURS: {"": [20.0, 30.0, 80.0]}, "peer": {"a": [10.0, 10.0, 20.0], "b": [1.0, 1.0, 1.0]}})
    assert f.ratios("peer") == [2.0, 3.0, 4.0]


def test_a_round_that_one_side_lacks_has_no_ratio() -> None:
    f = decode(**{OURS: {"": [20.0, 30.0]}, "peer": {"a": [10.0]}})
    assert f.ratios("peer") == [2.0]


def test_a_line_has_ratio_spread_target_and_verdict() -> None:
    f = decode(**{OURS: {"": [190.0, 193.0, 201.0]}, "llama.cpp": {"-fa on": [100.0, 100.0, 100.0]}})
    line = "   ".join(cells(f, "aarch64"))
    assert "1.93x (1.90 to 2.01)" in line
    assert "target at least 1.70x  ok" in line
    assert "[-fa on]" in line
    assert line.endswith("n=3")


def test_ours_alone_has_no_verdict_on_a_ratio() -> None:
    f = decode(**{OURS: {"": [190.0]}})
    assert judged(f) is None
    assert cells(f) == ["quire 190.0 tokens/s", "n=1"]


def test_a_target_on_a_value_needs_no_peer() -> None:
    f = Figure(
        "threads", "two threads over one, prefill", "llama-1b", "q4_0", "x", values={OURS: {"": [1.9, 1.8, 1.7]}}
    )
    verdict = judged(f)
    assert verdict is not None
    assert verdict.word == "short"


def test_the_floor_is_a_share_in_both_directions() -> None:
    fast = decode(**{OURS: {"": [50.0]}})
    fast.floor = 200.0
    slow = Figure("context", "at 0", "llama-1b", "q4_0", "ms", more=False, floor=5.0, values={OURS: {"": [20.0]}})
    assert "25% of it" in cells(fast)[1]
    assert "25% of it" in cells(slow)[1]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1234.6, 1200.0, 1300.0], "1235 (1200 to 1300)"),
        ([31.24], "31.2"),
        ([1.5, 2.5], "2.00 (1.50 to 2.50)"),
        ([0.01234, 0.01, 0.02], "0.0123 (0.0100 to 0.0200)"),
    ],
)
def test_digits_follow_the_size(values: list[float], text: str) -> None:
    assert spread(values) == text


def test_a_figure_survives_its_json() -> None:
    f = decode(**{OURS: {"": [1.0]}})
    f.floor, f.note = 3.0, "why"
    assert Figure.from_json(f.to_json()) == f
