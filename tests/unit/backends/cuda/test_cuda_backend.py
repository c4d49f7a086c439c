"""The CUDA backend against the reference: every op of the table, and a whole model against the plain torch backend.

Compiled on a GPU; in Triton's interpreter elsewhere, with float16 (the interpreter has no bfloat16 products).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.backends.cuda import products as module
from quire.backends.cuda.ops import CudaKernels, side_by_side
from quire.layouts import Dense, Rope
from tests.unit.backends.test_conformance import CASES as ALL
from tests.unit.backends.test_conformance import PLAIN
from tests.unit.models import tiny
from tests.unit.models.programs import Loaded

GPU = torch.cuda.is_available()
CASES = [c for c in PLAIN if not any(own.state for own in c.kv.groups)]  # states: test_recurrent.py
CODES = [
    pytest.param(c, id=c.name, marks=[pytest.mark.large] if "long" in c.name else [])
    for c in ALL
    if c.name in ("attention-9of3x64-fp8", "attention-14of2x40-int8", "attention-long-8of1x24-fp8")
]
TORCHS = ("linear", "embed", "add", "take", "scale", "join", "gelu", "head_linear")  # ops that are torch's own
# What the interpreter is too slow for (smaller ones are in test_latent.py, test_experts.py and test_attention.py), and
# what differs only in the file's format, which is gone when weights are loaded.
SLOW = (
    "moe-bf16", "moe-q", "moe-f32-softmax", "moe-f32-groups", "latent_attention", "attention-6of2x256-window",
    "attention-4of4x64-window", "attention-long-9of3x64", "attention-long-4of4x128",
)  # fmt: skip
OWN = [c for c in CASES if not c.name.startswith(TORCHS + SLOW)]


def open_cuda(dtype: str = "float32"):
    return open_backend("cuda", device="cuda" if GPU else "cpu", dtype=dtype)


@pytest.mark.parametrize("case", CASES if GPU else OWN, ids=lambda c: c.name)
def test_conformance(case: cases.Case):
    """Float32 in, float32 out; products on the tensor cores may round their inputs to 11 bits."""
    limits = {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": case.widths}
    oracle = open_backend("reference").compile(case.forward, **limits)
    program = open_cuda().compile(case.forward, **limits)
    for i, step in enumerate(case.steps if GPU or not case.name.startswith("moe") else case.steps[:2]):
        expected = oracle.run(step.batch, step.inputs)
        got = program.run(step.batch, step.inputs)
        assert got.shape == expected.shape
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 2e-3, f"step {i}: {error:g}"


@pytest.mark.parametrize("case", CODES)
def test_conformance_of_cached_codes(case: cases.Case):
    """Queries become half floats there, and a code may fall on the other side of a border."""
    limits = {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": case.widths}
    oracle = open_backend("reference").compile(case.forward, **limits)
    program = open_cuda().compile(case.forward, **limits)
    for i, step in enumerate(case.steps):
        expected, got = oracle.run(step.batch, step.inputs), program.run(step.batch, step.inputs)
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 4e-3, f"step {i}: {error:g}"


def block(rope: Rope, rng: np.random.Generator):
    """A layer whose q, k and v are one product, so that rotation, write and attention are one chain of kernels."""

    def weight(n: int, k: int) -> Dense:
        return Dense((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32), "f32")

    q, k, v, o, gate, up, down = (
        weight(n, m) for n, m in ((64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96))
    )
    norm = Dense((1.0 + 0.1 * rng.standard_normal(64)).astype(np.float32), "f32")

    def forward(ops, batch, inputs):
        x = inputs["x"]
        for layer in range(2):
            h = ops.rms_norm(x, norm, 1e-5)
            queries = ops.rope(ops.linear(h, q), batch.pos, rope, 4)
            keys = ops.rope(ops.linear(h, k), batch.pos, rope, 2)
            a = ops.attention(queries, keys, ops.linear(h, v), batch, layer=layer, heads=4, scale=0.25)
            x = ops.add(x, ops.linear(a, o))
            h = ops.rms_norm(x, norm, 1e-5)
            x = ops.add(x, ops.linear(ops.swiglu(ops.linear(h, gate), ops.linear(h, up)), down))
        return ops.rms_norm(ops.take(x, batch.logit_rows), norm, 1e-5)

    return forward


@pytest.mark.parametrize(
    ("pairs", "dim", "kept"),
    [(True, 16, "f16"), (False, 8, "int8"), pytest.param(False, 16, "fp8", marks=pytest.mark.large)],
)
def test_fused_layers(pairs: bool, dim: int, kept: str):
    rng = np.random.default_rng(dim + pairs)
    frequencies = (1.0 / 100.0 ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
    rope = Rope(frequencies, dim, pairs, magnitude=1.1)
    kv = cases.KV(layers=2, pages=12, page_size=16, kv_heads=2, head_dim=16, dtype=kept)
    forward = block(rope, rng)
    limits = {"kv": kv, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 64}}
    oracle = open_backend("reference").compile(forward, **limits)
    program = open_cuda().compile(forward, **limits)
    a, b, c = [5, 0, 9], [3, 11], [7, 1]
    for rows in (  # few: the interpreter walks every row
        [(0, 18, a), (0, 1, b)],
        [(18, 1, a), (1, 3, b), (0, 2, c)],
        [(19, 1, a), (4, 1, b), (2, 1, c)],
    ):
        batch = cases.ragged(rows)
        x = cases.floats(rng, batch.tokens, 64)
        want, got = oracle.run(batch, {"x": x}), program.run(batch, {"x": x})
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < (3e-3 if kept == "f16" else 1e-2)


@pytest.mark.parametrize("pairs", [True, False])
def test_fused_layers_with_several_axes(pairs: bool):
    """A step without coordinates takes the fused way, one with some another: both write keys that the next step reads."""
    rng = np.random.default_rng(3)
    frequencies = (1.0 / 100.0 ** (np.arange(8) / 8)).astype(np.float32)
    kv = cases.KV(layers=2, pages=12, page_size=16, kv_heads=2, head_dim=16)
    forward = block(Rope(frequencies, 16, pairs, axes=(0, 1, 1, 2, 2, 2, 0, 1)), rng)
    limits = {"kv": kv, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 64}}
    oracle, program = (opened.compile(forward, **limits) for opened in (open_backend("reference"), open_cuda()))
    for i, rows in enumerate(([(0, 9, [5])], [(9, 3, [5]), (0, 2, [3])], [(12, 1, [5]), (2, 1, [3])])):
        batch = cases.ragged(rows)
        if i:
            batch.coords = rng.integers(0, 40, (3, batch.tokens)).astype(np.int32)
        x = cases.floats(rng, batch.tokens, 64)
        want, got = oracle.run(batch, {"x": x}), program.run(batch, {"x": x})
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 3e-3


def test_a_whole_model(tmp_path: Path):
    """Logits of a tiny Llama in chunks, float16 like the keys and values, against float32 on the CPU."""
    pytest.importorskip("gguf", reason="needs the test extra: it writes the model file")
    path = tiny.write_gguf(tiny.build(num_hidden_layers=2), tmp_path / "m.gguf")
    tokens = np.random.default_rng(8).integers(0, 160, 22).tolist()
    from quire import models
    from quire.weights.gguf.file import GGUF

    model = models.load(GGUF.open(path))
    program = open_cuda("float16").compile(model.forward, kv=model.kv(8, 16), max_tokens=64, max_rows=64)
    want = Loaded(path, "torch", most=64).logits(tokens)
    got = []
    for start, n in ((0, 13), (13, 8), (21, 1)):
        part = np.array(tokens[start : start + n])
        got.append(program.run(cases.ragged([(start, n, [2, 0, 5])], ids=part)))
    error = np.linalg.norm(np.concatenate(got) - want) / np.linalg.norm(want)
    assert error < 1e-2


def test_columns_side_by_side():
    whole = torch.arange(24.0).view(2, 12)
    q, k, v = whole.split([6, 4, 2], dim=-1)
    found = side_by_side(q, k, v)
    assert found is not None and torch.equal(found, whole) and found.data_ptr() == whole.data_ptr()
    assert torch.equal(side_by_side(k, v), whole[:, 6:])
    assert side_by_side(q, v) is None and side_by_side(k, q) is None
    assert side_by_side(q, k, v.clone()) is None
    assert side_by_side(whole[:1, :4], whole.view(3, 8)[1:2, :4]) is None


@pytest.mark.parametrize("rows", [1, 17])
def test_few_rows(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Skinny products: a norm that one row hands on undone, parts that are added by the norm and by the rotation."""
    kind = "bfloat16" if GPU else "float16"
    rng = np.random.default_rng(rows)
    rope = Rope(np.array([1.0, 0.3, 0.1, 0.01], np.float32), 8, pairs=True)
    kv = cases.KV(layers=2, pages=40, page_size=16, kv_heads=2, head_dim=16)
    inner = block(rope, rng)
    head = Dense((rng.standard_normal((50, 64)) / 8).astype(np.float32), "f32")
    limits = {"kv": kv, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 64}}

    def forward(ops, batch, inputs):
        return ops.linear(inner(ops, batch, inputs), head)

    want_program = open_backend("reference").compile(forward, **limits)
    monkeypatch.setattr(CudaKernels, "skinny_rows", 16)
    monkeypatch.setattr(module, "skinny_shape", few_splits(module.skinny_shape))
    program = open_cuda(kind).compile(forward, **limits)
    for start in range(2 if rows == 1 else 1):
        batch = cases.ragged([(start, 1, [2 * b]) for b in range(rows)])
        x = cases.floats(rng, rows, 64)
        want, got = want_program.run(batch, {"x": x}), program.run(batch, {"x": x})
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < (3e-2 if GPU else 5e-3)


def few_splits(choose):
    """Shapes this small would not be split by themselves: split them, so that parts are left and added."""

    def chosen(n, k, rows, dtype, **options):
        shape = choose(n, k, rows, dtype, **options)
        alone = options.get("gated") or options.get("fused")
        return shape if alone else replace(shape, block_n=16, block_k=32, splits=2, swap=False)

    return chosen


def test_a_norm_is_not_handed_on_past_a_change(monkeypatch: pytest.MonkeyPatch):
    """A product that reads a norm after the residual has grown must see the norm of what it was."""
    rng = np.random.default_rng(9)
    a, b = (Dense((rng.standard_normal((64, 64)) / 8).astype(np.float32), "f32") for _ in range(2))
    norm = Dense(np.ones(64, np.float32), "f32")

    def forward(ops, batch, inputs):
        x = ops.add(inputs["x"], inputs["y"])
        early = ops.rms_norm(x, norm, 1e-5)
        grown = ops.add(x, ops.linear(inputs["y"], a))
        late = ops.rms_norm(grown, norm, 1e-5)
        return ops.add(ops.linear(early, b), ops.linear(late, b))

    limits = {"kv": cases.NO_KV, "max_tokens": 8, "max_rows": 8, "inputs": {"x": 64, "y": 64}}
    monkeypatch.setattr(CudaKernels, "skinny_rows", 16)
    program = open_cuda("float16").compile(forward, **limits)
    inputs = {"x": cases.floats(rng, 1, 64), "y": cases.floats(rng, 1, 64)}
    want = open_backend("reference").compile(forward, **limits).run(cases.single(1), inputs)
    got = program.run(cases.single(1), inputs)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 5e-3


def test_half_precision_of_every_kind():
    """What the plain torch backend gives, within the rounding of half floats."""
    kind = "bfloat16" if GPU else "float16"
    rng = np.random.default_rng(3)
    rope = Rope(np.array([1.0, 0.3, 0.1, 0.01], np.float32), 8, pairs=True)
    kv = cases.KV(layers=2, pages=12, page_size=16, kv_heads=2, head_dim=16)
    forward = block(rope, rng)
    limits = {"kv": kv, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 64}}
    plain = open_backend("torch", device="cpu", dtype="float32").compile(forward, **limits)
    program = open_cuda(kind).compile(forward, **limits)
    batch = cases.ragged([(0, 18, [1, 2]), (0, 1, [4])])
    x = cases.floats(rng, batch.tokens, 64)
    want, got = plain.run(batch, {"x": x}), program.run(batch, {"x": x})
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < (3e-2 if GPU else 4e-3)
