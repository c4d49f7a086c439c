"""GGML F16: 16-bit floats, little endian."""

from __future__ import annotations

from quire.layouts import Bytes, Dense

NAME = "F16"
GGML_TYPE = 1
BLOCK = 1
NBYTES = 2
DTYPE = "f16"


def read(data: Bytes, shape: tuple[int, ...]) -> Dense:
    """The bytes of a tensor as a layout, without a copy."""
    return Dense.of(data, shape, DTYPE)
