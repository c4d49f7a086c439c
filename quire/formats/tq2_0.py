"""GGML TQ2_0: 256 codes of 2 bits, one scale, for weights that are -1, 0 or 1: w = d * (code - 1).

0 codes: 64 bytes, two runs of 32 bytes, each giving its lowest bit pairs first    64 d: f16
"""

from __future__ import annotations

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

NAME = "TQ2_0"
GGML_TYPE = 35
CODEC = Codec(
    name=NAME,
    block=256,
    nbytes=66,
    group=32,
    bits=2,
    codes=Ints((Plane.packed(0, 256, run=32, bits=2),), offset=1),
    scale=Scale(64),
)
BLOCK = CODEC.block
NBYTES = CODEC.nbytes


def read(data: Bytes, shape: tuple[int, ...]) -> Affine:
    """The bytes of a tensor as a layout, without a copy."""
    return Affine.of(data, shape, CODEC)
