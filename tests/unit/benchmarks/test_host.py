"""The clocks around a step: every part of it is measured, on a device that computes nothing and on the host."""

import argparse

import pytest

from benchmarks import host
from benchmarks.host_times import STEP


@pytest.mark.parametrize(
    ("runner", "parts"), [("device", STEP), ("host", tuple(name for name in STEP if name != "read"))]
)
def test_every_part_of_a_step_is_timed(runner: str, parts: tuple[str, ...]) -> None:
    if runner == "device":
        pytest.importorskip("torch", reason="needs the torch extra")
    args = argparse.Namespace(prompt=20, steps=12, depth=1)
    found, news = host.steps(args, runner, "greedy", 3)
    assert len(news) == 3 and len(found["plan"]) >= 8
    for name in STEP:
        assert all(time > 0 for time in found[name]) == (name in parts), name
