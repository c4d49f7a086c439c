"""GGML IQ1_S: 256 weights in 8 groups of 32, eight at a time from a codebook of 2048 patterns of -1, 0 and 1.

w = d * (2 * scale + 1) * (number + shift), shift = 1/8 or -1/8 for a group; in eighths the sums are -9 to 9
0 d: f16    2 pattern numbers, lower 8 bits: 32 bytes
34 per group: u16, four times 3 upper bits, 3 bits of scale, the sign of the shift
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats._grids import grid
from quire.layouts import Affine, Bytes

NAME = "IQ1_S"
GGML_TYPE = 19
BLOCK = 256
NBYTES = 50
CODEC = book.codec_of(NAME, group=32, bits=5, offset=9)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    packed = book.words(blocks, 34, 50, "<u2")
    upper = (packed[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(-1, 32)
    numbers = book.eights(grid(NAME))[blocks[:, 2:34] | upper << 8].view(np.uint8).reshape(-1, 8, 32)
    codes = 8 * numbers + np.where(packed >> 15, 0, 2).astype(np.uint8)[..., None]  # 8 (number + 1) + 1 -+ 1
    scales = (2 * (packed >> 12 & 7) + 1).astype(np.uint8)
    return book.assemble(book.half(blocks, 0, 8), scales, codes.reshape(-1, 256))


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
