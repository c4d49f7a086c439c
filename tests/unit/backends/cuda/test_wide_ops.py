"""A layer with norms by head, a window, a cap, sinks, geglu and experts on the CUDA backend: fused, quantized, deterministic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.backends.cuda import ops as module
from quire.backends.cuda import products
from quire.backends.cuda.kernels.head_norm import head_norm
from quire.backends.cuda.kernels.product import product
from quire.backends.cuda.ops import CudaKernels
from quire.backends.torch.batch import DeviceBatch, Shared
from quire.backends.torch.elementwise import EXPRESSIONS
from quire.backends.torch.kernels import Sight
from tests.unit.backends.cuda.paged import error
from tests.unit.backends.cuda.test_cuda_backend import few_splits
from tests.unit.backends.test_torch_ops import KV, layer, matrix

GPU = torch.cuda.is_available()
BATCHES = ([(0, 18, [5, 9]), (0, 1, [3])], [(18, 1, [5, 9]), (1, 3, [3])])  # small: the interpreter walks every row
LIMITS = {"kv": KV, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 64}}


def open_cuda(dtype: str = "float32", **options):
    return open_backend("cuda", device="cuda" if GPU else "cpu", dtype=dtype, **options)


def compare(program, oracle, bound: float, batches=BATCHES) -> None:
    rng = np.random.default_rng(2)
    for rows in batches:
        batch = cases.ragged(rows)
        x = {"x": cases.floats(rng, batch.tokens, 64)}
        want, got = oracle.run(batch, x), program.run(batch, x)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_layer_with_everything(deterministic: bool, monkeypatch: pytest.MonkeyPatch):
    """Norms and rotation are one kernel with the write, and no op takes torch's way."""
    forward = layer(np.random.default_rng(0), limit=3.0, window=9)
    oracle = open_backend("reference").compile(forward, **LIMITS)
    monkeypatch.delitem(EXPRESSIONS, "softcap")
    program = open_cuda(deterministic=deterministic).compile(forward, **LIMITS)
    for name in ("attention", "moe", "attend"):
        monkeypatch.delattr(f"quire.backends.torch.kernels.TorchKernels.{name}")
    compare(program, oracle, 3e-3)


def test_few_rows_of_half_floats(monkeypatch: pytest.MonkeyPatch):
    """Products that gate with geglu, parts that the rotation adds before it normalizes heads, a router in float32."""
    kind = "bfloat16" if GPU else "float16"
    forward = layer(np.random.default_rng(0))
    oracle = open_backend("reference").compile(forward, **LIMITS)
    monkeypatch.setattr(CudaKernels, "skinny_rows", 16)
    monkeypatch.setattr(products, "skinny_shape", few_splits(products.skinny_shape))
    program = open_cuda(kind).compile(forward, **LIMITS)
    kinds, mix = [], module.mix
    monkeypatch.setattr(module, "mix", lambda x, logits, *a, **k: kinds.append(logits.dtype) or mix(x, logits, *a, **k))
    compare(program, oracle, 5e-2 if GPU else 5e-3, [[(at, 1, [2]), (at, 1, [5])] for at in range(2)])
    compare(program, oracle, 5e-2 if GPU else 5e-3, [[(2, 1, [2])]])
    assert set(kinds) == {torch.float32}


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
def test_quantized_layers(quantize: str):
    """The plain torch backend in float32 with the same codes."""
    kind = "bfloat16" if GPU else "float16"
    forward = layer(np.random.default_rng(3))
    oracle = open_backend("torch", device="cpu", dtype="float32", quantize=quantize).compile(forward, **LIMITS)
    cuda = open_cuda(kind, quantize=quantize)
    compare(cuda.compile(forward, **LIMITS), oracle, 8e-2 if quantize == "fp8" else 4e-2 if GPU else 1e-2, BATCHES[:1])
    assert "1 f32 (router)" in cuda.told()[0]


def test_a_shared_prefix_and_a_window():
    """Rows that share pages: read once with a cap and sinks, and by each row for itself with a window."""
    kv = cases.KV(layers=1, pages=16, page_size=16, kv_heads=2, head_dim=16)
    device = torch.device("cuda" if GPU else "cpu")
    kernels = CudaKernels(kv, device, torch.float32)
    rng = np.random.default_rng(6)
    cache = kernels.caches[0][0]
    for pages in cache.both:
        pages.copy_(torch.from_numpy(cases.floats(rng, *pages.shape)))
    batch = DeviceBatch.of(cases.ragged([(50, 1, [3, 1, 7, 2]), (40, 1, [3, 1, 5])]), device)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    shared = replace(batch, shared=Shared(ints(0, 2), ints(32), ints(3, 1)[None], ints(32, 32)), derived={})
    q = torch.from_numpy(cases.floats(rng, 2, 4, 16)).to(device)
    sinks = torch.from_numpy(cases.floats(rng, 4)).to(device)
    for sight in (Sight(), Sight(0, 3.0, sinks), Sight(12), Sight(30, 3.0, sinks)):
        want = super(CudaKernels, kernels).attend(q, batch, cache, 0.25, sight)
        for given in (batch, shared):
            assert error(kernels.attend(q, given, cache, 0.25, sight), want) < 2e-3, sight


def test_deterministic_matrices_by_head(device: str, half: torch.dtype):
    rng = np.random.default_rng(9)
    w = matrix(rng, 3 * 40, 72)

    def forward(ops, batch, inputs):
        return ops.head_linear(inputs["x"], w, 3)

    limits = {"kv": KV, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 3 * 72}}
    x = cases.floats(rng, 21, 3 * 72)
    want = open_backend("reference").compile(forward, **limits).run(cases.single(21), {"x": x})
    got = open_cuda(deterministic=True).compile(forward, **limits).run(cases.single(21), {"x": x})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    rows, weights = (torch.from_numpy(a).to(device).to(half) for a in (x, w.data))
    whole, one = (torch.empty(n, 120, device=device) for n in (16, 1))
    product(rows[:16], weights, whole, heads=3)
    product(rows[7:8], weights, one, heads=3)
    assert torch.equal(one[0], whole[7])
    with pytest.raises(ValueError, match="no bias"):
        product(rows[:1], weights, one, heads=3, bias=one[0])


def test_norms_of_parts_take_rows_of_a_wider_tensor(device: str):
    wide = torch.randn(5, 200, device=device)
    x, out = wide[:, 30:126], torch.full((5, 96), float("nan"), device=device)
    head_norm(x, torch.ones(32, device=device), 1e-6, out, heads=3)
    parts = x.reshape(5, 3, 32).double()
    want = parts / (parts.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert error(out, want.reshape(5, 96)) < 1e-6
    with pytest.raises(ValueError, match="a norm of 3 parts"):
        head_norm(x, torch.ones(33, device=device), 1e-6, out, heads=3)
