"""Mixtures of experts and products by head in the native backend: a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.backends.batch import Batch
from quire.backends.choose import open_backend
from quire.backends.elementwise import GEGLU
from quire.backends.native import available, fuse
from quire.backends.native.backend import NativeBackend
from quire.backends.ops import KV, Forward, Ops, Tensor
from quire.backends.recorder import record
from quire.backends.reference.backend import ReferenceBackend, ReferenceOps, route
from quire.layouts import Affine, Dense, Experts, Layout, Rope, Routing
from tests.unit.backends.native_kit import dense, fourteen_bit_product, i32, ragged, rows_batch, weight

KV_NONE = KV(layers=0, pages=1, page_size=16, kv_heads=1, head_dim=64)
ROWS = 150


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return rng(seed, *shape).standard_normal(shape).astype(np.float32)


def run(backend: Any, forward: Forward, inputs: Mapping[str, np.ndarray], rows: int = ROWS) -> np.ndarray:
    """All rows of the inputs at once."""
    n = len(next(iter(inputs.values())))
    limits = {"kv": KV_NONE, "max_tokens": max(rows, n), "max_rows": max(rows, n)}
    widths = {name: x.shape[1] for name, x in inputs.items()}
    return backend.compile(forward, **limits, inputs=widths).run(rows_batch(n), inputs).copy()


class RoundedOps(ReferenceOps):
    """The reference, with activations rounded to int8 per 32 columns before a product over quantized weights, and f16 as integers of 14 bits."""

    def linear(self, x: np.ndarray, weight: Layout, bias: Dense | None = None) -> np.ndarray:
        if isinstance(weight, Dense) and weight.dtype == "f16":
            product = fourteen_bit_product(x, weight.data)
            return product if bias is None else product + bias.dequantize()
        return super().linear(_rounded(x) if isinstance(weight, Affine) else x, weight, bias)

    def head_linear(self, x: np.ndarray, weight: Layout, heads: int) -> np.ndarray:
        return super().head_linear(_rounded(x) if isinstance(weight, Affine) else x, weight, heads)


def _rounded(x: np.ndarray) -> np.ndarray:
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1, keepdims=True).astype(np.float32)
    return (np.rint(groups * (np.float32(127) / most)) * (most / np.float32(127))).reshape(x.shape)


def agrees(got: np.ndarray, forward: Forward, inputs: Mapping[str, np.ndarray]) -> None:
    """With the same arithmetic in numpy. A number on the border between two int8 codes may fall to either side."""
    want = np.asarray(forward(RoundedOps(ReferenceBackend(), KV_NONE), rows_batch(len(got)), inputs))
    error = np.abs(got - want).max(axis=1) / np.abs(want).max(axis=1)
    assert np.median(error) <= 1e-5 and error.max() <= 2e-2, error


class Mixture:
    """Experts whose gate, up and down are of the formats given, taken in turn."""

    def __init__(
        self,
        formats: tuple[str, ...],
        d: int = 256,
        f: int = 256,
        routing: Routing | None = None,
        clamped: bool = False,
    ):
        self.count, self.d, self.routing = 8, d, routing or Routing(3, renormalize=True)

        def some(n: int, k: int, first: int) -> tuple[Layout, ...]:
            return tuple(
                weight(formats[(first + e) % len(formats)], n, k, seed=10 * first + e) for e in range(self.count)
            )

        def vectors(n: int, first: int) -> tuple[Dense, ...]:
            return tuple(dense("f32", n, seed=100 + 10 * first + e) for e in range(self.count)) if clamped else ()

        self.experts = Experts(
            some(f, d, 0), some(f, d, 0), some(d, f, 1), vectors(f, 0), vectors(f, 1), vectors(d, 2),
            limit=1.5 if clamped else None,
        )  # fmt: skip

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.moe(inputs["x"], inputs["logits"], self.experts, self.routing)

    def inputs(self, rows: int = ROWS) -> dict[str, np.ndarray]:
        """Rows that like some experts more than others: one has most of them, and some have a single one."""
        logits = normal(rows, self.count, seed=3)
        logits[:, 2] += 3.0
        logits[:, 5] -= 2.5
        return {"x": normal(rows, self.d, seed=4), "logits": logits}


MIXTURES: dict[str, Callable[[], Mixture]] = {
    "q4_k": lambda: Mixture(("Q4_K",)),
    "q8_0": lambda: Mixture(("Q8_0",), d=96, f=64),
    "f32": lambda: Mixture(("F32",), d=72, f=40),  # neither is a multiple of 16
    "bf16": lambda: Mixture(("BF16",), clamped=True),
    "mixed": lambda: Mixture(("Q4_0", "F16", "Q6_K"), clamped=True),
    "groups": lambda: Mixture(
        ("Q5_1",), routing=Routing(2, sigmoid=True, groups=4, top_groups=2, pair=True, bias=dense("f32", 8), scale=2.5)
    ),
    "one": lambda: Mixture(("Q4_1",), routing=Routing(1)),
    "all": lambda: Mixture(("Q8_0", "F32"), routing=Routing(8)),
}


@pytest.fixture(scope="module", params=list(MIXTURES))
def mixture(request: pytest.FixtureRequest) -> tuple[Mixture, np.ndarray]:
    """A mixture, and what every way of running its rows must give."""
    made = MIXTURES[request.param]()
    return made, run(NativeBackend(), made.forward, made.inputs())


def test_a_mixture_agrees_with_the_reference(mixture: tuple[Mixture, np.ndarray]) -> None:
    model, got = mixture
    agrees(got, model.forward, model.inputs())


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_kernel_sets_do_not_show(mixture: tuple[Mixture, np.ndarray], name: str, threads: int) -> None:
    model, want = mixture
    backend = NativeBackend(threads=threads, isa=name)
    np.testing.assert_array_equal(run(backend, model.forward, model.inputs()), want)
    part = {k: v[40:42] for k, v in model.inputs().items()}
    np.testing.assert_array_equal(run(backend, model.forward, part), want[40:42])


@pytest.mark.parametrize("threads", [1, 2])
def test_other_rows_do_not_show(mixture: tuple[Mixture, np.ndarray], threads: int) -> None:
    model, want = mixture
    inputs = model.inputs()
    widths = {k: v.shape[1] for k, v in inputs.items()}
    program = NativeBackend(threads=threads).compile(
        model.forward, kv=KV_NONE, max_tokens=ROWS, max_rows=ROWS, inputs=widths
    )

    def rows(chosen: np.ndarray) -> np.ndarray:
        return program.run(rows_batch(len(chosen)), {k: v[chosen] for k, v in inputs.items()}).copy()

    for r in range(0, ROWS, 7):
        np.testing.assert_array_equal(rows(np.array([r]))[0], want[r])
    shuffled = rng(1).permutation(ROWS)
    np.testing.assert_array_equal(rows(shuffled), want[shuffled])
    for n in (2, 3, 17, 33):
        chosen = rng(n).choice(ROWS, n, replace=True)
        np.testing.assert_array_equal(rows(chosen), want[chosen])


def test_results_are_added_in_order_of_the_experts() -> None:
    """Each expert's own result by plain linears, then one rounding per expert, from the lowest number up."""
    model, backend = Mixture(("F32",), d=64, f=64, routing=Routing(5)), NativeBackend()
    inputs, w = model.inputs(), model.experts
    share, want = shares(backend, inputs["logits"], model.routing), np.zeros((ROWS, 64), np.float32)
    for e in range(model.count):

        def expert(ops: Ops, _: Batch, given: Mapping[str, Tensor], e: int = e) -> Tensor:
            x = given["x"]
            return ops.linear(ops.swiglu(ops.linear(x, w.gate[e]), ops.linear(x, w.up[e])), w.down[e])

        rows = np.flatnonzero(share[:, e])
        y = run(backend, expert, {"x": inputs["x"][rows]})
        exact = share[rows, e, None].astype(np.longdouble) * y + want[rows]
        want[rows] = exact.astype(np.float32)
    np.testing.assert_array_equal(run(backend, model.forward, inputs), want)


def test_a_row_of_nan_spoils_only_itself() -> None:
    model = MIXTURES["q4_k"]()
    inputs = model.inputs(20)
    want = run(NativeBackend(), model.forward, inputs)
    inputs["x"][7], inputs["logits"][11] = np.nan, np.nan
    got = run(NativeBackend(threads=2), model.forward, inputs)
    others = [r for r in range(20) if r not in (7, 11)]
    np.testing.assert_array_equal(got[others], want[others])
    assert np.isnan(got[7]).all() and np.isnan(got[11]).all()


def test_rows_that_were_taken_go_through_experts() -> None:
    model = MIXTURES["mixed"]()
    inputs = model.inputs(40)
    want = run(NativeBackend(), model.forward, inputs)

    def forward(ops: Ops, batch: Batch, given: Mapping[str, Tensor]) -> Tensor:
        return model.forward(ops, batch, {k: ops.take(v, batch.logit_rows) for k, v in given.items()})

    widths = {k: v.shape[1] for k, v in inputs.items()}
    program = NativeBackend(threads=2).compile(forward, kv=KV_NONE, max_tokens=40, max_rows=6, inputs=widths)
    batch = rows_batch(40)
    for chosen in ([3, 39, 0, 3], [5], []):
        batch.logit_rows = i32(chosen)
        np.testing.assert_array_equal(program.run(batch, inputs), want[np.array(chosen, int)])


def shares(backend: Any, logits: np.ndarray, routing: Routing) -> np.ndarray:
    """What each expert counts for each row: every expert answers with its own unit vector."""
    count = logits.shape[1]
    zero, unit = dense("f32", count, count, scale=0.0), np.eye(count, dtype=np.float32)
    experts = Experts(
        *(((zero,) * count,) * 3), down_bias=tuple(Dense(np.ascontiguousarray(unit[e]), "f32") for e in range(count))
    )

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.moe(inputs["x"], inputs["logits"], experts, routing)

    return run(backend, forward, {"x": normal(len(logits), count), "logits": logits})


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int, int]:
    groups, per = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 5, 8)))
    kept = draw(st.integers(1, groups))
    bias = Dense(normal(groups * per, seed=draw(st.integers(0, 9))), "f32") if draw(st.booleans()) else None
    flags = {name: draw(st.booleans()) for name in ("sigmoid", "renormalize", "pair")}
    top = draw(st.integers(1, kept * per))
    made = Routing(top, scale=draw(st.sampled_from((1.0, 2.5))), bias=bias, groups=groups, top_groups=kept, **flags)
    return made, groups * per, draw(st.integers(0, 10**6))


@settings(max_examples=60, deadline=None)
@given(routings())
def test_experts_are_chosen_as_the_reference_chooses_them(case: tuple[Routing, int, int]) -> None:
    routing, count, seed = case
    values = rng(seed).standard_normal(5).astype(np.float32) * 3  # few, so that many are equal
    logits = rng(seed, 1).choice(values, (12, count))
    logits[0] *= 40  # beyond what float32 can take to a power
    want = route(logits, routing, None if routing.bias is None else routing.bias.dequantize())
    got = shares(NativeBackend(), logits, routing)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=1e-44)


def test_whatever_the_logits_are_the_experts_are_different_ones() -> None:
    logits = np.full((6, 8), np.nan, np.float32)
    logits[1, 3], logits[2], logits[3], logits[4, ::2], logits[5] = 1.0, np.inf, -np.inf, np.inf, 3e38
    for routing in (Routing(8), Routing(3, sigmoid=True), Routing(2, groups=4, top_groups=1, pair=True)):
        got = shares(NativeBackend(), logits, routing)
        assert got.shape == (6, 8)
        np.testing.assert_allclose(got[5], route(logits[5:], routing, None)[0], rtol=1e-6)


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize(
    ("kind", "heads", "n", "k"),
    [("Q8_0", 3, 64, 32), ("Q4_K", 2, 40, 256), ("F32", 5, 24, 20), ("BF16", 4, 7, 33), ("Q4_0", 4, 8, 64)],
)
def test_a_product_by_head_is_a_product_of_each(name: str, kind: str, heads: int, n: int, k: int) -> None:
    whole, x = weight(kind, heads * n, k), normal(ROWS, heads * k)
    backend = NativeBackend(threads=2, isa=name)
    got = run(backend, lambda ops, _, i: ops.head_linear(i["x"], whole, heads), {"x": x})
    for h in range(heads):
        rows = slice(h * n, h * n + n)
        own = (
            Dense(whole.data[rows], whole.dtype)
            if isinstance(whole, Dense)
            else type(whole)(whole.data[rows], whole.codec)
        )
        part = np.ascontiguousarray(x[:, h * k : h * k + k])
        want = run(backend, lambda ops, _, i, own=own: ops.linear(i["x"], own), {"x": part})
        np.testing.assert_array_equal(got[:, rows], want)
    for r in (0, 77, ROWS - 1):
        alone = run(backend, lambda ops, _, i: ops.head_linear(i["x"], whole, heads), {"x": x[r : r + 1]})
        np.testing.assert_array_equal(alone[0], got[r])


class Block:
    """A layer with everything that may stand beside a fusion: norms of all kinds, gates, heads, experts, caps."""

    d = 256

    def __init__(self, kind: str = "Q8_0"):
        d, self.moe = self.d, Mixture((kind,), f=96)
        self.norm, self.head = (Dense(1 + 0.1 * normal(n, seed=n), "f32") for n in (d, d // 4))
        self.bias = Dense(normal(d), "f32")
        self.router = dense("f32", self.moe.count, d)
        self.gate, self.up, self.down = weight(kind, 512, d, 1), weight(kind, 512, d, 2), weight(kind, d, 512)
        self.heads = weight(kind, 4 * 40, d // 4)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"]
        h = ops.rms_norm(x, self.head, 1e-5, 4)
        x = ops.add(x, ops.linear(ops.geglu(ops.linear(h, self.gate), ops.linear(h, self.up)), self.down))
        h = ops.layer_norm(x, self.norm, self.bias, 1e-5, 2)
        x = ops.add(x, ops.moe(h, ops.softcap(ops.linear(h, self.router), 5.0), self.moe.experts, self.moe.routing))
        h = ops.layer_norm(ops.scale(x, 1.7), self.norm, None, 1e-5)
        x = ops.add(ops.linear(ops.gelu(ops.linear(h, self.gate)), self.down), x)
        h = ops.rms_norm(x, self.norm, 1e-5, 4)
        return ops.join(ops.head_linear(h, self.heads, 4), ops.head_linear(h, self.heads, 4), 4)


BLOCK = Block()
X = {"x": normal(37, Block.d, seed=9)}


@pytest.fixture(scope="module")
def plain() -> np.ndarray:
    """The block without any fusion."""
    return run(NativeBackend(passes=()), BLOCK.forward, X)


def test_the_block_agrees_with_the_reference(plain: np.ndarray) -> None:
    agrees(plain, BLOCK.forward, X)


@pytest.mark.parametrize("chosen", [*((p,) for p in fuse.PASSES), fuse.PASSES, tuple(reversed(fuse.PASSES))])
def test_fusing_does_not_show(plain: np.ndarray, chosen: tuple[fuse.Pass, ...]) -> None:
    for threads in (1, 2):
        np.testing.assert_array_equal(run(NativeBackend(passes=chosen, threads=threads), BLOCK.forward, X), plain)


@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_fusing_does_not_show_for_other_weights(kind: str) -> None:
    block = Block(kind)
    runs = [run(NativeBackend(passes=p), block.forward, X) for p in ((), fuse.PASSES)]
    np.testing.assert_array_equal(*runs)


def ops_of(forward: Forward, passes: tuple[fuse.Pass, ...] = fuse.PASSES) -> list[str]:
    recording = record(forward, KV_NONE, {"x": Block.d})
    return [i.op for i in fuse.fuse(recording.instructions, recording.output, passes)]


def test_what_fusing_leaves() -> None:
    assert ops_of(BLOCK.forward) == [
        "norm", "gated", "linear",
        "layer_norm", "linear", "softcap", "moe", "add",
        "scale", "layer_norm", "linear", "gelu", "quantize", "linear",
        "norm", "head_linear", "head_linear", "join",
    ]  # fmt: skip
    assert ops_of(BLOCK.forward, ()).count("quantize") == 8
    recording = record(BLOCK.forward, KV_NONE, {"x": Block.d})
    assert fuse.fuse(recording.instructions, recording.output)[1].elementwise is GEGLU


def test_experts_share_the_int8_form_with_linears() -> None:
    moe, shared = Mixture(("Q8_0",)), weight("Q8_0", Block.d, Block.d)

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        logits = ops.linear(inputs["x"], weight("Q8_0", moe.count, Block.d))
        return ops.add(ops.moe(inputs["x"], logits, moe.experts, moe.routing), ops.linear(inputs["x"], shared))

    assert ops_of(forward).count("quantize") == 1


def test_weights_of_experts_are_packed_once_and_counted() -> None:
    backend, seen = NativeBackend(), []
    limits = {"kv": KV_NONE, "max_rows": 8, "inputs": {"x": Block.d}}
    needs = backend.estimate(BLOCK.forward, max_tokens=8, **limits)
    program = backend.compile(BLOCK.forward, max_tokens=8, packed=lambda w, *_: seen.append(w), **limits)
    assert {id(w) for w in BLOCK.moe.experts.weights()} <= {id(w) for w in seen}
    vectors = sum(4 * -(-w.shape[0] // 16) * 16 for w in seen if len(w.shape) == 1)
    assert needs.weights == backend.packed_bytes + vectors
    backend.compile(BLOCK.forward, max_tokens=64, **limits)
    assert len(seen) == len(set(map(id, seen)))
    assert backend.estimate(BLOCK.forward, max_tokens=32, **limits).weights == 0
    small, large = (NativeBackend().estimate(BLOCK.forward, max_tokens=n, **limits).working for n in (8, 512))
    rows = 512 * BLOCK.moe.routing.top
    assert large - small >= rows * (Block.d + 96)  # the rows of experts, and what lies inside them
    assert "steps" in program.describe()


def test_mixtures_keep_their_room() -> None:
    """Two mixtures and other tensors share the arena: what one writes must not be read by another."""
    a, b = Mixture(("Q4_0", "F32")), Mixture(("Q8_0",), f=512)

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = inputs["x"]
        first = ops.moe(x, inputs["logits"], a.experts, a.routing)
        second = ops.moe(first, inputs["logits"], b.experts, b.routing)
        return ops.add(ops.add(x, first), second)

    inputs = a.inputs()
    got = run(NativeBackend(threads=2), forward, inputs)
    agrees(got, forward, inputs)
    step = run(NativeBackend(), a.forward, inputs)
    second = run(NativeBackend(), b.forward, {"x": step, "logits": inputs["logits"]})
    np.testing.assert_array_equal(got, (inputs["x"] + step) + second)


@pytest.mark.parametrize("name", available())
def test_activations_are_the_same_everywhere(name: str) -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0.0, -0.0, 1e-30, 1e30, -1e30, np.inf, 3e38]]).astype(np.float32)[
        None
    ]
    up = np.full_like(x, 0.75)
    functions: list[Forward] = [
        lambda ops, _, i: ops.geglu(i["x"], i["up"]),
        lambda ops, _, i: ops.add(ops.gelu(i["x"]), i["up"]),
        lambda ops, _, i: ops.add(ops.softcap(i["x"], 3.5), i["up"]),
        lambda ops, _, i: ops.add(ops.scale(i["x"], 0.1), i["up"]),
    ]
    for forward in functions:
        want = run(NativeBackend(isa="scalar"), forward, {"x": x, "up": up}, rows=1)
        np.testing.assert_array_equal(run(NativeBackend(isa=name), forward, {"x": x, "up": up}, rows=1), want)
        assert np.isfinite(want[0, :-2]).all()


def test_heads_wider_than_those_of_attention_can_be_rotated() -> None:
    rope = Rope(np.geomspace(1, 1e-4, 160, dtype=np.float32), 320, False)
    x = normal(4, 2 * 384)
    runs = [
        run(b, lambda ops, batch, i: ops.rope(i["x"], batch.pos, rope, 2), {"x": x})
        for b in (NativeBackend(), open_backend("reference"))
    ]
    np.testing.assert_allclose(*runs, atol=4e-6)


def test_small_numbers_keep_their_digits() -> None:
    """Near zero a cap is nearly the identity, and gelu's lower tail is no difference of near numbers."""
    x = np.array([[1e-6, -3e-4, 0.02, 1.0, -4.0, -5.5]], np.float32)
    for forward in (lambda ops, _, i: ops.softcap(i["x"], 30.0), lambda ops, _, i: ops.gelu(i["x"])):
        got, want = (run(b, forward, {"x": x}, rows=1) for b in (NativeBackend(), open_backend("reference")))
        np.testing.assert_allclose(got, want, rtol=3e-6)


def test_a_batch_of_sequences_is_like_its_rows() -> None:
    model = MIXTURES["q4_k"]()
    inputs = model.inputs(24)
    want = run(NativeBackend(), model.forward, inputs)
    batch = ragged([([0] * 5, 0, (0,)), ([0] * 19, 0, (1, 2))])
    widths = {k: v.shape[1] for k, v in inputs.items()}
    kv = KV(layers=0, pages=4, page_size=16, kv_heads=1, head_dim=64)
    program = NativeBackend(threads=2).compile(model.forward, kv=kv, max_tokens=24, max_rows=24, inputs=widths)
    np.testing.assert_array_equal(program.run(batch, inputs), want)
