"""GGML IQ3_XXS: 256 weights in 8 groups of 32, four at a time from a codebook of 256 patterns of 4, 12, …, 52 and 62.

w = d * (2 * scale + 1) / 4 * magnitude * sign; all magnitudes are even, so codes of 6 bits hold half of them
0 d: f16    2 pattern numbers: 64 bytes    66 per group: u32, four times 7 sign bits, the scale in the upper 4
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ3_XXS"
GGML_TYPE = 18
BLOCK = 256
NBYTES = 98
CODEC = book.codec_of(NAME, group=32, bits=6, offset=31)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    packed = book.words(blocks, 66, 98, "<u4")
    magnitudes = book.fours(grid(NAME))[blocks[:, 2:66]].view(np.uint64)
    signs = (packed[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(-1, 32)
    codes = book.apply_signs(magnitudes, book.EVEN[signs], 31)
    scales = (2 * (packed >> 28) + 1).astype(np.uint8)
    return book.assemble(book.half(blocks, 0, 2), scales, codes)


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
