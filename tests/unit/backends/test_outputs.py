"""Rows that programs keep beside their result: what they are, that the result does not change, and that they cost nothing unasked.

The oracle is transformers' `output_hidden_states`, for every family; among backends it is the reference.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.backends import cases
from quire.backends.adapters import Pair, Target
from quire.backends.batch import Batch, Table
from quire.backends.choose import open_backend
from quire.backends.early import take_early
from quire.backends.native import fuse as native_fuse
from quire.backends.ops import Ops, Tensor
from quire.backends.outputs import FINAL, Hidden
from quire.backends.recorder import Instruction, Recorder, Value, record
from quire.layouts import Dense
from quire.weights.checkpoint import open_checkpoint
from tests.unit.backends.native_kit import ragged
from tests.unit.models import families, folders, mixtures

torch = pytest.importorskip("torch", reason="needs torch: the test extra")
pytest.importorskip("transformers", reason="needs transformers, the oracle: the test extra")

from quire.backends.torch import fuse as torch_fuse  # noqa: E402

VARIANTS: dict[str, dict[str, Any]] = {"reference": {}}
if importlib.util.find_spec("quire.backends.native._native") is not None:
    from quire.backends.native import available

    VARIANTS |= {f"native-{isa}": {"isa": isa, "threads": 2} for isa in available()}
VARIANTS["torch-float32"] = {"device": "cpu", "dtype": "float32"}
BEST = next((v for v in VARIANTS if v.startswith("native")), "reference")
LIMITS = {"max_tokens": 96, "max_rows": 96}
TOKENS = [int(t) for t in np.random.default_rng(2).integers(3, 100, 40)]
EVERY = [*families.FAMILIES, *(f"mixture {kind}" for kind in mixtures.KINDS)]


def backend_of(variant: str) -> Any:
    return open_backend(variant.split("-")[0], **VARIANTS[variant])


def build(name: str) -> Any:
    return mixtures.build(name.removeprefix("mixture ")) if name.startswith("mixture ") else families.build(name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Any, Path]]:
    """transformers models and their folders, each made when it is asked for."""

    class Made(dict[str, tuple[Any, Path]]):
        def __missing__(self, name: str) -> tuple[Any, Path]:
            model = folders.build() if name == "llama shape" else build(name)
            folder = folders.save(model, tmp_path_factory.mktemp("outputs") / "model")
            self[name] = model, folder
            return self[name]

    return Made()


def exact_states(model: Any, tokens: list[int]) -> list[np.ndarray[Any, Any]]:
    """transformers' rows: embeddings, then after each layer; the last entry is behind the last norm."""
    from transformers import DynamicCache

    class Halves(DynamicCache):  # keys and values are rounded here, too, so that routers see the same numbers
        def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key.half().to(key.dtype), value.half().to(value.dtype), *args, **kwargs)

    kept = Halves(config=model.config) if model.config.model_type == "qwen3_next" else Halves()
    with torch.no_grad():
        told = model(torch.tensor([tokens]), past_key_values=kept, output_hidden_states=True)
    return [x[0].float().numpy() for x in told.hidden_states]


def whole(kv: Any, tokens: list[int], rows: Sequence[int] | None = None) -> Batch:
    """All tokens of one sequence, in pages of the same numbers in every group; of states, the last page alone."""
    batch = ragged([(tokens, 0, list(range(-(-len(tokens) // 16))))])
    last = np.where(np.arange(batch.pages.shape[1]) == (len(tokens) - 1) // 16, 0, -1).astype(np.int32)[None]
    batch.more = tuple(Table(last if own.state else batch.pages, batch.write) for own in kv.more)
    batch.logit_rows = np.arange(len(tokens), dtype=np.int32) if rows is None else np.array(rows, np.int32)
    return batch


def compiled(folder: Path, variant: str, keep: Sequence[Hidden], context: int | None = None) -> tuple[Any, Any]:
    """A program that keeps these rows, and its pools. `context`: it serves no more than this."""
    model = models.load(open_checkpoint(folder))
    if context is not None and isinstance(model, models.Stretches):
        model.stretch(context)
    kv = model.kv(8, 16)
    return backend_of(variant).compile(model.forward, kv=kv, keep=keep, **LIMITS), kv


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("taken", [False, True], ids=["all", "taken"])
def test_rows_are_those_of_transformers(made: Any, variant: str, taken: bool):
    model, folder = made["llama shape"]
    want = exact_states(model, TOKENS)
    layers = [*range(len(want) - 1), FINAL]
    program, kv = compiled(folder, variant, [Hidden(layer, taken) for layer in layers])
    rows = [3, 39, 17]
    program.run(whole(kv, TOKENS, rows))
    for layer, exact in zip(layers, want, strict=True):
        got = program.hidden(Hidden(layer, taken))
        assert got.dtype == np.float32 and got.shape == (exact[rows] if taken else exact).shape
        assert np.abs(got - (exact[rows] if taken else exact)).max() < 4e-3 * exact.std(), layer


@pytest.mark.parametrize("name", EVERY)
def test_every_family_marks_what_transformers_tells(made: Any, name: str):
    model, folder = made[name]
    family = families.FAMILIES.get(name)
    tokens = (2 * TOKENS)[
        : 40 if family is None else max(40, family.lengths[0][0])
    ]  # of long ones other factors are right
    want = exact_states(model, tokens)
    layers = [*range(len(want) - 1), FINAL]
    program, kv = compiled(folder, BEST, [Hidden(layer) for layer in layers], family and family.context)
    program.run(whole(kv, tokens, [39]))
    for layer, exact in zip(layers, want, strict=True):
        error = np.abs(program.hidden(Hidden(layer)) - exact).max()
        assert error < 2e-2 * max(exact.std(), 0.05), f"layer {layer}: {error / exact.std():.1e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_those_of_the_reference_in_any_batch(made: Any, variant: str):
    """A prompt in chunks, beside another, then both token by token: rows in the order of the batch, all of them and those taken."""
    _, folder = made["llama shape"]
    keep = [Hidden(1), Hidden(2, taken=True), Hidden(3), Hidden(FINAL), Hidden(FINAL, taken=True)]
    (oracle, _), (program, _) = compiled(folder, "reference", keep), compiled(folder, variant, keep)
    a, b = [0, 1, 2], [5, 3, 4]
    steps = [
        [(TOKENS[:20], 0, a)],
        [(TOKENS[20:23], 20, a), (TOKENS[5:25], 0, b)],
        [(TOKENS[25:26], 20, b), (TOKENS[23:24], 23, a)],
        [(TOKENS[24:30], 24, a)],
    ]
    wanted = [[19], [2, 22], [0, 1], []]
    for parts, rows in zip(steps, wanted, strict=True):
        batch = ragged(parts)
        batch.logit_rows = np.array(rows, np.int32)
        logits = [np.array(p.run(batch)) for p in (oracle, program)]
        for which in keep:
            want, got = oracle.hidden(which), program.hidden(which)
            assert got.shape == want.shape == ((len(rows) if which.taken else batch.tokens), want.shape[1])
            np.testing.assert_allclose(got, want, atol=4e-3 * want.std() if want.size else 0)
        np.testing.assert_allclose(*logits, atol=2e-2)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["llama shape", "gemma3", "cohere", "mixture qwen3next"])
def test_the_result_has_the_same_bits(made: Any, variant: str, name: str):
    """With some kept, all kept, none: for a prompt and for a decode row."""
    _, folder = made[name]
    layers = len(models.load(open_checkpoint(folder)).layers)
    some = [Hidden(1), Hidden(layers - 1, taken=True), Hidden(FINAL, taken=True)]
    # All rows of the last layer may be another kernel's business in torch, as those of a larger step are.
    last = variant.startswith("torch")
    every = [*(Hidden(n) for n in range(layers)), Hidden(layers, taken=last), Hidden(FINAL, taken=last)]
    results = []
    for keep in ([], some, every):
        program, kv = compiled(folder, variant, keep)
        first = np.array(program.run(whole(kv, TOKENS[:30], [29])))
        step = whole(kv, TOKENS[:31], [0])
        step.ids, step.pos, step.write = step.ids[30:], step.pos[30:], step.write[30:]
        step.more = tuple(Table(t.pages, t.write[30:]) for t in step.more)
        step.q_start = np.array([0, 1], np.int32)
        results.append((first, np.array(program.run(step))))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(got, want)


# ---- nothing where nothing is asked for


def told(program: list[Instruction], output: Value) -> list[Any]:
    """All of a program, with numbers in place of its values and weights."""
    values: dict[int, int] = {}
    weights: dict[int, int] = {}

    def value(v: Value | None) -> Any:
        return v and (values.setdefault(id(v), len(values)), v.width, v.per_token, v.quant)

    def plain(x: Any) -> Any:
        if isinstance(x, Value):
            return value(x)
        if isinstance(x, list):
            return [plain(each) for each in x]
        if hasattr(x, "weight"):  # a segment
            return [plain(getattr(x, name)) for name in ("x", "weight", "bias", "out", "residual")]
        return x if isinstance(x, int | float | str | bool | None) else weights.setdefault(id(x), len(weights))

    return [[plain(getattr(i, name)) for name in Instruction.__slots__] for i in program] + [[value(output)]]


@pytest.mark.parametrize("name", EVERY)
def test_marks_leave_no_trace_in_a_plan_that_keeps_nothing(made: Any, name: str, monkeypatch: pytest.MonkeyPatch):
    """The plan as it is replayed: with marks, and by a recorder that does not know them."""
    model = models.load(open_checkpoint(made[name][1]))

    def plans() -> list[list[Any]]:
        found = []
        for forward in (model.forward, model.hidden):
            for fuse in (native_fuse.fuse, torch_fuse.fuse):
                recording = take_early(record(forward, model.kv(4, 16), {}))
                found.append(told(fuse(recording.instructions, recording.output), recording.output))
        return found

    with_marks = plans()
    monkeypatch.setattr(Recorder, "mark", lambda self, x, layer: None)
    assert with_marks == plans()
    assert not any(instruction[0] == "keep" for plan in with_marks for instruction in plan)


def test_the_end_of_a_plan_that_keeps_nothing(made: Any):
    """As plans were before rows could be kept: behind the last attention rows are taken first, and nothing is there twice."""
    model = models.load(open_checkpoint(made["llama shape"][1]))
    recording = take_early(record(model.forward, model.kv(4, 16), {}))
    ops = [i.op for i in recording.instructions]
    end = len(ops) - ops[::-1].index("attend")
    block = ["norm", "linear", "linear", "swiglu", "linear", "add"]
    assert ops[end:] == ["take", "linear", "take", "add", *block, "norm", "linear"]
    assert not any(v.per_token for i in recording.instructions[end:] for v in i.writes())


def test_memory_is_counted(made: Any):
    if not BEST.startswith("native"):
        pytest.skip("needs the native extension")
    model = models.load(open_checkpoint(made["llama shape"][1]))
    backend = backend_of(BEST)
    sizes = {"kv": model.kv(8, 16), **LIMITS}
    none = backend.estimate(model.forward, **sizes)
    some = backend.estimate(model.forward, keep=[Hidden(1), Hidden(2)], **sizes)
    assert none == backend.estimate(model.forward, keep=[], **sizes)
    assert 0 < some.working - none.working <= 2 * 4 * 96 * model.config.width and some.weights == none.weights


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_cannot_be_kept_is_refused(made: Any, variant: str):
    _, folder = made["llama shape"]
    with pytest.raises(ValueError, match=r"all rows after 9 layers cannot be kept: the model marks 0 to 3, and FINAL"):
        compiled(folder, variant, [Hidden(1), Hidden(9)])
    with pytest.raises(ValueError, match="the same rows once"):
        compiled(folder, variant, [Hidden(1), Hidden(1)])
    program, kv = compiled(folder, variant, [Hidden(1)])
    program.run(whole(kv, TOKENS))
    with pytest.raises(
        ValueError, match="does not keep logit rows behind the last norm: it keeps all rows after 1 layers"
    ):
        program.hidden(Hidden(FINAL, taken=True))
    plain, _ = compiled(folder, variant, [])
    with pytest.raises(ValueError, match="keeps nothing"):
        plain.hidden(Hidden(1))


def test_a_model_marks_a_layer_once_and_before_rows_are_taken():
    def twice(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        ops.mark(inputs["x"], 0)
        ops.mark(inputs["x"], 0)
        return inputs["x"]

    def late(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = ops.take(inputs["x"], batch.logit_rows)
        ops.mark(x, 0)
        return x

    for forward in (twice, late):
        with pytest.raises(ValueError, match="layer 0 is marked once, where there is a row for every token"):
            record(forward, cases.NO_KV, {"x": 8})


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_with_adapters_are_kept_too(variant: str):
    """Rows whose slot has a pair for a target, and rows that have none."""
    rng = np.random.default_rng(3)
    weight, a, b = (Dense(cases.floats(rng, *shape, scale=0.3), "f32") for shape in ((8, 8), (2, 8), (8, 2)))
    target = Target("own", 8, 8, 2, 2)
    target.pairs[1] = Pair(a, b, 0.5)

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = ops.add(inputs["x"], ops.adapt(ops.linear(inputs["x"], weight), inputs["x"], batch.adapters, target))
        ops.mark(x, 1)
        return ops.take(ops.scale(x, 2.0), batch.logit_rows)

    keep = [Hidden(1), Hidden(1, taken=True)]
    program = backend_of(variant).compile(forward, kv=cases.NO_KV, inputs={"x": 8}, keep=keep, **LIMITS)
    x = cases.floats(rng, 5, 8)
    exact = x + x @ weight.data.T
    for slots in (None, np.array([1, -1, 1, 0, -1], np.int32)):
        batch = cases.single(5)
        batch.adapters, batch.logit_rows = slots, np.array([4, 2], np.int32)
        want = exact.copy()
        if slots is not None:
            want[slots == 1] += 0.5 * (x @ a.data.T @ b.data.T)[slots == 1]
        np.testing.assert_allclose(program.run(batch, {"x": x}), 2.0 * want[[4, 2]], atol=1e-5)
        np.testing.assert_allclose(program.hidden(Hidden(1)), want, atol=1e-5)
        np.testing.assert_allclose(program.hidden(Hidden(1, taken=True)), want[[4, 2]], atol=1e-5)
