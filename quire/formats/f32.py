"""GGML F32: 32-bit floats, little endian."""

from __future__ import annotations

from quire.layouts import Bytes, Dense

NAME = "F32"
GGML_TYPE = 0
BLOCK = 1
NBYTES = 4
DTYPE = "f32"


def read(data: Bytes, shape: tuple[int, ...]) -> Dense:
    """The bytes of a tensor as a layout, without a copy."""
    return Dense.of(data, shape, DTYPE)
