"""The harness over its seeds: nothing is found, and what it went through is enough to mean something."""

from __future__ import annotations

import pytest

from tests.null.fuzz import fuzz

BLOCK = 250  # seeds; each runs at depth 0, 1 and 2
BLOCKS = [0, 1, pytest.param(2, marks=pytest.mark.large)]  # 750 runs each, about 5 s of one core


@pytest.mark.parametrize("block", BLOCKS)
def test_random_runs_find_no_fault(block: int) -> None:
    report = fuzz(block * BLOCK, BLOCK)
    assert report.runs == 3 * BLOCK
    # Each of the things that could go wrong was tried, many times over.
    assert report.preemptions > 100
    assert report.evictions > 500
    assert report.hits > 1000
    assert report.stale > 100
    assert report.rewritten > 50
    assert 3 * BLOCK / 3 < report.grouped < 3 * BLOCK * 2 / 3
    assert report.forgotten > 1000
    assert report.hollow > 100
    assert report.drafted > 1000 and 100 < report.right < report.drafted
    assert report.carried > 1000 and report.kept > 100 and report.restored > 50
    assert report.pictures > 1000 and report.cut > 200
    assert all(report.finishes.get(reason, 0) > 0 for reason in ("stop", "length", "abort", "error"))
