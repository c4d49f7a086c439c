"""Linear and embed over the layouts that quantized folders have: every kernel set against the reference, bitwise the same in any batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.batch import Batch
from quire.backends.choose import open_backend
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Float8, Layout
from tests.unit.backends.test_conformance import NEEDS_TORCH, VARIANTS
from tests.unit.formats.test_hub import layout_of

pytest.importorskip("torch", reason="needs the test extra: torch writes bfloat16 and e4m3")

INTS = ("gptq", "gptq asym", "gptq row", "gptq 8", "gptq 8 asym", "awq", "ct asym", "ct int8")
FLOATS = ("fp8 tiles", "fp8 tensor", "fbgemm")


def maker(kind: str, folder: Path) -> cases.MakeWeight:
    def make(n: int, k: int, rng: np.random.Generator) -> Layout:
        whole = layout_of(kind, -(-n // 8) * 8, k, folder)
        return replace(whole, data=whole.data[:n])

    return make


def compare(case: cases.Case, backend: str, loose: float = 1.0, **settings: object) -> None:
    limits = {"kv": case.kv, "max_tokens": 64, "max_rows": 64, "inputs": case.widths}
    oracle = open_backend("reference").compile(case.forward, **limits)  # type: ignore[arg-type]
    program = open_backend(backend, **settings).compile(case.forward, **limits)  # type: ignore[arg-type]
    for step in case.steps:
        want, got = oracle.run(step.batch, step.inputs), program.run(step.batch, step.inputs)
        error = np.abs(got.astype(np.float64) - want)
        assert (error <= loose * np.broadcast_to(step.bound(want), error.shape)).all(), (case.name, error.max())


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v[2] == 1], ids=lambda v: str(v[1]))
@pytest.mark.parametrize("kind", INTS)
def test_native_linear_and_embed(kind: str, variant: tuple[str, str | None, int], tmp_path: Path) -> None:
    weights, rng = {kind: maker(kind, tmp_path)}, np.random.default_rng(0)
    for case in (*cases.linear_cases(weights, rng), *cases.embed_cases(weights, rng)):  # embed: exactly the numbers
        compare(case, "native", isa=variant[1])


@NEEDS_TORCH
@pytest.mark.parametrize("kind", INTS + FLOATS)
def test_torch_linear_and_embed(kind: str, tmp_path: Path) -> None:
    weights, rng = {kind: maker(kind, tmp_path)}, np.random.default_rng(0)
    for case in (*cases.linear_cases(weights, rng), *cases.embed_cases(weights, rng)):
        compare(case, "torch", device="cpu", dtype="float32")


@pytest.mark.parametrize("kind", FLOATS)
def test_native_holds_fp8_as_the_nearest_bfloat16(kind: str, tmp_path: Path) -> None:
    import torch

    layout = layout_of(kind, 40, 256, tmp_path)
    assert isinstance(layout, Float8)
    nearest = torch.from_numpy(layout.dequantize()).bfloat16()
    rounded = Dense(nearest.view(torch.int16).numpy().view(np.uint16), "bf16")

    def forward(ops: Ops, batch: Batch, _: Mapping[str, Tensor], table: Layout = layout) -> Tensor:
        return ops.linear(ops.embed(batch.ids, table), table)

    limits = {"kv": cases.NO_KV, "max_tokens": 64, "max_rows": 64}
    ids = np.random.default_rng(0).integers(0, 40, 33)
    backend = open_backend("native")
    whole = backend.compile(forward, **limits).run(cases.single(33, ids))
    want = open_backend("native").compile(
        lambda ops, batch, inputs: forward(ops, batch, inputs, rounded), **limits
    ).run(cases.single(33, ids))  # fmt: skip
    np.testing.assert_array_equal(whole, want)  # the same bits as a file of bfloat16
    exact = layout.dequantize()[ids] @ layout.dequantize().T
    assert np.linalg.norm(whole - exact) / np.linalg.norm(exact) < 4e-3
    assert backend.estimate(forward, **limits).weights == 0  # type: ignore[attr-defined]  # all of it is here
    for first, end in ((0, 1), (1, 17), (17, 33)):
        part = backend.compile(forward, **limits).run(cases.single(end - first, ids[first:end]))
        np.testing.assert_array_equal(part, whole[first:end])


def test_the_estimate_is_what_is_packed(tmp_path: Path) -> None:
    from quire.backends.native.backend import NativeBackend

    for kind in ("gptq asym", "gptq", "fp8 tiles"):
        layout, backend = layout_of(kind, 40, 256, tmp_path), NativeBackend()

        def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor], table: Layout = layout) -> Tensor:
            return ops.linear(inputs["x"], table)

        limits = {"kv": cases.NO_KV, "max_tokens": 16, "max_rows": 16, "inputs": {"x": 256}}
        needs = backend.estimate(forward, **limits)
        backend.compile(forward, **limits)
        assert needs.weights == backend.packed_bytes
