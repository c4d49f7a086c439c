"""GGML IQ4_XS: 256 codes of 4 bits in 8 groups of 32, through the table of IQ4_NL: w = d * (scale - 32) * table[code].

0 d: f16    2 upper two bits of the scales: u16    4 lower four: 8 nibbles
8 codes: 128 bytes, 16 for a group, code i in the low nibble of byte i, code i + 16 in its high one
"""

from __future__ import annotations

import numpy as np

from quire.formats import _codebook as book
from quire.formats.iq4_nl import TABLE
from quire.layouts import Affine, Bytes

NAME = "IQ4_XS"
GGML_TYPE = 23
BLOCK = 256
NBYTES = 136
CODEC = book.codec_of(NAME, group=32, bits=8, offset=128, signed_scales=True)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    numbers = TABLE.view(np.uint8) ^ np.uint8(0x80)  # 128 too high
    packed = blocks[:, 8:].reshape(-1, 8, 1, 16)
    codes = numbers[np.concatenate((packed & 15, packed >> 4), axis=2)].reshape(-1, 256)
    upper = book.words(blocks, 2, 4, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (book.nibbles(blocks[:, 4:8]) | upper.astype(np.uint8) << np.uint8(4)) - np.uint8(32)
    return book.assemble(book.half(blocks, 0), scales, codes)


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
