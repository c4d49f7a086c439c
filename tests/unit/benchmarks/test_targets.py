"""The table of bars: what it demands, whom it covers, and that every bar is for a figure that is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import cpu, floors
from benchmarks.sections import NAMES, load
from benchmarks.targets import TARGETS, Target, find, judge
from benchmarks.world import FORMATS, LARGE, SMALL, World

PEAKS = floors.Peaks(2, {"avx2": {"1": 1.0, "2": 2.0}}, {}, {"64": {"1": 1.0, "2": 2.0}})


@pytest.mark.parametrize(
    ("section", "what", "name", "bound"),
    [
        ("decode", "depth 0", "q4_1", 1.7),
        ("decode", "depth 0", "q4_k_m", 1.4),
        ("decode", "depth 0", "q4_0", 1.15),
        ("decode", "depth 0", "q8_0", 1.0),
        ("decode", "depth 0", "f16", 1.0),
        ("decode", "depth 2048", "q4_1", 1.6),
        ("prefill", "512 tokens", "q4_1", 3.0),
        ("prefill", "512 tokens", "q4_k_m", 1.6),
        ("prefill", "512 tokens", "q4_0", 1.1),
        ("prefill", "512 tokens", "q8_0", 1.1),
        ("prefill", "512 tokens", "f16", 1.05),
        ("prefill", "2048 tokens", "q4_0", 1.6),
        ("streams", "8 streams", "q4_0", 1.4),
        ("streams", "32 streams", "q4_1", 3.5),
        ("streams", "8 streams", "q4_k_m", 1.8),
        ("served", "throughput at 32", "q4_0", 4.0),
        ("start", "to the first token", "q4_1", 1.2),
    ],
)
def test_bars_of_the_small_model(section: str, what: str, name: str, bound: float) -> None:
    target = find(section, what, SMALL, name)
    assert target is not None
    assert target.bound == bound


def test_figures_without_a_bar() -> None:
    assert find("decode", "depth 2048", SMALL, "q8_0") is None
    assert find("prefill", "128 tokens", SMALL, "q4_0") is None
    assert find("streams", "1 stream", SMALL, "q4_0") is None
    assert find("ceiling", "share of the dot-product ceiling", LARGE, "q8_0") is None


def test_verdicts_by_direction() -> None:
    least, most = Target("a", (), 1.5), Target("a", (), 1.2, least=False)
    assert judge(least, 1.5, SMALL).word == "ok"
    assert judge(least, 1.49, SMALL).word == "short"
    assert judge(most, 1.2, SMALL).word == "ok"
    assert judge(most, 1.21, SMALL).word == "short"
    assert judge(most, 1.0, SMALL).target == "at most 1.20x"
    assert judge(Target("a", (), 0.65, of="value"), 0.7, SMALL).target == "at least 0.65"


def test_the_lower_bar_holds_on_x86_and_the_1b_shape_alone() -> None:
    target = Target("decode", (), 1.4, x86=1.0)
    assert judge(target, 1.1, LARGE, "x86_64").word == "ok on x86"
    assert judge(target, 0.99, LARGE, "x86_64").word == "short"
    assert judge(target, 1.5, LARGE, "x86_64").word == "ok"
    assert judge(target, 1.1, LARGE, "aarch64").word == "short"
    assert judge(target, 1.1, SMALL, "x86_64").word == "short"


def test_every_bar_is_for_a_figure_that_a_whole_run_measures(tmp_path: Path) -> None:
    world = World(tmp_path, threads=2, make=False)
    groups = cpu.collect([n for n in NAMES if n != "ceiling"], world)
    figures = {f.key for g in groups for f in g.figures}
    figures |= {
        ("ceiling", LARGE, name, "share of the dot-product ceiling") for name in FORMATS
    }  # needs measured peaks
    for target in TARGETS:
        for what in target.what:
            names = target.formats or FORMATS
            met = [
                name
                for name in names
                if any((target.section, s, name, what) in figures for s in (SMALL, LARGE, load.SHAPE))
            ]
            assert met == list(names) if target.formats else met, f"{target.section}, {what}: nothing measures it"


def test_sections_have_no_figure_twice(tmp_path: Path) -> None:
    groups = cpu.collect(list(NAMES), World(tmp_path, threads=2, make=False))
    keys = [f.key for g in groups for f in g.figures]
    assert len(keys) == len(set(keys))
    assert {k[0] for k in keys} == set(NAMES) - {"ceiling"}
