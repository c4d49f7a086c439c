"""Several KV pools on the CUDA backend: what each layer reads and writes is its own group's.

Compiled on a GPU; in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.backends import cases
from quire.backends.cases import groups
from quire.backends.choose import open_backend
from quire.backends.cuda.ops import CudaKernels
from quire.backends.ops import KV, Ops, Tensor
from quire.backends.torch.batch import DeviceBatch, DeviceTable, Shared
from quire.layouts import Dense, Rope

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
WINDOWS = [(0, 20), (12, 33), (0, 0, 17)]


def small(windows: tuple[int, ...], dtype: str = "f16") -> cases.Case:
    """A case of group_cases, or on a slow machine a small one."""
    sizes = {} if GPU else {"turns": groups.FEW, "heads": 2, "kv_heads": 1, "dim": 16}
    return groups.grouped(windows, dtype, np.random.default_rng(5), **sizes)


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("windows", "dtype", "deterministic"),
    [*((w, "f16", False) for w in WINDOWS), ((0, 20), "fp8", False), *((w, "f16", True) for w in WINDOWS[:2])],
)
def test_conformance(windows: tuple[int, ...], dtype: str, deterministic: bool) -> None:
    """Pages behind a window are gone from the tables, and other sequences have them by then."""
    case = small(windows, dtype)
    limits = {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": case.widths}
    oracle = open_backend("reference").compile(case.forward, **limits)
    backend = open_backend("cuda", device=DEVICE, dtype="float32", deterministic=deterministic)
    program = backend.compile(case.forward, **limits)
    for i, step in enumerate(case.steps):
        want, got = oracle.run(step.batch, step.inputs), program.run(step.batch, step.inputs)
        assert error(got, want) < (4e-3 if dtype == "fp8" else 2e-3), f"step {i}"


@pytest.mark.parametrize("backend", ["torch", "cuda"])
def test_rotation_and_write_go_where_the_group_says(backend: str) -> None:
    """Layers whose q, k and v are one product, with norms of heads: in turns of one group and of another."""
    case = small((0, 20))
    kv, rng = case.kv, np.random.default_rng(1)
    heads, kv_heads, dim = (4 if GPU else 2), kv.kv_heads, kv.head_dim

    def weight(n: int, k: int) -> Dense:
        return Dense((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32), "f32")

    wide, narrow = heads * dim, kv_heads * dim
    q, k, v, o = (weight(*shape) for shape in ((wide, 32), (narrow, 32), (narrow, 32), (32, wide)))
    norm, own = (Dense((1.0 + 0.1 * rng.standard_normal(n)).astype(np.float32), "f32") for n in (32, dim))
    rope = Rope((1.0 / 100.0 ** (np.arange(0, dim, 2) / dim)).astype(np.float32), dim, False)

    def forward(ops: Ops, batch: cases.Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"]
        for i in range(2):
            h = ops.rms_norm(x, norm, 1e-5)
            queries = ops.rope(ops.rms_norm(ops.linear(h, q), own, 1e-5, heads), batch.pos, rope, heads)
            keys = ops.rope(ops.rms_norm(ops.linear(h, k), own, 1e-5, kv_heads), batch.pos, rope, kv_heads)
            place = {"layer": 1, "group": i, "window": 20 if i else None}
            a = ops.attention(queries, keys, ops.linear(h, v), batch, heads=heads, scale=dim**-0.5, **place)
            x = ops.add(x, ops.linear(a, o))
        return ops.take(x, batch.logit_rows)

    limits = {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": {"x": 32}}
    oracle = open_backend("reference").compile(forward, **limits)
    program = open_backend(backend, device=DEVICE, dtype="float32").compile(forward, **limits)
    for i, step in enumerate(case.steps):
        x = {"x": cases.floats(rng, step.batch.tokens, 32)}
        assert error(program.run(step.batch, x), oracle.run(step.batch, x)) < 3e-3, f"step {i}"


def test_a_shared_prefix_is_the_first_groups() -> None:
    """Rows that share pages in one pool: elsewhere those page numbers mean other tokens, and are not looked at."""
    kv = KV(1, 16, 16, 2, 16, more=(KV(1, 12, 16, 2, 16), KV(1, 12, 16, 2, 16, window=20)))
    device = torch.device(DEVICE)
    kernels = CudaKernels(kv, device, torch.float32)
    rng = np.random.default_rng(6)
    for (cache,) in kernels.caches:
        for pages in cache.both:
            pages.copy_(torch.from_numpy(cases.floats(rng, *pages.shape)))
    other = DeviceBatch.of(cases.ragged([(50, 1, [5, 2, 9, 0]), (40, 1, [11, 4, 8])]), device)
    table = DeviceTable(other.pages, other.write)
    batch = DeviceBatch.of(cases.ragged([(50, 1, [3, 1, 7, 2]), (40, 1, [3, 1, 5])]), device)
    batch = replace(batch, more=(table, table))
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)  # noqa: E731
    shared = replace(batch, shared=Shared(ints(0, 2), ints(32), ints(3, 1)[None], ints(32, 32)), derived={})
    q = torch.from_numpy(cases.floats(rng, 2, 4, 16)).to(device)
    seen = []
    for (cache,) in kernels.caches:
        want = super(CudaKernels, kernels).attend(q, batch, cache, 0.25)
        got = kernels.attend(q, shared, cache, 0.25)
        assert error(got.cpu().numpy(), want.cpu().numpy()) < 2e-3, cache.group
        seen.append(want)
    assert not torch.allclose(seen[0], seen[1], atol=0.1) and not torch.allclose(seen[1], seen[2], atol=0.1)
