"""GGML IQ3_S: 256 weights in 8 groups of 32, four at a time from a codebook of 512 patterns of 1, 3, …, 15.

w = d * (2 * scale + 1) * magnitude * sign
0 d: f16    2 pattern numbers, lower 8 bits: 64 bytes    66 ninth bits: 8 bytes    74 signs: 32 bytes    106 scales: 8 nibbles
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ3_S"
GGML_TYPE = 21
BLOCK = 256
NBYTES = 110
CODEC = book.codec_of(NAME, group=32, bits=5, offset=15)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    ninth = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little")
    patterns = blocks[:, 2:66] | ninth.astype(np.uint16) << 8
    magnitudes = book.fours(grid(NAME))[patterns].view(np.uint64)
    codes = book.apply_signs(magnitudes, blocks[:, 74:106], 15)
    scales = 2 * book.nibbles(blocks[:, 106:]) + np.uint8(1)
    return book.assemble(book.half(blocks, 0), scales, codes)


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
