"""Takes as early as they can be: which instructions are given fewer rows, and that the rows that are left are the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.backends import cases
from quire.backends.choose import open_backend
from quire.backends.early import take_early
from quire.backends.ops import KV
from quire.backends.recorder import Recording, record
from quire.layouts import Dense
from quire.weights.gguf.file import GGUF
from tests.unit.backends.test_conformance import WEIGHTS
from tests.unit.models import tiny

RNG = np.random.default_rng(8)
NORM = Dense(RNG.uniform(0.5, 1.5, 64).astype(np.float32), "f32")
A, B, C = (WEIGHTS["f32"](64, 64, RNG) for _ in range(3))
POOL = KV(1, 8, 16, 2, 16)
BACKENDS = [
    name
    for name, module in (("native", "quire.backends.native._native"), ("torch", "torch"))
    if importlib.util.find_spec(module) is not None
]


def layer(ops: Any, batch: Any, inputs: Any) -> Any:
    """A whole block, as most models have it."""
    x = inputs["x"]
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    h = ops.attention(q, k, v, batch, layer=0, heads=4, scale=0.25)
    x = ops.add(x, ops.linear(h, A))
    h = ops.rms_norm(x, NORM, 1e-5)
    x = ops.add(x, ops.linear(ops.swiglu(ops.linear(h, A), ops.linear(h, B)), C))
    return ops.rms_norm(ops.take(x, batch.logit_rows), NORM, 1e-5)


def beside(ops: Any, batch: Any, inputs: Any) -> Any:
    """Attention and the MLP read one norm, and one of its products both."""
    x = inputs["x"]
    h = ops.rms_norm(x, NORM, 1e-5)
    shared = ops.linear(h, A)
    q = ops.add(shared, inputs["q"])
    a = ops.attention(q, inputs["k"], inputs["v"], batch, layer=0, heads=4, scale=0.25)
    total = ops.add(x, ops.add(a, ops.swiglu(shared, ops.linear(h, B))))
    return ops.softcap(ops.scale(ops.take(total, batch.logit_rows), 0.5), 3.0)


def twice(ops: Any, batch: Any, inputs: Any) -> Any:
    """Two values are taken, one of them made from the other, and one that a given one is."""
    x = ops.gelu(inputs["x"])
    y = ops.linear(x, A)
    taken = [ops.take(v, batch.logit_rows) for v in (inputs["q"], y, x, y, inputs["q"])]
    total = taken[0]
    for v in taken[1:]:
        total = ops.add(total, v)
    return total


def at_once(ops: Any, batch: Any, inputs: Any) -> Any:
    """What is taken is the result."""
    return ops.take(ops.linear(inputs["x"], A), batch.logit_rows)


def whole(ops: Any, batch: Any, inputs: Any) -> Any:
    """Nothing is taken."""
    return ops.linear(inputs["x"], A)


FORWARDS: list[Callable[..., Any]] = [layer, beside, twice, at_once]
WIDTHS = {"x": 64, "q": 64, "k": 32, "v": 32}


def of(forward: Callable[..., Any]) -> Recording:
    return take_early(record(forward, POOL, WIDTHS))


def shown(recording: Recording) -> list[str]:
    """Each op, in capitals where it has a row per token."""
    return [
        i.op.upper() if all(v.per_token for v in (i.writes() or i.inputs)) else i.op for i in recording.instructions
    ]


def test_a_block_is_whole_up_to_its_attention() -> None:
    assert shown(of(layer)) == [
        "STORE", "ATTEND", "take", "linear", "take", "add", "norm", "linear", "linear", "swiglu", "linear", "add", "norm",
    ]  # fmt: skip


def test_what_attention_reads_stays_whole() -> None:
    ops = shown(of(beside))
    assert ops[: ops.index("ATTEND")].count("LINEAR") == 1 and "NORM" in ops
    assert "linear" in ops and "swiglu" in ops and "SWIGLU" not in ops
    assert ops.count("take") == 4  # the norm, the product that both read, attention, and the residual


def test_each_value_is_taken_once() -> None:
    assert shown(of(twice)).count("take") == 2  # x and q: everything else is made from them


def test_a_program_without_a_take_is_left_alone() -> None:
    recording = record(whole, POOL, WIDTHS)
    assert take_early(recording) is recording


def test_every_row_of_a_model_but_the_last_layers_end(tmp_path: Path) -> None:
    model = models.load(GGUF.open(tiny.write_gguf(tiny.build(), tmp_path / "m.gguf")))
    recording = take_early(record(model.forward, model.kv(4, 16), {}))
    ops = shown(recording)
    assert ops.count("LINEAR") == 2 * 7 + 3 and ops.count("linear") == 4 + 1 and ops.count("take") == 2
    assert not recording.output.per_token


@pytest.mark.parametrize("rows", [[], [11], [3, 11], [11, 0, 5], list(range(12))], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_rows_are_what_they_were(forward: Callable[..., Any], backend: str, rows: list[int]) -> None:
    batch = cases.ragged([(0, 4, [0]), (0, 8, [1])])
    batch.logit_rows = np.array(rows, np.int32)
    inputs = {
        name: cases.floats(np.random.default_rng(at), 12, width) for at, (name, width) in enumerate(WIDTHS.items())
    }
    limits: dict[str, Any] = {"kv": POOL, "max_tokens": 16, "max_rows": 16, "inputs": WIDTHS}
    want = open_backend("reference").compile(forward, **limits).run(batch, inputs)  # which runs the model as it is
    got = open_backend(backend).compile(forward, **limits).run(batch, inputs)
    assert got.shape == want.shape == (len(rows), 64)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)
