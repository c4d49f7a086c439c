"""GGML IQ4_NL: 32 codes of 4 bits, one scale, and a table of 16 numbers that lie closer near zero: w = d * table[code].

0 d: f16    2 codes: 16 bytes, code i in the low nibble of byte i, code i + 16 in its high one
Expanded, a block is one of Q8_0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.formats import _codebook as book
from quire.formats.q8_0 import CODEC as BYTES
from quire.layouts import Affine, Bytes

NAME = "IQ4_NL"
GGML_TYPE = 20
BLOCK = 32
NBYTES = 18
CODEC = replace(BYTES, name=NAME)
TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of plain codes."""
    out = np.empty((len(blocks), CODEC.nbytes), np.uint8)
    out[:, :2] = blocks[:, :2]
    numbers = TABLE.view(np.uint8)
    out[:, 2:18] = numbers[blocks[:, 2:] & 15]
    out[:, 18:] = numbers[blocks[:, 2:] >> 4]
    return out


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
