"""GGML Q4_K: 256 codes of 4 bits in 8 groups of 32: w = (d * scale) * code - (dmin * min).

0 d: f16    2 dmin: f16    4 scales and mins: 12 bytes, 6 bits each (`_k_scales`)
16 codes: 128 bytes, four runs of 32 bytes, each giving its low nibbles first
"""

from __future__ import annotations

from quire.formats._k_scales import MINS, SCALES
from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "Q4_K"
GGML_TYPE = 12
CODEC = Codec(
    name=NAME,
    block=256,
    nbytes=144,
    group=32,
    bits=4,
    codes=Ints((Plane.packed(16, 256, run=32, bits=4),)),
    scale=Scale(0, SCALES),
    bias=Scale(2, MINS, negate=True),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
