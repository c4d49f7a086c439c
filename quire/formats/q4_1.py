"""GGML Q4_1: 32 codes of 4 bits, one scale and one minimum: w = d * code + m.

0 d: f16    2 m: f16    4 codes: 16 bytes, code i in the low nibble of byte i, code i + 16 in its high one
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q4_1"
GGML_TYPE = 3
CODEC = Codec(
    name=NAME,
    block=32,
    nbytes=20,
    group=32,
    bits=4,
    codes=Ints((Plane.packed(4, 32, run=16, bits=4),)),
    scale=Scale(0),
    bias=Scale(2),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
