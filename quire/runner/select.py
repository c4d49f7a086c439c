"""The best few of many numbers, without sorting the many.

A vocabulary has 50,000 to 250,000 tokens and a filter keeps some dozens: what is done to the whole row here is a few
passes of comparisons, and only what survives them is sorted. One order everywhere: the larger number first, and of
equal numbers the smaller index. `-inf` means "ruled out" and is never among the best. NaN is the caller's to refuse.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.runner.masses import Masses

Index: TypeAlias = npt.NDArray[np.intp]
Numbers: TypeAlias = npt.NDArray[np.floating]

_LANES = 64  # numbers that share a peak
_FIRST = 128  # how many are worth sorting when a mass has to be filled


def best(values: Numbers, k: int) -> Index:
    """Indices of the k largest values, best first; fewer when fewer are above -inf."""
    index = _candidates(values, min(k, values.size))
    found = values[index]
    if index.size > k:
        kth = np.partition(found, index.size - k)[index.size - k]
        above = np.flatnonzero(found > kth)
        level = np.flatnonzero(found == kth)[: k - above.size]  # of equals, those with the smallest index
        keep = np.sort(np.concatenate((above, level)))
        index, found = index[keep], found[keep]
    return index[np.argsort(-found, kind="stable")]


def _candidates(values: Numbers, k: int) -> Index:
    """Ascending indices of a superset, usually a small one, of the k best."""
    rows = values.size // _LANES
    if 0 < 2 * k <= rows:
        # Each column of the folded row has a peak. k peaks reach the k-th best peak, so at least k values do.
        peaks = values[: rows * _LANES].reshape(_LANES, rows).max(axis=0)
        floor = np.partition(peaks, rows - k)[rows - k]
    elif 0 < k < values.size:
        floor = np.partition(values, values.size - k)[values.size - k]
    else:
        floor = -np.inf
    return np.flatnonzero(values >= floor) if floor > -np.inf else np.flatnonzero(values > -np.inf)


def leading(values: Numbers, weights: Masses, mass: int) -> Index:
    """The shortest run of the best values whose weights sum to `mass` or more: their indices, in no order.

    All of them, when even the sum over all falls short.
    """
    index = best(values, _FIRST)
    cumulative = np.cumsum(weights[index])
    if cumulative.size < _FIRST or cumulative[-1] >= mass:
        return index[: _reaching(cumulative, mass)]
    return _halve(values, weights, mass)


def _halve(values: Numbers, weights: Masses, mass: int) -> Index:
    """`leading` for a flat distribution: each round decides at least half of what is undecided, and sorts nothing."""
    undecided = np.flatnonzero(values > -np.inf)
    inside: list[Index] = []
    held = 0
    while undecided.size > _FIRST:
        found = values[undecided]
        middle = np.partition(found, found.size // 2)[found.size // 2]
        upper = undecided[found > middle]
        share = int(weights[upper].sum())
        if held + share >= mass:
            undecided = upper
            continue
        level = undecided[found == middle]  # never empty, and equals are taken in the order of their indices
        cumulative = held + share + np.cumsum(weights[level])
        inside += upper, level[: _reaching(cumulative, mass)]
        held = int(cumulative[-1])
        undecided = undecided[found < middle] if held < mass else undecided[:0]
    rest = undecided[np.argsort(-values[undecided], kind="stable")]
    inside.append(rest[: _reaching(held + np.cumsum(weights[rest]), mass)])
    return np.concatenate(inside)


def _reaching(cumulative: Masses, mass: int) -> int:
    """How many entries it takes to reach `mass`; all of them when it is out of reach."""
    return min(int(np.searchsorted(cumulative, mass, side="left")) + 1, cumulative.size)
