"""The harness over its seeds: nothing is found, and what it went through is enough to mean something."""

from __future__ import annotations

import pytest

from tests.null.device import Caught
from tests.null.fuzz import Parts, fuzz

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
    assert report.tiers > 3 * BLOCK / 5 and report.told > 5000
    assert report.loads > 60 and report.loaded > 150 and report.orphans > 50 and report.spoiled > 10
    assert report.carried > 1000 and report.kept > 100 and report.restored > 50
    assert report.pictures > 1000 and report.cut > 200
    assert all(report.finishes.get(reason, 0) > 0 for reason in ("stop", "length", "abort", "error"))


def test_runs_with_tiers_find_no_fault() -> None:
    """Every run with a tier that is slow, fails, lies and forgets, and a listener."""
    report = fuzz(20_200, 100, parts=Parts(tiers=True))
    assert report.tiers == report.runs == 300
    assert report.loads > 150 and report.loaded > 500 and report.spoiled > 50
    assert report.late > 10 and report.orphans > 200 and report.joined > 10


def test_a_tier_that_breaks_its_word_is_noticed() -> None:
    """Bytes that are not those of the key, and nothing that checks them: the device reads them."""
    with pytest.raises(Caught):
        fuzz(0, 60, parts=Parts(tiers=True, seals=False, check=False))
