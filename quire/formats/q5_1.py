"""GGML Q5_1: 32 codes of 5 bits, one scale and one minimum: w = d * code + m.

0 d: f16    2 m: f16    4 fifth bits: u32, bit i is code i's    8 lower four bits: 16 bytes, laid as in Q4_1
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q5_1"
GGML_TYPE = 7
CODEC = Codec(
    name=NAME,
    block=32,
    nbytes=24,
    group=32,
    bits=5,
    codes=Ints((Plane.packed(8, 32, run=16, bits=4), Plane.packed(4, 32, run=1, bits=1, lift=4))),
    scale=Scale(0),
    bias=Scale(2),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
