"""GGML TQ1_0: 256 weights that are -1, 0 or 1, five in a byte, one scale: w = d * (digit - 1).

A byte is a fraction of 256 whose first five digits in base 3 are the numbers: digit k is the carry of byte * 3^k * 3.
0 digits: 32 bytes that give their first digits, then their second ones, …; then 16 bytes that do the same
48 digits: 4 bytes with four each    52 d: f16
Expanded, a block has the two-bit codes of TQ2_0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.formats import _codebook as book
from quire.formats.tq2_0 import CODEC as PAIRS
from quire.layouts import Affine, Bytes

NAME = "TQ1_0"
GGML_TYPE = 34
BLOCK = 256
NBYTES = 54
CODEC = replace(PAIRS, name=NAME)
_POWERS = np.array([1, 3, 9, 27, 81], np.uint32)
DIGITS = ((np.arange(256, dtype=np.uint32)[:, None] * _POWERS & 255) * 3 >> 8).astype(np.uint8)  # [256, 5]


def expand(blocks: Bytes) -> Bytes:
    """Blocks of the file as blocks of two-bit codes."""
    runs = (blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)
    digits = [DIGITS[run][..., :count].transpose(0, 2, 1).reshape(len(blocks), -1) for run, count in runs]
    codes = np.concatenate(digits, axis=1).reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    out = np.empty((len(blocks), CODEC.nbytes), np.uint8)
    out[:, :64] = np.bitwise_or.reduce(codes, axis=2).reshape(-1, 64)
    out[:, 64:] = blocks[:, 52:]
    return out


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)
