"""Which native backends compute the same bits: those of one number here, whose system has the same sines."""

from __future__ import annotations

import functools
import hashlib
import math
import struct

NUMERICS = 1  # raised by who changes a bit of what kernels compute: pages of KV kept before are then not found


@functools.cache
def sines() -> str:
    """Which sine and cosine the system's mathematical library has: two that differ in any bit of these have other names."""
    angles = [position * 10000.0 ** (-i / 16) for position in (1, 7, 100, 1023, 4096, 31337, 131071) for i in range(64)]
    values = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()[:16]
