"""GGML Q8_0: 32 signed bytes, one scale: w = d * code.

0 d: f16    2 codes: 32 x i8 (read as unsigned, 128 too high)
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q8_0"
GGML_TYPE = 8
CODEC = Codec(
    name=NAME,
    block=32,
    nbytes=34,
    group=32,
    bits=8,
    codes=Ints((Plane.packed(2, 32, run=32, bits=8, flip=0x80),), offset=128),
    scale=Scale(0),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
