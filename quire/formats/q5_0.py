"""GGML Q5_0: 32 codes of 5 bits, one scale: w = d * (code - 16).

0 d: f16    2 fifth bits: u32, bit i is code i's    6 lower four bits: 16 bytes, laid as in Q4_0
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q5_0"
GGML_TYPE = 6
CODEC = Codec(
    name=NAME,
    block=32,
    nbytes=22,
    group=32,
    bits=5,
    codes=Ints((Plane.packed(6, 32, run=16, bits=4), Plane.packed(2, 32, run=1, bits=1, lift=4)), offset=16),
    scale=Scale(0),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
