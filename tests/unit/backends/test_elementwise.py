"""An elementwise op is declared once: the declarations hold together, few files name an op, and a new one needs nothing else.

`cube` is an op that no backend has a kernel for. It is recorded, computed by the reference, moved and fused like those that are
declared, refused by a backend without a kernel, and run by one that is given an expression.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.batch import Batch
from quire.backends.choose import open_backend
from quire.backends.early import take_early
from quire.backends.elementwise import ELEMENTWISE, EXACT, Elementwise, ElementwiseOps, Input, Number, Within
from quire.backends.native import extension, fuse
from quire.backends.ops import TABLE, Ops, Tensor
from quire.backends.recorder import record
from quire.layouts import Dense
from quire.observe.errors import Unsupported

ROOT = Path(__file__).resolve().parents[3]
CUBE = Elementwise(
    "cube",
    (Input("gate", 2.0, (0.0, -0.0, 1e10)), Input("up")),
    lambda gate, up: gate**3 * up,
    Within(1e-6),
    gates=True,
)
SCALED = Elementwise("scaled", CUBE.inputs, lambda a, b, by: by * a * b, Within(1e-6), Number("by", 0.5, positive=True))
X = np.random.default_rng(4).standard_normal((6, 64)).astype(np.float32)
A, B = (Dense(np.random.default_rng(n).standard_normal((64, 64)).astype(np.float32), "f32") for n in (5, 6))
LIMITS = {"kv": cases.NO_KV, "max_tokens": 16, "max_rows": 16}


def gated(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
    """Two products, the op, and a take behind it."""
    x = inputs["x"]
    return ops.take(ops.elementwise(CUBE, ops.linear(x, A), ops.linear(x, B)), batch.logit_rows)


def test_each_declaration_has_its_method_and_its_row() -> None:
    for name, op in ELEMENTWISE.items():
        wanted = [own.name for own in op.inputs] + ([op.number.name] if op.number else [])
        assert op.name == name and list(inspect.signature(getattr(ElementwiseOps, name)).parameters)[1:] == wanted
        seen: list[tuple[Elementwise, int, float]] = []

        class Noted(ElementwiseOps):
            def elementwise(self, op: Elementwise, *inputs: Tensor, number: float = 0.0) -> Tensor:
                seen.append((op, len(inputs), number))  # noqa: B023

        getattr(Noted(), name)(*"ab"[: len(op.inputs)], *([2.5] if op.number else []))
        assert seen == [(op, len(op.inputs), 2.5 if op.number else 0.0)]
    rows = {row.name: row for row in TABLE}
    assert len(rows) == len(TABLE) and rows.keys() >= ELEMENTWISE.keys()
    assert rows["swiglu"].shapes == "gate [T, d], up [T, d] -> [T, d]" and rows["swiglu"].tolerance == "2e-06 relative"
    assert str(EXACT) == "exact"


def test_the_list_of_kernels_is_the_table_and_what_experts_use() -> None:
    assert set(extension().elementwise()) == {*ELEMENTWISE, "clamped"}


def files_that_name(op: str) -> list[str]:
    """Source files of the backends, in Python and C++, in which the word stands."""
    word = re.compile(rf"(?<![\w.]){op}(?!\w)|Elementwise::{op}\b")
    folders = [ROOT / "quire/backends", ROOT / "native/src"]
    found = [f for folder in folders for end in ("py", "pyi", "h", "cpp") for f in folder.rglob(f"*.{end}")]
    return sorted(f.relative_to(ROOT).as_posix() for f in found if word.search(f.read_text()))


@pytest.mark.parametrize("op", ["geglu", "gelu", "sigmoid_gate"])
def test_few_files_name_an_op(op: str) -> None:
    """Models and tests that use an op beside: what a new one must touch. Words that also mean something else are not counted."""
    named = files_that_name(op)
    assert {"quire/backends/elementwise.py", "native/src/elementwise.h", "native/src/kernels/elementwise.h"} <= set(
        named
    )
    assert len(named) <= 5, named


def test_it_is_recorded_moved_and_fused_like_any_other() -> None:
    recording = take_early(record(gated, cases.NO_KV, {"x": 64}))
    program = fuse.fuse(recording.instructions, recording.output)
    assert [i.op for i in program] == ["take", "gated"] and program[1].elementwise is CUBE


def test_the_recorder_checks_it() -> None:
    def forward(what: str):
        def run(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
            narrow = inputs["y" if what == "shape" else "x"]
            return ops.elementwise(SCALED, inputs["x"], narrow, number=-1.0 if what == "number" else 0.5)

        return run

    for what, why in (
        ("shape", "scaled: the inputs have different shapes, 64 and 32"),
        ("number", "scaled: the by is -1.0"),
    ):
        with pytest.raises(ValueError, match=why):
            record(forward(what), cases.NO_KV, {"x": 64, "y": 32})
    with pytest.raises(ValueError, match="an activation that gates reads two tensors and nothing else"):
        replace(SCALED, gates=True)


def test_the_reference_computes_it() -> None:
    batch = cases.single(6)
    batch.logit_rows = np.array([1, 4], np.int32)
    got = open_backend("reference").compile(gated, **LIMITS, inputs={"x": 64}).run(batch, {"x": X})
    wide = X[[1, 4]].astype(np.float64)
    want = (wide @ A.dequantize().T) ** 3 * (wide @ B.dequantize().T)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2)


def test_a_backend_without_a_kernel_refuses_it() -> None:
    for name in ("native", "torch"):
        if name == "torch":
            pytest.importorskip("torch", reason="needs the torch extra")
        with pytest.raises(Unsupported, match="'cube'") as caught:
            open_backend(name).compile(gated, **LIMITS, inputs={"x": 64})
        assert caught.value.cure


def test_with_an_expression_torch_passes_the_cases_that_follow_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="needs the torch extra")
    from quire.backends.torch.elementwise import EXPRESSIONS

    monkeypatch.setitem(EXPRESSIONS, "cube", lambda gate, up: gate * gate * gate * up)
    monkeypatch.setitem(EXPRESSIONS, "scaled", lambda by, a, b: by * a * b)
    made = [case for op in (CUBE, SCALED) for case in cases.elementwise_cases(op, np.random.default_rng(1))]
    assert [case.name for case in made] == ["cube-1x72", "cube-5x208", "scaled-1x72", "scaled-5x208"]
    assert made[1].steps[0].inputs["gate"][0, 2] == 1e10
    for case in made:
        step, limits = case.steps[0], {**LIMITS, "inputs": case.widths}
        want, got = (
            open_backend(name).compile(case.forward, **limits).run(step.batch, step.inputs)
            for name in ("reference", "torch")
        )
        assert (np.abs(got - want) <= step.bound(want)).all()
    monkeypatch.setitem(EXPRESSIONS, "cube", lambda gate, up: gate * gate * up)
    step, limits = made[1].steps[0], {**LIMITS, "inputs": made[1].widths}
    want, got = (
        open_backend(name).compile(made[1].forward, **limits).run(step.batch, step.inputs)
        for name in ("reference", "torch")
    )
    assert (np.abs(got - want) > step.bound(want)).any()
