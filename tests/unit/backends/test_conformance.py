"""Every op of the table, on every backend, against the reference."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.backends.ops import TABLE
from quire.layouts import Affine, Dense, Floats, Layout

BLOCK_FORMATS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
BLOCK_FORMATS += ("iq1_m", "iq2_xxs", "iq3_xxs", "iq4_xs", "tq2_0")  # what codebooks are expanded to, and ternary


def blocks(name: str):
    """Random blocks of a format, with scales that are numbers of ordinary size."""

    def make(n: int, k: int, rng: np.random.Generator) -> Layout:
        codec = importlib.import_module(f"quire.formats.{name}").CODEC
        data = rng.integers(0, 256, (n, k // codec.block, codec.nbytes), dtype=np.uint8)
        for scale in (codec.scale, codec.bias):
            if scale is not None:
                factor = rng.uniform(-0.02, 0.02, (n, k // codec.block)).astype("<f4" if scale.wide else "<f2")
                bits = factor[..., None].view(np.uint8)
                data[..., scale.at : scale.at + bits.shape[-1]] = bits
        return Affine(data.reshape(n, -1), codec)

    return make


def dense(dtype: str):
    def make(n: int, k: int, rng: np.random.Generator) -> Layout:
        values = (rng.standard_normal((n, k)) * 0.05).astype(np.float32)
        if dtype == "f16":
            return Dense(values.astype(np.float16), dtype)
        if dtype == "bf16":
            return Dense((values.view(np.uint32) >> 16).astype(np.uint16), dtype)
        return Dense(values, dtype)

    return make


WEIGHTS = {name: blocks(name) for name in BLOCK_FORMATS} | {t: dense(t) for t in ("f32", "f16", "bf16")}


def native_variants() -> list[tuple[str, str | None, int]]:
    if importlib.util.find_spec("quire.backends.native._native") is None:
        return []
    from quire.backends.native import available

    best, *others = available()
    return [("native", best, 1), *(("native", isa, 2) for isa in (best, *others))]  # test_native_program varies threads


VARIANTS = native_variants()
MAIN = [variant for variant in VARIANTS if variant[1] in (VARIANTS[0][1], "scalar")]  # others: test_kernel_sets.py
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: the torch extra")
# What ||got - expected|| / ||expected|| may be: numbers of 11 and of 8 bits, through products and softmax.
HALVES = {"float16": 2e-3, "bfloat16": 1.2e-2}


def all_cases():
    for op in TABLE:
        rng = np.random.default_rng([ord(c) for c in op.name])
        yield from cases.of(op.name, WEIGHTS, rng)


CASES = list(all_cases())
NAMED = {case.name: case for case in CASES}
assert len(NAMED) == len(CASES)
NATIVE = [case for case in CASES if case.kv.dtype != "fp8"]
PLAIN = [case for case in CASES if case.kv.dtype == "f16"]  # what every backend must do


def limits_of(case: cases.Case) -> dict[str, Any]:
    return {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": case.widths}


@functools.lru_cache(maxsize=64)  # the variants of a case follow one another, and the oracle is the slow one
def reference(name: str) -> list[Floats]:
    """What each step of a case is to give."""
    case = NAMED[name]
    oracle = open_backend("reference").compile(case.forward, **limits_of(case))
    answers = [oracle.run(step.batch, step.inputs).copy() for step in case.steps]
    for answer in answers:
        answer.flags.writeable = False
    return answers


def test_the_native_backend_is_built():
    assert VARIANTS, "quire.backends.native._native is missing: build it with `pip install -e .`"


@pytest.mark.parametrize("variant", MAIN, ids=lambda v: f"{v[0]}-{v[1]}-{v[2]}")
@pytest.mark.parametrize("case", NATIVE, ids=lambda c: c.name)
def test_conformance(case: cases.Case, variant: tuple[str, str | None, int]):
    conforms(case, *variant)


def conforms(case: cases.Case, name: str, isa: str | None, threads: int) -> None:
    """One backend gives what the reference gives, within what the table allows."""
    program = open_backend(name, threads=threads, isa=isa).compile(case.forward, **limits_of(case))
    for i, (step, expected) in enumerate(zip(case.steps, reference(case.name), strict=True)):
        got = program.run(step.batch, step.inputs)
        assert got.shape == expected.shape
        error = np.abs(got.astype(np.float64) - expected)
        bound = np.broadcast_to(step.bound(expected), error.shape)
        assert (error <= bound).all(), f"step {i}: error {error.max():g}, worst {np.max(error / (bound + 1e-30)):.2f}x"


@NEEDS_TORCH
@pytest.mark.parametrize("case", [case for case in CASES if case.kv.dtype != "int16"], ids=lambda c: c.name)
def test_conformance_of_torch(case: cases.Case):
    """float32 on the CPU stays within the table's own bounds: one more oracle."""
    program = open_backend("torch", device="cpu", dtype="float32").compile(case.forward, **limits_of(case))
    for i, (step, expected) in enumerate(zip(case.steps, reference(case.name), strict=True)):
        got = program.run(step.batch, step.inputs)
        assert got.shape == expected.shape and got.dtype == np.float32
        error = np.abs(got.astype(np.float64) - expected)
        bound = np.broadcast_to(step.bound(expected), error.shape)
        over = error > bound
        if case.kv.dtype != "f16":  # a rotation that rounds otherwise may move a number on a border to the next code
            assert over.mean() < 0.01 and error.max() < 0.02, f"step {i}: {over.sum()} of {over.size}, {error.max():g}"
            continue
        assert not over.any(), f"step {i}: error {error.max():g}, worst {np.max(error / (bound + 1e-30)):.2f}x"


@NEEDS_TORCH
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", PLAIN, ids=lambda c: c.name)
def test_conformance_of_torch_in_half_precision(case: cases.Case, dtype: str):
    """Of inputs that are half floats already: what an op does to them is judged, not what rounding them does."""
    import torch

    oracle = open_backend("reference").compile(case.forward, **limits_of(case))
    program = open_backend("torch", device="cpu", dtype=dtype).compile(case.forward, **limits_of(case))
    for i, step in enumerate(case.steps):
        inputs = {
            name: torch.from_numpy(x).to(getattr(torch, dtype)).float().numpy() for name, x in step.inputs.items()
        }
        expected = oracle.run(step.batch, inputs)
        if np.abs(expected).max() > np.finfo(np.float16).max and dtype == "float16":
            continue  # no such number there: the outlier column of linear's inputs times a large weight
        error = np.linalg.norm(program.run(step.batch, inputs) - expected) / np.linalg.norm(expected)
        assert error <= HALVES[dtype], f"step {i}: {error:g}"


def test_every_backend_implements_the_table():
    torch = [("torch", None, 1)] if importlib.util.find_spec("torch") is not None else []
    for name, isa, threads in [("reference", None, 1), *torch, *VARIANTS]:
        implementations = open_backend(name, threads=threads, isa=isa).implementations()
        assert set(implementations) == {op.name for op in TABLE}
