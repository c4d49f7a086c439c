"""GGML Q5_K: 256 codes of 5 bits in 8 groups of 32: w = (d * scale) * code - (dmin * min).

0 d: f16    2 dmin: f16    4 scales and mins: 12 bytes, 6 bits each (`_k_scales`)
16 fifth bits: 32 bytes, bit 0 of each first, then bit 1, …    48 lower four bits: 128 bytes, laid as in Q4_K
"""

from __future__ import annotations

from quire.formats._k_scales import MINS, SCALES
from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q5_K"
GGML_TYPE = 13
CODEC = Codec(
    name=NAME,
    block=256,
    nbytes=176,
    group=32,
    bits=5,
    codes=Ints((Plane.packed(48, 256, run=32, bits=4), Plane.packed(16, 256, run=32, bits=1, lift=4))),
    scale=Scale(0, SCALES),
    bias=Scale(2, MINS, negate=True),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
