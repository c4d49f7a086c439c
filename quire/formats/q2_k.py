"""GGML Q2_K: 256 codes of 2 bits in 16 groups of 16: w = (d * scale) * code - (dmin * min).

0 scale (low nibble) and min (high nibble) of each group: 16 bytes
16 codes: 64 bytes, two runs of 32 bytes, each giving its lowest bit pairs first
80 d: f16    82 dmin: f16
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q2_K"
GGML_TYPE = 10
CODEC = Codec(
    name=NAME,
    block=256,
    nbytes=84,
    group=16,
    bits=2,
    codes=Ints((Plane.packed(16, 256, run=32, bits=2),)),
    scale=Scale(80, Ints((Plane.packed(0, 16, run=16, bits=4),))),
    bias=Scale(82, Ints((Plane.packed(0, 16, run=16, bits=4, shift=4),)), negate=True),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
