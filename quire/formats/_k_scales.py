"""The eight 6-bit scales and eight 6-bit mins that Q4_K and Q5_K share, packed into bytes 4 to 15 of a block.

        low four bits                 high two bits
scale   0-3: bytes 4-7, low nibble    bytes 4-7, bits 4-5
        4-7: bytes 12-15, low nibble  bytes 4-7, bits 6-7
min     0-3: bytes 8-11, low nibble   bytes 8-11, bits 4-5
        4-7: bytes 12-15, high nibble bytes 8-11, bits 6-7
"""

from __future__ import annotations

import numpy as np

from quire.layouts import Ints, Plane


def _ints(first: int, shift: int) -> Ints:
    """The eight numbers whose own bytes start at `first`, and whose nibbles in bytes 12 to 15 lie at bit `shift`."""
    own = list(range(first, first + 4))
    low = Plane(np.array([*own, 12, 13, 14, 15], np.uint16), np.array([0] * 4 + [shift] * 4, np.uint8), 0xF)
    high = Plane(np.array([*own, *own], np.uint16), np.array([4] * 4 + [6] * 4, np.uint8), 0x3, lift=4)
    return Ints((low, high))


SCALES = _ints(4, 0)
MINS = _ints(8, 4)
