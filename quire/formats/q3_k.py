"""GGML Q3_K: 256 codes of 3 bits in 16 groups of 16: w = (d * (scale - 32)) * (code - 4).

0 third bits: 32 bytes, bit 0 of each first, then bit 1, …    32 lower two bits: 64 bytes, laid as in Q2_K
96 scales: 16 x 6 bits; the lower four in 8 bytes, the upper two in 4    108 d: f16
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q3_K"
GGML_TYPE = 11
CODEC = Codec(
    name=NAME,
    block=256,
    nbytes=110,
    group=16,
    bits=3,
    codes=Ints((Plane.packed(32, 256, run=32, bits=2), Plane.packed(0, 256, run=32, bits=1, lift=2)), offset=4),
    scale=Scale(
        108, Ints((Plane.packed(96, 16, run=8, bits=4), Plane.packed(104, 16, run=4, bits=2, lift=4)), offset=32)
    ),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
