"""MXFP4 (OCP microscaling): 32 codes of 4 bits, one exponent: w = 2 ** (e - 127) * value, with the values 0, 0.5, 1, 1.5, 2, 3,
4 and 6 and their negatives.

In a GGUF   0 e: u8    1 codes: 16 bytes, code i in the low nibble of byte i, code i + 16 in its high one
gpt-oss     codes in one tensor, code 2 i in the low nibble of byte i and code 2 i + 1 in its high one, exponents in another
Expanded, a block is 2 ** (e - 128) as a float32, which holds them all, and twice the values, which are integers, offset by 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from quire.formats import _codebook as book
from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "MXFP4"
GGML_TYPE = 39
BLOCK = 32
NBYTES = 17
CODEC = Codec(
    name=NAME,
    block=BLOCK,
    nbytes=36,
    group=32,
    bits=5,
    codes=Ints((Plane(np.arange(4, 36, dtype=np.uint16), np.zeros(32, np.uint8), 31),), offset=16),
    scale=Scale(0, wide=True),
    e2m1=True,
)
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
TABLE = np.array([16 + sign * value for sign in (1, -1) for value in TWICE], np.uint8)
# Two codes of a byte as two bytes, the low nibble's first.
PAIRS = np.stack((np.tile(TABLE, 16), np.repeat(TABLE, 16)), axis=-1).view("<u2").reshape(-1)


def expand(blocks: Bytes) -> Bytes:
    """Blocks of a GGUF as blocks of plain codes."""
    out = _factors(blocks)
    out[:, 4:20] = TABLE[blocks[:, 1:] & 15]
    out[:, 20:] = TABLE[blocks[:, 1:] >> 4]
    return out


def expand_pairs(blocks: Bytes) -> Bytes:
    """Blocks in which neighbours share a byte as blocks of plain codes."""
    out = _factors(blocks)
    out[:, 4:] = PAIRS[blocks[:, 1:]].view(np.uint8)
    return out


def _factors(blocks: Bytes) -> Bytes:
    """Blocks with nothing but their factors."""
    out = np.empty((len(blocks), CODEC.nbytes), np.uint8)
    factors = np.ldexp(np.float32(1), blocks[:, 0].astype(np.int32) - 128).astype("<f4")
    out[:, :4] = factors[:, None].view(np.uint8)
    return out


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, expanded where they are read."""
    return book.read(data, shape, NBYTES, CODEC, expand)


def join(codes: Bytes, exponents: Bytes) -> Affine:
    """codes [n, K / 32, 16] and exponents [n, K / 32] as one matrix, put together and expanded where it is read."""
    return Affine(cast(Bytes, book.Expanded(cast(Bytes, Apart(codes, exponents)), NBYTES, CODEC, expand_pairs)), CODEC)


@dataclass(frozen=True)
class Apart:
    """Rows of blocks whose exponents and codes lie apart, as far as `Expanded` looks at its source."""

    codes: Bytes  # [n, blocks, 16]
    exponents: Bytes  # [n, blocks]

    @property
    def shape(self) -> tuple[int, int]:
        return self.exponents.shape[0], self.exponents.shape[1] * NBYTES

    @property
    def parts(self) -> tuple[Bytes, Bytes]:
        """Both as rows of bytes, as they lie in the file."""
        return self.codes.reshape(len(self.codes), -1), self.exponents

    ndim = 2

    @property
    def size(self) -> int:
        return self.exponents.size * NBYTES

    def __getitem__(self, rows: slice) -> Apart:
        return Apart(self.codes[rows], self.exponents[rows])

    def reshape(self, *shape: int) -> Bytes:
        return np.concatenate((self.exponents[..., None], self.codes), axis=-1).reshape(*shape)
