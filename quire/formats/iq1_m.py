"""GGML IQ1_M: 256 weights in 16 groups of 16, eight at a time from the codebook of IQ1_S.

w = d * (2 * scale + 1) * (number + shift), shift = 1/8 or -1/8 for each eight; in eighths the sums are -9 to 9
0 pattern numbers, lower 8 bits: 32 bytes    32 per eight a nibble: 3 upper bits, the sign of the shift
48 four u16: four scales of 3 bits each, and in the upper nibbles d, an f16 in four pieces, lowest first
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ1_M"
GGML_TYPE = 29
BLOCK = 256
NBYTES = 56
CODEC = book.codec_of(NAME, group=16, bits=5, offset=9)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    high = book.nibbles(blocks[:, 32:48])
    patterns = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    numbers = book.eights(grid("IQ1_S"))[patterns].view(np.uint8).reshape(-1, 32, 8)
    codes = 8 * numbers + np.where(high & 8, 0, 2).astype(np.uint8)[..., None]  # 8 (number + 1) + 1 -+ 1
    packed = book.words(blocks, 48, 56, "<u2")
    scales = (2 * (packed[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7) + 1).astype(np.uint8)
    pieces = (packed >> 12) << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(pieces, axis=1).astype("<u2").view("<f2").astype(np.float32)
    return book.assemble(d * np.float32(0.125), scales.reshape(-1, 16), codes.reshape(-1, 256))


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
