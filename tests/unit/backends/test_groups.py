"""Several KV pools: every backend against the reference, and the reference against one pool that keeps all."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.batch import Batch
from quire.backends.choose import open_backend
from quire.backends.kv import KV_DTYPES
from quire.backends.ops import KV, Ops, Tensor
from quire.backends.recorder import record

CASES = list(cases.group_cases(np.random.default_rng(5)))


def variants() -> list[tuple[str, dict[str, object]]]:
    found: list[tuple[str, dict[str, object]]] = []
    if importlib.util.find_spec("quire.backends.native._native") is not None:
        from quire.backends.native import available

        found += [("native", {"isa": isa, "threads": threads}) for isa in available() for threads in (1, 2)]
    if importlib.util.find_spec("torch") is not None:
        found.append(("torch", {"device": "cpu", "dtype": "float32"}))
    return found


@pytest.mark.parametrize("variant", variants(), ids=lambda v: "-".join(map(str, (v[0], *v[1].values()))))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_conformance(case: cases.Case, variant: tuple[str, dict[str, object]]) -> None:
    backend = open_backend(variant[0], **variant[1])  # type: ignore[arg-type]
    limits = {"kv": case.kv, "max_tokens": 128, "max_rows": 128, "inputs": case.widths}
    if case.kv.dtype not in backend.kv_dtypes:
        pytest.skip(f"needs K and V as {case.kv.dtype}, which the {backend.name} backend does not keep")
    oracle, program = open_backend("reference").compile(case.forward, **limits), backend.compile(case.forward, **limits)
    for i, step in enumerate(case.steps):
        expected, got = oracle.run(step.batch, step.inputs), program.run(step.batch, step.inputs)
        error = np.abs(got.astype(np.float64) - expected)
        if case.kv.dtype != "f16" and variant[0] == "torch":
            assert (error > step.bound(expected)).mean() < 0.01 and error.max() < 0.02, f"step {i}: {error.max():g}"
        else:
            assert (error <= step.bound(expected)).all(), f"step {i}: error {error.max():g}"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_pool_that_keeps_everything_gives_the_same(case: cases.Case) -> None:
    """The same tokens in one pool, where each sequence has its own pages in order and each group its own layer."""
    windows = [k.window for k in case.kv.groups]
    whole = KV(len(windows), 96, 16, case.kv.kv_heads, case.kv.head_dim, case.kv.dtype)

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        total: Tensor = None
        for g, window in enumerate(windows):
            q, k, v = (inputs[f"{name}{g}"] for name in "qkv")
            a = ops.attention(q, k, v, batch, layer=g, heads=4, scale=whole.head_dim**-0.5, window=window or None)
            total = a if total is None else ops.add(total, a)
        return total

    limits = {"max_tokens": 128, "max_rows": 128, "inputs": case.widths}
    one = open_backend("reference").compile(forward, kv=whole, **limits)
    several = open_backend("reference").compile(case.forward, kv=case.kv, **limits)
    lengths: dict[int, int] = {}  # by where a sequence ends: no two are equally long
    names: dict[int, int] = {}
    for step in case.steps:
        rows = []
        for b in range(step.batch.sequences):
            start, n = int(step.batch.pos[step.batch.q_start[b]]), int(np.diff(step.batch.q_start)[b])
            name = names.pop(start) if start else len(lengths)
            lengths[name] = start + n
            names[start + n] = name
            rows.append((start, n, list(range(32 * name, 32 * name + 32))))
        np.testing.assert_array_equal(several.run(step.batch, step.inputs), one.run(cases.ragged(rows), step.inputs))


def test_memory_is_counted_over_all_pools() -> None:
    kv = KV(2, 3, 16, 1, 8, more=(KV(5, 4, 16, 1, 8, window=64), KV(1, 7, 16, 1, 8)))
    assert kv.nbytes == (2 * 3 + 5 * 4 + 1 * 7) * 16 * 2 * 8 * 2
    assert [k.pages for k in kv.sized([1, 2, 3]).groups] == [1, 2, 3] and kv.sized([3, 4, 7]) == kv
    assert {k.dtype for k in kv.sized([1, 1, 1], "int8").groups} == {"int8"} and set(KV_DTYPES) > {"int8"}


@pytest.mark.parametrize(
    ("group", "layer", "window", "text"),
    [(2, 0, 8, "group 2 of 2"), (1, 3, 8, "layer 3"), (1, 0, 9, "a window of 9"), (1, 0, None, "a window of None")],
)
def test_a_model_that_names_what_is_not_there_fails_when_it_is_recorded(
    group: int, layer: int, window: int | None, text: str
) -> None:
    kv = KV(4, 1, 16, 1, 8, more=(KV(3, 1, 16, 1, 8, window=8),))

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"]
        return ops.attention(x, x, x, batch, layer=layer, heads=1, scale=1.0, group=group, window=window)

    with pytest.raises(ValueError, match=text):
        record(forward, kv, {"x": 8})
