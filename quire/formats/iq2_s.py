"""GGML IQ2_S: 256 weights in 16 groups of 16, eight at a time from a codebook of 1024 patterns of 8, 25 and 43.

w = d * (2 * scale + 1) / 8 * magnitude * sign
0 d: f16    2 pattern numbers, lower 8 bits: 32 bytes    34 signs: 32 bytes    66 upper 2 bits: 8 bytes    74 scales: 16 nibbles
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ2_S"
GGML_TYPE = 22
BLOCK = 256
NBYTES = 82
CODEC = book.codec_of(NAME, group=16, bits=8, offset=128)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    upper = (blocks[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 32)
    patterns = blocks[:, 2:34] | upper.astype(np.uint16) << 8
    codes = book.apply_signs(book.eights(grid(NAME))[patterns], blocks[:, 34:66], 128)
    scales = 2 * book.nibbles(blocks[:, 74:]) + np.uint8(1)
    return book.assemble(book.half(blocks, 0, 8), scales, codes)


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
