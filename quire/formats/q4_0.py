"""GGML Q4_0: 32 codes of 4 bits, one scale: w = d * (code - 8).

0 d: f16    2 codes: 16 bytes, code i in the low nibble of byte i, code i + 16 in its high one
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q4_0"
GGML_TYPE = 2
CODEC = Codec(
    name=NAME,
    block=32,
    nbytes=18,
    group=32,
    bits=4,
    codes=Ints((Plane.packed(2, 32, run=16, bits=4),), offset=8),
    scale=Scale(0),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
