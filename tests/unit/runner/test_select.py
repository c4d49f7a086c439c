"""best and leading against full sorts, with ties, ruled-out values and every size class."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.runner.select import best, leading


def _sorted(values: np.ndarray) -> list[int]:
    finite = [i for i in range(values.size) if values[i] > -np.inf]
    return sorted(finite, key=lambda i: (-values[i], i))


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 127, 500, 4096, 5000])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "mostly out", "ascending"])
def test_best_is_the_head_of_a_full_sort(size: int, kind: str):
    rng = np.random.default_rng(size)
    values = rng.standard_normal(size).astype(np.float32)
    if kind == "ties":
        values = np.round(values * 2)
    elif kind == "equal":
        values[:] = 3.0
    elif kind == "mostly out":
        values[rng.random(size) < 0.97] = -np.inf
    elif kind == "ascending":
        values.sort()
    want = _sorted(values)
    for k in sorted({1, 2, 5, 31, 32, 33, 40, size // 2, size - 1, size, size + 7} - {0, -1}):
        assert best(values, k).tolist() == want[:k]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, 0.0, 1.0, 1.5, 2.0, 3.25]), min_size=1, max_size=300),
    st.integers(1, 320),
)
def test_best_with_many_ties(values: list[float], k: int):
    array = np.array(values)
    assert best(array, k).tolist() == _sorted(array)[:k]


@pytest.mark.parametrize("size", [1, 3, 127, 128, 129, 1000, 6000])
@pytest.mark.parametrize("spread", [0.0, 0.001, 1.0, 8.0])
@pytest.mark.parametrize("rounded", [False, True])
def test_leading_is_the_shortest_head_that_holds_the_mass(size: int, spread: float, rounded: bool):
    rng = np.random.default_rng(size)
    values = rng.standard_normal(size) * spread
    if rounded:
        values = np.round(values, 1)
    values[rng.random(size) < 0.1] = -np.inf
    values[0] = values[1:].max(initial=0.0)
    weights = 1 + np.rint(np.exp(values - values.max()) * 2**40).astype(np.int64)
    order = _sorted(values)
    held = np.cumsum(weights[order])
    for share in (1e-9, 0.1, 0.5, 0.9, 0.95, 0.999):
        cut = int(np.searchsorted(held, math.ceil(share * held[-1])))
        # Just enough, and just more than what comes before it.
        for mass in (int(held[cut]), int(held[cut]) - int(weights[order[cut]]) + 1):
            assert sorted(leading(values, weights, mass).tolist()) == sorted(order[: cut + 1])
    assert leading(values, weights, held[-1] * 2).size == len(order)  # out of reach: all of them


def test_leading_with_weights_that_do_not_follow_the_values():
    """typical_p orders by something else than probability."""
    rng = np.random.default_rng(0)
    values, weights = rng.standard_normal(3000), rng.integers(1, 2**30, 3000)
    order = _sorted(values)
    held = np.cumsum(weights[order])
    for cut in (0, 10, 127, 128, 700, 2999):
        mass = int(held[cut]) - int(weights[order[cut]]) // 2
        assert sorted(leading(values, weights, mass).tolist()) == sorted(order[: cut + 1])
