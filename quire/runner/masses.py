"""Whole-number weights of tokens, in place of probabilities: the numbers under top_p, typical_p, the draw and log probabilities, defined to the last bit.

A weight is 2^y in float64 of plain sums and products, each rounded once, where y is the distance to the best score in bits at
the temperature; a mass is that weight as a whole number of small units. Sums are sums of whole numbers: no order of addition
can change one, so a row comes out alike whatever computes it, in any batch, on any number of threads, with any instructions.
native/src/sample_row.cpp computes the same bits; this is what they are tested against, and what runs where there is no
compiled module.

The unit is the smallest that lets the masses of a whole vocabulary add up in 63 bits: 2**-46 of the best token's weight for
49,152 tokens, 2**-44 for 262,144. A token below half a unit has no mass and is never drawn.
"""

from __future__ import annotations

import math
import sys
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

F64: TypeAlias = npt.NDArray[np.float64]
Masses: TypeAlias = npt.NDArray[np.int64]

LOWEST = -1000.0  # bits; below: no weight
_ROUND = 1.5 * 2.0**52  # pushes everything behind the point out of a number
_LOG2_E = float.fromhex("0x1.71547652b82fep0")
_LN_2 = float.fromhex("0x1.62e42fefa39efp-1")
_SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
# (2^r - 1) / r for r between -1/2 and 1/2, to 2e-17: the highest power first.
_TERMS = tuple(
    float.fromhex(term)
    for term in (
        "0x1.e9d3fe3952179p-32", "0x1.e6063f7217bc6p-28", "0x1.b524fae627834p-24", "0x1.62bfd47773353p-20",
        "0x1.ffcbfc670dcd4p-17", "0x1.430913096fd9fp-13", "0x1.5d87fe78a5276p-10", "0x1.3b2ab6fba1ddap-7",
        "0x1.c6b08d704a0c2p-5", "0x1.ebfbdff82c598p-3", "0x1.62e42fefa39efp-1", "0x1p0",
    )
)  # fmt: skip


def unit_bits(vocab_size: int) -> int:
    """A weight of 1 is 2**bits units."""
    return min(50, 62 - (vocab_size - 1).bit_length())


def bits_a_nat(temperature: float) -> float:
    """The factor of distances to the best score: bits for each nat at this temperature. Finite, so that the best one's own distance stays 0."""
    return min(1.0 / temperature * _LOG2_E, sys.float_info.max)


def distances(scores: F64, peak: float, by: float) -> F64:
    """How far each score is below the best one, in bits at this temperature: 0 for the best, -inf for what is ruled out."""
    with np.errstate(over="ignore"):
        return (scores - peak) * by


def weights(far: F64) -> F64:
    """2^y of distances (0 or less), to about 1 ulp."""
    y = np.maximum(far, LOWEST)
    n = (y + _ROUND) - _ROUND
    r = y - n
    p = np.full_like(r, _TERMS[0])
    for term in _TERMS[1:]:
        p *= r
        p += term
    w = np.ldexp(p, n.astype(np.int32))
    w[far < LOWEST] = 0.0
    return w


def masses(weight: F64, vocab_size: int) -> Masses:
    """Weights in whole units."""
    return np.rint(weight * 2.0 ** unit_bits(vocab_size)).astype(np.int64)


def goal(share: float, total: int) -> int:
    """The mass that is at least that share of the total."""
    return min(math.ceil(share * float(total)), total)


def log(x: float) -> float:
    """The natural logarithm of a positive number, to a few ulp: twice the series of atanh, after powers of two."""
    m, power = math.frexp(x)
    if m < _SQRT_HALF:
        m, power = m * 2.0, power - 1
    z = (m - 1.0) / (m + 1.0)
    s = z * z
    p = 1.0 / 27
    for k in range(25, 0, -2):
        p = p * s + 1.0 / k
    return power * _LN_2 + 2.0 * z * p
