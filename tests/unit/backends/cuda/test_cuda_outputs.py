"""Rows that a program of the CUDA backend keeps, where its kernels add residuals up in place.

Compiled on a GPU; in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.choose import open_backend
from quire.backends.cuda.ops import CudaKernels
from quire.backends.ops import KV
from quire.backends.outputs import Hidden
from tests.unit.backends.native_kit import ragged
from tests.unit.runner.tiny_llama import KV_HEADS, LAYERS, TinyLlama

GPU = torch.cuda.is_available()
MODEL, POOL = TinyLlama(head_dim=16), KV(LAYERS, 8, 16, KV_HEADS, 16)
IDS = [int(x) for x in np.random.default_rng(1).integers(3, 80, 22)]
EVERY = [Hidden(layer) for layer in range(LAYERS + 1)]
STEPS = [([(IDS[:20], 0, (3, 5))], [19]), ([(IDS[20:21], 20, (3, 5))], [0]), ([(IDS[21:22], 21, (3, 5))], [0])]


def run(
    name: str, dtype: str, keep: Sequence[Hidden], **options: Any
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Logits of a prompt and of decode rows, and what was kept of each step."""
    backend = open_backend(name, device="cuda" if GPU else "cpu", dtype=dtype, **options)
    program = backend.compile(MODEL.forward, kv=POOL, max_tokens=32, max_rows=32, keep=keep)
    logits, rows = [], []
    for parts, wanted in STEPS:
        batch = ragged(parts)
        batch.logit_rows = np.array(wanted, np.int32)
        logits.append(np.array(program.run(batch)))
        rows.append([program.hidden(which) for which in keep])
    return logits, rows


@pytest.mark.parametrize("deterministic", [False, True])
def test_sums_are_kept_before_they_are_added_to(
    half: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
):
    in_place = 0
    original = CudaKernels.linear_add_norm

    def watched(self: Any, x: Any, weight: Any, bias: Any, residual: torch.Tensor, *args: Any, **told: Any) -> Any:
        nonlocal in_place
        total, normed = original(self, x, weight, bias, residual, *args, **told)
        in_place += total.data_ptr() == residual.data_ptr()
        return total, normed

    dtype = str(half).removeprefix("torch.")
    monkeypatch.setattr(CudaKernels, "linear_add_norm", watched)
    plain, _ = run("cuda", dtype, [], deterministic=deterministic)
    in_place, unasked = 0, in_place
    keep = [*EVERY[:-1], Hidden(1, taken=True)]
    if deterministic:  # else the last layer, computed for more rows, may be by another kernel
        keep += [EVERY[-1], Hidden(LAYERS, taken=True)]
    logits, rows = run("cuda", dtype, keep, deterministic=deterministic)
    assert deterministic or in_place == unasked > 0  # the same kernels, or nothing would be shown here
    for got, want in zip(logits, plain, strict=True):
        np.testing.assert_array_equal(got, want)
    for step, kept in zip(reference(keep), rows, strict=True):
        for want, got in zip(step, kept, strict=True):
            assert np.abs(got - want).max() < 2e-2 * max(1.0, np.abs(want).max())


def reference(keep: Sequence[Hidden]) -> list[list[np.ndarray]]:
    """What the reference keeps of each step."""
    program = open_backend("reference").compile(MODEL.forward, kv=POOL, max_tokens=32, max_rows=32, keep=keep)
    rows = []
    for parts, wanted in STEPS:
        batch = ragged(parts)
        batch.logit_rows = np.array(wanted, np.int32)
        program.run(batch)
        rows.append([program.hidden(which) for which in keep])
    return rows


def test_the_last_layer_can_be_kept_too(half: torch.dtype):
    _, rows = run("cuda", str(half).removeprefix("torch."), [Hidden(LAYERS), Hidden(LAYERS, taken=True)])
    exact = reference([Hidden(LAYERS)])
    for (parts, wanted), (every, taken), (want,) in zip(STEPS, rows, exact, strict=True):
        assert every.shape == (len(parts[0][0]), want.shape[1])
        np.testing.assert_array_equal(taken, every[wanted])
        assert np.abs(every - want).max() < 2e-2 * max(1.0, np.abs(want).max())
