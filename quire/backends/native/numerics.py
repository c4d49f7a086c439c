"""The identity of the native backend's numbers: backends with the same NUMERICS, on systems with the same sines, compute the
same bits."""

from __future__ import annotations

import functools
import hashlib
import math
import struct

NUMERICS = 2  # raised by who changes a bit of what kernels compute: pages of KV kept before are then not found


@functools.cache
def sines() -> str:
    """The name of the system's sine and cosine: two libraries that differ in any bit of these have different names."""
    angles = [position * 10000.0 ** (-i / 16) for position in (1, 7, 100, 1023, 4096, 31337, 131071) for i in range(64)]
    values = [f(angle) for angle in angles for f in (math.sin, math.cos)]
    return hashlib.sha256(struct.pack(f"<{len(values)}d", *values)).hexdigest()[:16]
