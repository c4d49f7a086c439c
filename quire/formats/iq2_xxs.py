"""GGML IQ2_XXS: 256 weights in 8 groups of 32, eight at a time from a codebook of 256 patterns of 8, 25 and 43.

w = d * (2 * scale + 1) / 8 * magnitude * sign
0 d: f16    2 per group: four pattern numbers (a byte each), then u32: four times 7 sign bits, the scale in the upper 4
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ2_XXS"
GGML_TYPE = 16
BLOCK = 256
NBYTES = 66
CODEC = book.codec_of(NAME, group=32, bits=8, offset=128)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    packed = book.words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    patterns = np.ascontiguousarray(packed[..., 0]).view(np.uint8).reshape(-1, 32)
    signs = (packed[..., 1:] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(-1, 32)
    codes = book.apply_signs(book.eights(grid(NAME))[patterns], book.EVEN[signs], 128)
    scales = (2 * (packed[..., 1] >> 28) + 1).astype(np.uint8)
    return book.assemble(book.half(blocks, 0, 8), scales, codes)


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
