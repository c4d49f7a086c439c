"""The section that compares one thread with two."""

from __future__ import annotations

import pytest

from benchmarks.sections.threads import GAIN, ONE, TWO, in_turns


def test_a_machine_that_slows_down_favours_neither():
    speed, asked = 100.0, []

    def measure(threads: int) -> dict[str, float]:
        nonlocal speed
        asked.append(threads)
        speed -= 10
        return {"-fa on": speed * threads, "-fa off": speed}

    found = in_turns(measure)
    assert asked == [1, 2, 2, 1]
    assert found[ONE, "-fa on"] == pytest.approx(75)
    assert found[TWO, "-fa on"] == pytest.approx(150)
    assert found[GAIN, "-fa on"] == pytest.approx(2)
    assert found[GAIN, "-fa off"] == pytest.approx(1)
