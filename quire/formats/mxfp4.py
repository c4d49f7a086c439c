"""MXFP4 (OCP microscaling): 32 codes of 4 bits, one exponent: w = 2 ** (e - 127) * value, with the values 0, 0.5, 1, 1.5, 2, 3,
4 and 6 and their negatives; here twice those, which are integers, times half the factor.

In a GGUF   0 e: u8    1 codes: 16 bytes, code i in the low nibble of byte i, code i + 16 in its high one
gpt-oss     codes in one tensor, code 2 i in the low nibble of byte i and code 2 i + 1 in its high one, exponents in another
"""

from __future__ import annotations

from functools import partial

import numpy as np

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale, Woven

NAME = "MXFP4"
GGML_TYPE = 39
TWICE = (0, 1, 2, 3, 4, 6, 8, 12)
TABLE = tuple(16 + sign * value for sign in (1, -1) for value in TWICE)  # 4 .. 28: five bits


def _codec(run: int) -> Codec:
    codes = Ints((Plane.packed(1, 32, run=run, bits=4),), offset=16, table=TABLE)
    return Codec(name=NAME, block=32, nbytes=17, group=32, bits=5, codes=codes, scale=Scale(0, exponent=128))


CODEC = _codec(run=16)
PAIRED = _codec(run=1)  # neighbours share a byte
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)


def weave(codes: Bytes, exponents: Bytes) -> Woven:
    """codes [n, K / 32, 16] and exponents [n, K / 32] as one matrix, put together when it is looked at."""
    n, blocks, _ = codes.shape
    return Woven((n, blocks * BLOCK), PAIRED, partial(_together, codes, exponents))


def _together(codes: Bytes, exponents: Bytes) -> Bytes:
    return np.concatenate((exponents[..., None], codes), axis=-1).reshape(codes.shape[0], -1)
