"""The torch backend's part in the wider ops: fusions that must hold back, windows without their pages, experts and their weights."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.backends.elementwise import GEGLU
from quire.backends.recorder import record
from quire.layouts import Dense, Experts, Rope, Routing
from tests.unit.backends.test_conformance import WEIGHTS

torch = pytest.importorskip("torch", reason="needs the torch extra")

emit = importlib.import_module("quire.backends.torch.emit")
experts = importlib.import_module("quire.backends.torch.experts")
fuse = importlib.import_module("quire.backends.torch.fuse")
weights = importlib.import_module("quire.backends.torch.weights")

KV = cases.KV(layers=2, pages=16, page_size=16, kv_heads=2, head_dim=16)
ROPE = Rope(np.array([1.0, 0.3, 0.1, 0.01], np.float32), 8, pairs=False)


LAYOUTS = 3 * 6 + 8 + 6  # of the layer below: experts, other matrices, vectors; a vector that is used twice counts once


def matrix(rng: np.random.Generator, n: int, k: int, label: str = "f32") -> Any:
    return WEIGHTS[label](n, k, rng) if label != "f32" else Dense(cases.floats(rng, n, k, scale=k**-0.5), "f32")


def vector(rng: np.random.Generator, n: int) -> Dense:
    return Dense(1.0 + cases.floats(rng, n, scale=0.2), "f32")


def layer(rng: np.random.Generator, *, label: str = "f32", window: int | None = 20, limit: float | None = None):
    """A layer with everything: heads that are normalized, a window, a cap, sinks, geglu, a mixture beside a shared expert."""
    d, f, count = 64, 64, 6
    q, k, v, o = (matrix(rng, n, m) for n, m in ((64, d), (32, d), (32, d), (d, 64)))
    gate, up, down, router = (matrix(rng, n, m) for n, m in ((96, d), (96, d), (d, 96), (count, d)))
    some = lambda n, m: tuple(matrix(rng, n, m, label) for _ in range(count))  # noqa: E731
    held = Experts(some(f, d), some(f, d), some(d, f), limit=limit)
    norm, q_norm, k_norm, sinks = vector(rng, d), vector(rng, 16), vector(rng, 16), Dense(cases.floats(rng, 4), "f32")
    after = vector(rng, 16)
    routing = Routing(2, renormalize=True, bias=Dense(cases.floats(rng, count, scale=0.01), "f32"))

    def forward(ops, batch, inputs):
        x = ops.scale(inputs["x"], 1.5)
        h = ops.rms_norm(x, norm, 1e-5)
        queries = ops.rope(ops.rms_norm(ops.linear(h, q), q_norm, 1e-6, 4), batch.pos, ROPE, 4)
        keys = ops.rope(ops.rms_norm(ops.linear(h, k), k_norm, 1e-6, 2), batch.pos, ROPE, 2)
        told = {"layer": 1, "heads": 4, "scale": 0.25, "window": window, "softcap": 5.0, "sinks": sinks}
        x = ops.add(x, ops.linear(ops.attention(queries, keys, ops.linear(h, v), batch, **told), o))
        h = ops.rms_norm(x, after, 1e-5, 4)  # by head: not the plain norm of a sum
        mixed = ops.moe(h, ops.linear(h, router), held, routing)
        shared = ops.linear(ops.geglu(ops.linear(h, gate), ops.linear(h, up)), down)
        return ops.softcap(ops.linear(ops.rms_norm(ops.add(x, ops.add(mixed, shared)), norm, 1e-5), q), 30.0)

    return forward


BATCHES = (
    [(0, 37, [5, 0, 9]), (0, 1, [3])],
    [(37, 1, [5, 0, 9]), (1, 20, [3, 11]), (0, 5, [7])],
    [(38, 1, [5, 0, 9]), (21, 1, [3, 11]), (5, 1, [7])],
)


def compare(forward, names: dict[str, int], bound: float, name: str = "torch", **options) -> None:
    limits = {"kv": KV, "max_tokens": 64, "max_rows": 64, "inputs": names}
    oracle = open_backend("reference").compile(forward, **limits)
    program = open_backend(name, **{"device": "cpu", **options}).compile(forward, **limits)
    rng = np.random.default_rng(2)
    for rows in BATCHES:
        batch = cases.ragged(rows)
        inputs = {key: cases.floats(rng, batch.tokens, width) for key, width in names.items()}
        want, got = oracle.run(batch, inputs), program.run(batch, inputs)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < bound


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_a_layer_with_everything(dtype: str, bound: float):
    compare(layer(np.random.default_rng(0)), {"x": 64}, bound, dtype=dtype)


def test_what_becomes_of_its_instructions():
    recording = record(layer(np.random.default_rng(0)), KV, {"x": 64})
    program = fuse.fuse(recording.instructions, recording.output)
    ops = [i.op for i in program]
    assert ops == [
        "scale", "norm", "linear", "attention", "linear", "add", "norm", "linear", "moe", "gated", "linear", "add",
        "add_norm", "linear", "softcap",
    ]  # fmt: skip
    assert program[9].elementwise is GEGLU
    attention = program[3]
    assert attention.q_norm is not None and attention.k_norm is not None and attention.rope is ROPE
    assert (attention.window, attention.cap) == (20, 5.0) and attention.weight.shape == (4,)
    router, head = program[7].segments[0].out, program[-2].segments[0].out
    assert {router, head} <= fuse.wide(program, recording.output)
    by_head = program[6].outputs[0]
    assert by_head not in fuse.soon(program, recording.output)
    everything = {id(w) for i in program for w in i.weights()}
    assert {id(w) for group in emit.groups(program) for w in group} == everything and len(everything) == LAYOUTS


def test_norms_that_attention_cannot_do_stay_apart():
    """A weight for each head of its own, two eps, a query that something else reads too: as they were."""
    rng = np.random.default_rng(1)
    q, k, v = (matrix(rng, n, 64) for n in (64, 32, 32))
    own, one = vector(rng, 64), vector(rng, 16)

    def forward(kind):
        def run(ops, batch, inputs):
            weight = own if kind == "own" else one
            a = ops.rms_norm(ops.linear(inputs["x"], q), weight, 1e-2 if kind == "eps" else 1e-6, 4)
            b = ops.rms_norm(ops.linear(inputs["x"], k), one, 1e-6, 2)
            turned = ops.rope(a, batch.pos, ROPE, 4), ops.rope(b, batch.pos, ROPE, 2)
            y = ops.attention(*turned, ops.linear(inputs["x"], v), batch, layer=0, heads=4, scale=0.25)
            return ops.add(y, a) if kind == "read" else y

        return run

    for kind, norms in (("own", 2), ("eps", 2), ("read", 2), ("", 0)):
        recording = record(forward(kind), KV, {"x": 64})
        ops = [i.op for i in fuse.fuse(recording.instructions, recording.output)]
        assert ops.count("norm") == norms, kind
        compare(forward(kind), {"x": 64}, 1e-4)


def test_pages_before_a_window_may_be_gone():
    """Their entries are -1, and what page 0 holds is no number."""
    kv = cases.KV(layers=1, pages=16, page_size=16, kv_heads=2, head_dim=16)

    def forward(ops, batch, inputs):
        told = {"layer": 0, "heads": 4, "scale": 0.25, "window": 18}
        return ops.attention(inputs["q"], inputs["k"], inputs["v"], batch, **told)

    widths = {"q": 64, "k": 32, "v": 32}
    limits = {"kv": kv, "max_tokens": 128, "max_rows": 128, "inputs": widths}
    oracle = open_backend("reference").compile(forward, **limits)
    program = open_backend("torch", device="cpu").compile(forward, **limits)
    rng, a, b = np.random.default_rng(4), [4, 9, 2, 7, 11, 3], [5, 6, 8, 10]
    for step, rows in enumerate(([(0, 70, a), (0, 40, b)], [(70, 3, a), (40, 1, b)], [(73, 1, a), (41, 1, b)])):
        batch = cases.ragged(rows)
        inputs = {name: cases.floats(rng, batch.tokens, n) for name, n in widths.items()}
        want = oracle.run(batch, inputs)
        if step:
            for pool in (
                pages for layers in program.kernels.caches for cache in layers for pages in (cache.keys, cache.values)
            ):
                pool[[0, 4, 9, 2, 5]] = float("nan")
            batch.pages[0, :3], batch.pages[1, :1] = -1, -1
        np.testing.assert_allclose(program.run(batch, inputs), want, atol=2e-5)


@pytest.mark.parametrize("pairs", [1, 40, 200])
def test_blocks_of_one_expert_each(pairs: int):
    ids = torch.randint(0, 7, (pairs,), generator=torch.Generator().manual_seed(pairs))
    place, owner = experts.align(ids, 7)
    assert place.shape == (owner.shape[0], experts.BLOCK) and owner.shape[0] == min(pairs, pairs // experts.BLOCK + 7)
    live = place < pairs
    assert sorted(place[live].tolist()) == list(range(pairs)) and (place[~live] == pairs).all()
    assert (ids[place[live]] == owner[:, None].expand(place.shape)[live]).all()


def test_experts_are_one_stack_without_a_copy():
    rng = np.random.default_rng(3)
    made = layer(rng, label="q8_0")
    backend = open_backend("torch", device="cpu")
    told: list[tuple[int, int]] = []
    limits = {"kv": KV, "max_tokens": 8, "max_rows": 8, "inputs": {"x": 64}}
    backend.compile(made, **limits, packed=lambda _, done, total: told.append((done, total)))
    recording = record(made, KV, {"x": 64})
    held = next(i.experts for i in recording.instructions if i.experts is not None)
    both, down = backend.weights.stacked(emit._pairs(held)), backend.weights.stacked(held.down)
    assert both.shape == (6 * 128, 64) and down.shape == (6 * 64, 64)
    for e in range(6):
        for at, layout in ((2 * e, held.gate[e]), (2 * e + 1, held.up[e])):
            assert backend.weights[layout].data_ptr() == both[at * 64 :].data_ptr()
            np.testing.assert_array_equal(both[at * 64 : at * 64 + 64].numpy(), layout.dequantize())
    assert told[-1][0] == told[-1][1] and len(told) == LAYOUTS
    before = len(told)
    backend.compile(made, **limits, packed=lambda *_: told.append((0, 0)))
    assert len(told) == before  # a second program finds them


def test_an_expert_that_is_there_twice():
    """Not a stack as it was loaded: it is put together, or said to be impossible."""
    rng = np.random.default_rng(7)
    gate, down, up = (matrix(rng, n, k, "q8_0") for n, k in ((64, 64), (64, 64), (64, 64)))
    held = Experts((gate, gate), (up, up), (down, down))

    def forward(ops, batch, inputs):
        return ops.moe(inputs["x"], inputs["l"], held, Routing(1))

    compare(forward, {"x": 64, "l": 2}, 1e-4)
    with pytest.raises(Exception, match="cannot be quantized"):
        compare(forward, {"x": 64, "l": 2}, 1e-4, quantize="int8")


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "keep"])
def test_experts_are_quantized_and_what_is_not_is_told(kind: str):
    rng = np.random.default_rng(5)
    label = "q4_0" if kind == "keep" else "f32"
    inner = layer(rng, label=label)
    own = matrix(rng, 4 * 16, 16)

    def forward(ops, batch, inputs):
        return ops.head_linear(inner(ops, batch, inputs), own, 4)

    bounds = {"fp8": 0.15, "int8": 0.05, "int4": 0.4, "keep": 1e-3}
    backend = open_backend("torch", device="cpu", quantize=kind)
    limits = {"kv": KV, "max_tokens": 64, "max_rows": 64, "inputs": {"x": 64}}
    program = backend.compile(forward, **limits)
    batch, x = cases.ragged(BATCHES[0]), cases.floats(rng, 38, 64)
    want = open_backend("reference").compile(forward, **limits).run(batch, {"x": x})
    got = program.run(batch, {"x": x})
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < bounds[kind]
    (line,) = backend.told()
    assert "1 f32 (router)" in line and "1 f32 (by head)" in line
    count = {"keep": 18, "int4": 24}.get(kind, 25)  # 96 columns are no whole pairs of groups
    assert f"{count} of 27 matrices" in line


def test_experts_of_several_formats_are_kept_in_full_and_that_is_told():
    rng = np.random.default_rng(6)
    some = lambda label: tuple(matrix(rng, 64, 64, label) for _ in range(2))  # noqa: E731
    held = Experts(some("q4_0"), some("q8_0"), some("q4_0"))

    def forward(ops, batch, inputs):
        return ops.moe(inputs["x"], inputs["l"], held, Routing(1))

    backend = open_backend("torch", device="cpu", quantize="keep")
    limits = {"kv": KV, "max_tokens": 8, "max_rows": 8, "inputs": {"x": 64, "l": 2}}
    program = backend.compile(forward, **limits)
    inputs = {"x": cases.floats(rng, 5, 64), "l": cases.floats(rng, 5, 2)}
    want = open_backend("reference").compile(forward, **limits).run(cases.single(5), inputs)
    np.testing.assert_allclose(program.run(cases.single(5), inputs), want, rtol=1e-3, atol=1e-3)
    (line,) = [line for line in backend.told() if "2 of 6 matrices" in line]
    assert "2 Q4_0 (experts not of one format), 2 Q8_0 (experts" in line


def test_capped_logits_are_not_rounded_on_the_way():
    """bfloat16 keeps eight bits: logits that are capped or scaled before they are given out are float32 by then."""
    rng = np.random.default_rng(8)
    head, x = matrix(rng, 50, 64), cases.floats(rng, 3, 64)
    for last in (lambda ops, y: ops.softcap(y, 30.0), lambda ops, y: ops.scale(ops.softcap(y, 30.0), 0.3)):

        def forward(ops, _, inputs, last=last):
            return last(ops, ops.linear(inputs["x"], head))

        limits = {"kv": KV, "max_tokens": 8, "max_rows": 8, "inputs": {"x": 64}}
        program = open_backend("torch", device="cpu", dtype="bfloat16").compile(forward, **limits)
        got = torch.from_numpy(program.run(cases.single(3), {"x": x}))
        assert (got.bfloat16().float() != got).any()
