"""Rows in another order: the numbers of those rows, of every layout, whole and in parts, from arrays and from what becomes one."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from quire.formats.hub import _blocks
from quire.layouts import Affine, Dense, Layout
from quire.weights.picked import pick

N, K = 40, 64


def affine(name: str) -> Affine:
    codec = importlib.import_module(f"quire.formats.{name}").CODEC
    data = np.random.default_rng(1).integers(0, 60, (N, K // codec.block * codec.nbytes), dtype=np.uint8)
    return Affine(data, codec)


def made() -> Affine:
    """Blocks that are put together where they are read."""
    rng = np.random.default_rng(2)
    codes, scales = rng.integers(0, 256, (N, K // 2), dtype=np.uint8), rng.uniform(0.01, 1, (N, 2)).astype(np.float32)
    return _blocks.affine("made", 4, (N, K), lambda a, b: codes[a:b], lambda a, b: scales[a:b], 8, 32)


def float8() -> Layout:
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 120, (N, K), dtype=np.uint8), rng.uniform(0.01, 1, (N, 2)).astype(np.float32)
    return _blocks.float8(codes, lambda a, b: scales[a:b], (1, 32))


numbers = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
LAYOUTS: dict[str, Any] = {
    "f32": lambda: Dense(numbers, "f32"),
    "f16": lambda: Dense(numbers.astype(np.float16), "f16"),
    "bf16": lambda: Dense((numbers.view(np.uint32) >> 16).astype(np.uint16), "bf16"),
    "q8_0": lambda: affine("q8_0"),
    "q4_0": lambda: affine("q4_0"),
    "made": made,
    "float8": float8,
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_rows_that_were_asked_for(kind: str) -> None:
    whole = LAYOUTS[kind]()
    want = whole.dequantize()
    index = np.random.default_rng(4).permutation(N)[:29]
    got = pick(whole, index)
    assert got.shape == (29, K) and got.nbytes == whole.nbytes // N * 29
    np.testing.assert_array_equal(got.dequantize(), want[index])
    np.testing.assert_array_equal(got.dequantize(slice(5, 20)), want[index[5:20]])
    assert pick(whole, index[:0]).dequantize().shape == (0, K)
    np.testing.assert_array_equal(np.ascontiguousarray(got.data), np.asarray(whole.data)[index])
    with pytest.raises(ValueError, match="no array to share"):
        got.data.__array__(copy=False)
