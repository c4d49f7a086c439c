"""Random numbers that depend on a seed and a position, and on nothing else.

A request's draw number i is a pure function of (seed, i): no generator state exists, so a preempted, resumed, retried or
reordered request draws the same numbers. The function is Philox4x64 with 10 rounds (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011) in plain integers: a few microseconds for the one draw a token needs, and the same
bits on every machine. `uniforms` is the same function for many requests at once.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ROUNDS = 10
_MULTIPLY_0, _MULTIPLY_1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_WEYL_0, _WEYL_1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 64-bit words for a 256-bit counter and a 128-bit key, least significant word first."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLY_0, c2 * _MULTIPLY_1
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def draw53(seed: int, position: int) -> int:
    """The draw of `seed` at output position `position`: a whole number in [0, 2**53).

    Seeds are taken modulo 2**64, so that -1 and 2**64 - 1 are the same stream.
    """
    return philox((position & _MASK, 0, 0, 0), (seed & _MASK, 0))[0] >> 11


def uniform(seed: int, position: int) -> float:
    """`draw53` as a multiple of 2**-53 in [0, 1)."""
    return draw53(seed, position) * 2.0**-53


def uniforms(seeds: U64, positions: U64) -> npt.NDArray[np.float64]:
    """`uniform` of each pair, bit for bit."""
    c0, k0 = positions.copy(), seeds.copy()
    c1, c2, c3, k1 = (np.zeros_like(c0) for _ in range(4))
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLY_0)
        high1, low1 = _multiply(c2, _MULTIPLY_1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += np.uint64(_WEYL_0)  # wraps, as it must
        k1 += np.uint64(_WEYL_1)
    return (c0 >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _multiply(a: U64, b: int) -> tuple[U64, U64]:
    """The high and the low word of a product, by halves of 32 bits."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a1, a0 = a >> half, a & low
    b1, b0 = np.uint64(b >> 32), np.uint64(b & 0xFFFFFFFF)
    middle = a1 * b0 + (a0 * b0 >> half)
    carry = (middle & low) + a0 * b1
    return a1 * b1 + (middle >> half) + (carry >> half), a * np.uint64(b)
