"""MXFP4 against the gguf package and against transformers, bit for bit, with every exponent and every code."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from quire.formats import mxfp4
from quire.layouts import Affine


def test_every_exponent_and_code_of_a_gguf() -> None:
    data = np.random.default_rng(0).integers(0, 256, (256, 4 * mxfp4.NBYTES), np.uint8)
    data[:, :: mxfp4.NBYTES] = np.arange(256)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = gguf.quants.dequantize(data, GGMLQuantizationType.MXFP4)
    got = mxfp4.read(data.reshape(-1), (256, 128)).dequantize()
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


def test_codes_and_exponents_that_lie_apart() -> None:
    torch = pytest.importorskip("torch", reason="needs the test extra: torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (70, 3, 16), np.uint8)
    exponents = np.arange(1, 211, dtype=np.uint8).reshape(70, 3)  # as far as transformers goes without infinities
    layout = mxfp4.join(codes, exponents)
    assert layout.shape == (70, 96) and layout.nbytes == layout.data.nbytes
    want = convert_moe_packed_tensors(
        torch.from_numpy(codes[None]), torch.from_numpy(exponents[None]), dtype=torch.float32
    )
    assert np.array_equal(layout.dequantize(), want[0].T.numpy())
    assert np.array_equal(layout.dequantize(slice(5, 9)), want[0].T.numpy()[5:9])
    every_other = mxfp4.join(codes[::2], exponents[::2])  # rows of gate and up alternate in a file
    assert np.array_equal(every_other.dequantize(), want[0].T.numpy()[::2])


def test_nothing_is_put_together_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = mxfp4.expand_pairs
    monkeypatch.setattr(mxfp4, "expand_pairs", lambda blocks: made.append(len(blocks)) or real(blocks))
    layout = mxfp4.join(np.zeros((8, 2, 16), np.uint8), np.full((8, 2), 127, np.uint8))
    part = Affine(layout.data[2:5], layout.codec)
    assert (layout.shape, part.shape, layout.codec.bits) == ((8, 64), (3, 64), 5) and not made
    assert np.ascontiguousarray(part.data).shape == (3, 2 * mxfp4.CODEC.nbytes) and made == [6]
