"""The random stream: known answers, numpy's generator as oracle, uniformity, independence."""

import numpy as np

from quire.runner.random import Draws, philox, uniform
from tests.unit.runner.naive_sampling import uniform as numpy_uniform

ONES = 2**64 - 1


def test_published_vectors():
    """The known-answer file of Random123, philox4x64 with 10 rounds."""
    assert philox((0, 0, 0, 0), (0, 0)) == (
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    )
    assert philox((ONES,) * 4, (ONES,) * 2) == (
        0x87B092C3013FE90B,
        0x438C3C67BE8D0224,
        0x9CC7D7C69CD777B6,
        0xA09CAEBF594F0BA0,
    )


def test_agrees_with_numpy():
    rng = np.random.default_rng(1)
    for seed in [0, 1, -1, 2**63, 2**64 - 1, -(2**63), *(int(s) for s in rng.integers(0, 2**63, 50))]:
        for position in [0, 1, 2, 1000, 2**31, int(rng.integers(0, 2**40))]:
            assert uniform(seed, position) == numpy_uniform(seed, position)


def test_fixed_values_never_change():
    """A seed that a user wrote down must give the same text in every later version."""
    assert uniform(0, 0) == 0x16554D9ECA36314C // 2**11 / 2**53
    assert uniform(42, 7) == 0.8495411558862143
    assert uniform(-1, 3) == uniform(2**64 - 1, 3) == 0.05573648632486816


def _chi_square(draws: np.ndarray, bins: int) -> float:
    """(statistic - degrees of freedom) in standard deviations."""
    count = np.histogram(draws, bins=bins, range=(0, 1))[0]
    expected = draws.size / bins
    return (((count - expected) ** 2 / expected).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1))


def test_uniform_over_positions_and_over_seeds():
    over_positions = np.array([uniform(123, i) for i in range(20000)])
    over_seeds = np.array([uniform(s, 5) for s in range(20000)])
    for draws in (over_positions, over_seeds):
        assert draws.min() >= 0 and draws.max() < 1
        assert abs(_chi_square(draws, 100)) < 4


def test_neighbours_are_independent():
    grid = np.array([[uniform(s, i) for i in range(100)] for s in range(200)])
    for a, b in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]), (grid[1:, 1:], grid[:-1, :-1])):
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 4 / np.sqrt(a.size)


def test_draws_ahead_are_the_draws_of_each_position():
    """Slots that come and go, one by one and all together, that go back, and that ask for several positions in one call."""
    rng = np.random.default_rng(0)
    slots, draws = 40, Draws(40)
    seeds = rng.integers(-5, 2**63, slots).tolist()
    at = rng.integers(0, 30, slots)
    for slot, seed in enumerate(seeds):
        draws.open(slot, seed)
    for step in range(60):
        if step % 3 == 0:  # somebody else takes a slot
            slot = int(rng.integers(slots))
            seeds[slot], at[slot] = int(rng.integers(2**62)), 0
            draws.open(slot, seeds[slot])
        own = np.flatnonzero(rng.random(slots) < (0.1 if step % 5 == 0 else 0.9))
        more = rng.integers(1, 4, own.size) if step % 4 == 1 else np.ones(own.size, np.intp)
        rows = np.repeat(own, more)
        positions = at[rows] + np.concatenate([np.arange(n) for n in more] or [rows])
        assert draws.at(rows, positions).tolist() == [
            uniform(seeds[s], p) for s, p in zip(rows.tolist(), positions.tolist(), strict=True)
        ]
        at[own] += rng.integers(-1 if step % 7 == 0 else 1, 4, own.size)
        at = np.maximum(at, 0)
