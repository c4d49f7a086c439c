"""GGML Q6_K: 256 codes of 6 bits in 16 groups of 16: w = (d * scale) * (code - 32).

0 lower four bits: 128 bytes, two runs of 64 bytes, each giving its low nibbles first
128 upper two bits: 64 bytes, laid as in Q2_K    192 scales: 16 x i8    208 d: f16
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q6_K"
GGML_TYPE = 14
CODEC = Codec(
    name=NAME,
    block=256,
    nbytes=210,
    group=16,
    bits=6,
    codes=Ints((Plane.packed(0, 256, run=64, bits=4), Plane.packed(128, 256, run=32, bits=2, lift=4)), offset=32),
    scale=Scale(208, Ints((Plane.packed(192, 16, run=16, bits=8, flip=0x80),), offset=128)),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
