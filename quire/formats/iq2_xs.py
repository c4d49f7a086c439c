"""GGML IQ2_XS: 256 weights in 16 groups of 16, eight at a time from a codebook of 512 patterns of 8, 25 and 43.

w = d * (2 * scale + 1) / 8 * magnitude * sign
0 d: f16    2 per eight weights: u16, pattern number in the lower 9 bits, 7 sign bits    66 scales: 16 nibbles
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ2_XS"
GGML_TYPE = 17
BLOCK = 256
NBYTES = 74
CODEC = book.codec_of(NAME, group=16, bits=8, offset=128)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    packed = book.words(blocks, 2, 66, "<u2")
    codes = book.apply_signs(book.eights(grid(NAME))[packed & 511], book.EVEN[packed >> 9], 128)
    scales = 2 * book.nibbles(blocks[:, 66:]) + np.uint8(1)
    return book.assemble(book.half(blocks, 0, 8), scales, codes)


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
