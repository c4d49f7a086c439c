"""GGML BF16: the upper halves of 32-bit floats, little endian."""

from __future__ import annotations

from quire.layouts import Bytes, Dense

NAME = "BF16"
GGML_TYPE = 30
BLOCK = 1
NBYTES = 2
DTYPE = "bf16"


def read(data: Bytes, shape: tuple[int, ...]) -> Dense:
    """The bytes of a tensor as a layout, without a copy."""
    return Dense.of(data, shape, DTYPE)
