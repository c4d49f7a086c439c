"""Inputs for the conformance test: for each op, small programs with generated inputs and the error they may show.

A case runs the same program over the same steps on two backends. The bound is what the op table allows: rounding of
float32 sums, and for quantized weights the rounding of activations to int8, which is computed, not guessed:
|error| <= sum over groups of (half a step of the activation) * (sum of |w| in the group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.backends.batch import Batch, Table
from quire.backends.cases_adapt import adapt_programs
from quire.backends.ops import KV, KV_DTYPES, Forward, Ops, Tensor
from quire.layouts import Affine, Dense, Experts, Floats, Layout, Rope, Routing

NO_KV = KV(layers=1, pages=8, page_size=16, kv_heads=1, head_dim=16)
Bound = Callable[[Floats], npt.NDArray[np.floating] | float]  # allowed error, from the expected output
MakeWeight = Callable[[int, int, np.random.Generator], Layout]
ROUND = float(np.finfo(np.float32).eps)


@dataclass(slots=True)
class Step:
    """One run: its batch, its inputs, and the absolute error allowed for each element of the output."""

    batch: Batch
    inputs: dict[str, Floats]
    bound: Bound


@dataclass(slots=True)
class Case:
    """A program with the steps to run it over."""

    name: str
    forward: Forward
    steps: list[Step]
    widths: dict[str, int] = field(default_factory=dict)
    kv: KV = NO_KV


def single(tokens: int, ids: np.ndarray | None = None, start: int = 0) -> Batch:
    """One sequence of that many tokens, all of them wanted, in page 0 onward."""
    pages = -(-(start + tokens) // 16)
    return ragged([(start, tokens, list(range(pages)))], ids=ids)


def ragged(rows: list[tuple[int, int, list[int]]], ids: np.ndarray | None = None) -> Batch:
    """A batch of (first position, tokens, page row) sequences."""
    pos = np.concatenate([np.arange(start, start + n) for start, n, _ in rows]).astype(np.int32)
    write = np.concatenate(
        [np.array([row[p // 16] * 16 + p % 16 for p in range(start, start + n)]) for start, n, row in rows]
    ).astype(np.int32)
    table = np.full((len(rows), max(len(row) for _, _, row in rows)), -1, np.int32)
    for b, (_, _, row) in enumerate(rows):
        table[b, : len(row)] = row
    total = pos.size
    return Batch(
        ids=np.zeros(total, np.int32) if ids is None else ids.astype(np.int32),
        pos=pos,
        q_start=np.cumsum([0] + [n for _, n, _ in rows]).astype(np.int32),
        kv_len=np.array([start + n for start, n, _ in rows], np.int32),
        pages=table,
        write=write,
        logit_rows=np.arange(total, dtype=np.int32),
    )


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def embed_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Rows of a table of every format; exact."""
    for label, make in weights.items():
        table = make(37, 256, rng)

        def forward(ops: Ops, batch: Batch, _: Mapping[str, Tensor], table: Layout = table) -> Tensor:
            return ops.embed(batch.ids, table)

        ids = rng.permutation(37)
        yield Case(f"embed-{label}", forward, [Step(single(37, ids), {}, lambda _: 0.0)])


def linear_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Every format, with row counts around the tile sizes, odd column counts, and columns that are zero or huge."""
    for label, make in weights.items():
        for n, k in ((64, 256), (50, 768)):
            weight, bias = make(n, k, rng), Dense(floats(rng, n), "f32")

            def forward(
                ops: Ops, _: Batch, inputs: Mapping[str, Tensor], weight: Layout = weight, bias: Dense = bias
            ) -> Tensor:
                return ops.linear(inputs["x"], weight, bias)

            steps = []
            for tokens in (1, 2, 5, 16, 33):
                x = floats(rng, tokens, k)
                x[:, :32] = 0.0
                x[0, 40] = 1000.0
                steps.append(Step(single(tokens), {"x": x}, linear_bound(weight, x)))
            yield Case(f"linear-{label}-{n}x{k}", forward, steps, {"x": k})


def adapt_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """See cases_adapt.py."""
    for made in adapt_programs(rng, single):
        steps = [Step(batch, inputs, lambda _, bound=bound: bound) for batch, inputs, bound in made.steps]
        yield Case(made.name, made.forward, steps, made.widths)


def linear_bound(weight: Layout, x: Floats) -> Bound:
    """The error a product may show: float32 sums, plus int8 activations when the weight is quantized."""
    w = np.abs(weight.dequantize().astype(np.float64))
    error = (np.abs(x).astype(np.float64) @ w.T) * (4 * np.sqrt(x.shape[1]) * ROUND)
    if isinstance(weight, Affine):
        grouped = np.abs(x.reshape(x.shape[0], -1, 32)).max(axis=-1) / 127.0  # [M, groups], one step of x
        sums = w.reshape(w.shape[0], -1, 32).sum(axis=-1)  # [N, groups]
        error = error + (grouped.astype(np.float64) * 0.5001) @ sums.T
    return lambda _: (error + 1e-6).astype(np.float32)


def relative(tolerance: float) -> Bound:
    """Allowed error in proportion to each value, with a floor for values near zero."""
    return lambda expected: tolerance * np.abs(expected) + tolerance * 1e-2


def rms_norm_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Widths off the vector size, tiny and large rows, a row of zeros."""
    for width in (64, 576, 72):
        weight = Dense(floats(rng, width), "f32")

        def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor], weight: Dense = weight) -> Tensor:
            return ops.rms_norm(inputs["x"], weight, 1e-5)

        x = floats(rng, 7, width)
        x[1] *= 1e-4
        x[2] *= 1e4
        x[3] = 0.0
        yield Case(f"rms_norm-{width}", forward, [Step(single(7), {"x": x}, relative(2e-6))], {"x": width})
    for heads, size, own in ((3, 64, False), (4, 24, False), (2, 128, True)):
        weight = Dense(floats(rng, size * heads if own else size), "f32")

        def by_head(
            ops: Ops, _: Batch, inputs: Mapping[str, Tensor], weight: Dense = weight, heads: int = heads
        ) -> Tensor:
            return ops.rms_norm(inputs["x"], weight, 1e-6, heads)

        step = Step(single(5), {"x": floats(rng, 5, heads * size)}, relative(2e-6))
        yield Case(f"rms_norm-{heads}x{size}{'-own' if own else ''}", by_head, [step], {"x": heads * size})


def layer_norm_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Rows far from zero, rows of one number, with and without a bias, whole and by heads."""
    for heads, size, biased, own in (
        (1, 384, True, True),
        (1, 72, False, True),
        (3, 64, False, True),
        (2, 32, True, False),
    ):
        width = heads * size
        weight = Dense(floats(rng, width if own else size), "f32")
        bias = Dense(floats(rng, width if own else size), "f32") if biased else None

        def forward(
            ops: Ops,
            _: Batch,
            inputs: Mapping[str, Tensor],
            weight: Dense = weight,
            bias: Dense | None = bias,
            heads: int = heads,
        ) -> Tensor:
            return ops.layer_norm(inputs["x"], weight, bias, 1e-5, heads)

        x = floats(rng, 6, width)
        x[1] += 30.0
        x[2] = 2.0
        x[3] *= 1e-3

        def bound(expected: Floats) -> npt.NDArray[np.floating]:
            allowed = 4e-6 * np.abs(expected).max(axis=-1, keepdims=True)
            allowed[1] *= 30  # the mean takes that many bits away
            return np.broadcast_to(allowed + 1e-6, expected.shape)

        name = f"layer_norm-{heads}x{size}{'-bias' if biased else ''}{'' if own else '-shared'}"
        yield Case(name, forward, [Step(single(6), {"x": x}, bound)], {"x": width})


def add_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Exact."""

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.add(inputs["a"], inputs["b"])

    for tokens, width in ((1, 64), (5, 72)):
        inputs = {"a": floats(rng, tokens, width), "b": floats(rng, tokens, width)}
        yield Case(
            f"add-{tokens}x{width}", forward, [Step(single(tokens), inputs, lambda _: 0.0)], {"a": width, "b": width}
        )


def swiglu_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """The whole range of the exponential, both tails included."""

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.swiglu(inputs["gate"], inputs["up"])

    gate = floats(rng, 4, 208, scale=4.0)
    gate[0, :8] = [0.0, -0.0, 80.0, -80.0, 120.0, -120.0, 1e-30, -1e-30]
    inputs = {"gate": gate, "up": floats(rng, 4, 208)}
    step = Step(single(4), inputs, lambda expected: 2e-6 * np.abs(expected) + 1e-30)
    yield Case("swiglu", forward, [step], {"gate": 208, "up": 208})


def geglu_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Both tails, and the middle where it changes sign."""

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.geglu(inputs["gate"], inputs["up"])

    gate = floats(rng, 4, 208, scale=3.0)
    gate[0, :8] = [0.0, -0.0, 80.0, -80.0, 12.0, -12.0, 1e-30, -1e-30]
    inputs = {"gate": gate, "up": floats(rng, 4, 208)}
    allowed = 4e-6 * np.abs(gate * inputs["up"]) + 1e-30
    yield Case("geglu", forward, [Step(single(4), inputs, lambda _: allowed)], {"gate": 208, "up": 208})


def gelu_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """The exact form, over the whole range of erf."""

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.gelu(inputs["x"])

    x = floats(rng, 4, 208, scale=2.0)
    x[0, :8] = [0.0, -0.0, 80.0, -80.0, 6.0, -6.0, 1e-30, -1e-30]
    x[1] = np.linspace(-7, 7, 208)
    yield Case("gelu", forward, [Step(single(4), {"x": x}, lambda _: 4e-6 * np.abs(x) + 1e-30)], {"x": 208})


def scale_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """One rounding."""

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.scale(inputs["x"], 25.298221281347036)

    yield Case("scale", forward, [Step(single(5), {"x": floats(rng, 5, 72)}, lambda _: 0.0)], {"x": 72})


def softcap_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Below, at and far beyond the cap."""

    def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.softcap(inputs["x"], 30.0)

    x = floats(rng, 5, 208, scale=20.0)
    x[0, :6] = [0.0, 1e-3, 30.0, -30.0, 1e4, -1e4]
    yield Case("softcap", forward, [Step(single(5), {"x": x}, lambda _: 4e-6 * 30.0)], {"x": 208})


def join_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Heads of unequal halves; exact."""
    for heads, m, n in ((1, 64, 16), (3, 32, 8), (4, 40, 24)):

        def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor], heads: int = heads) -> Tensor:
            return ops.join(inputs["a"], inputs["b"], heads)

        inputs = {"a": floats(rng, 5, heads * m), "b": floats(rng, 5, heads * n)}
        step = Step(single(5), inputs, lambda _: 0.0)
        yield Case(f"join-{heads}x{m}+{n}", forward, [step], {"a": heads * m, "b": heads * n})


def head_linear_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """A matrix per head, wider and narrower than its input."""
    for label in ("f32", "bf16", "q8_0", "q4_k"):
        for heads, n, k in ((3, 64, 256), (2, 40, 256)):
            weight = weights[label](heads * n, k, rng)

            def forward(
                ops: Ops, _: Batch, inputs: Mapping[str, Tensor], weight: Layout = weight, heads: int = heads
            ) -> Tensor:
                return ops.head_linear(inputs["x"], weight, heads)

            steps = []
            for tokens in (1, 5, 33):
                x = floats(rng, tokens, heads * k)
                own = [_rows(weight, h * n, h * n + n) for h in range(heads)]
                bounds = [linear_bound(own[h], x[:, h * k : h * k + k])(x) for h in range(heads)]
                allowed = np.concatenate([np.asarray(b) for b in bounds], axis=1)
                steps.append(Step(single(tokens), {"x": x}, lambda _, allowed=allowed: allowed))
            yield Case(f"head_linear-{label}-{heads}x{n}x{k}", forward, steps, {"x": heads * k})


def moe_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Every way of routing, with biases and the clamped activation, over several formats and row counts."""
    count, d, f = 8, 256, 256
    bias = Dense(floats(rng, count, scale=0.1), "f32")
    ways = {
        "softmax": Routing(2),
        "renormalized": Routing(3, renormalize=True),
        "groups": Routing(2, groups=4, top_groups=2, scale=2.5),
        "sigmoid": Routing(4, sigmoid=True, renormalize=True, scale=1.5, bias=bias, groups=4, top_groups=2, pair=True),
    }
    for label in ("f32", "bf16", "q4_0", "q4_k", "q8_0"):
        for way, routing in ways.items():
            if label != "f32" and way in ("softmax", "groups"):
                continue
            clamped = way == "renormalized"

            def some(n: int, k: int, label: str = label) -> tuple[Layout, ...]:
                return tuple(weights[label](n, k, rng) for _ in range(count))

            def vectors(n: int) -> tuple[Dense, ...]:
                return tuple(Dense(floats(rng, n, scale=0.2), "f32") for _ in range(count))

            own = (vectors(f), vectors(f), vectors(d)) if clamped else ((), (), ())
            experts = Experts(some(f, d), some(f, d), some(d, f), *own, limit=7.0 if clamped else None)

            def forward(
                ops: Ops,
                _: Batch,
                inputs: Mapping[str, Tensor],
                experts: Experts = experts,
                routing: Routing = routing,
            ) -> Tensor:
                return ops.moe(inputs["x"], inputs["logits"], experts, routing)

            # int8 activations, twice in a row: 1% of the rms, and the worst of 10,000 values is nine times that
            allowed = 1e-5 if label in ("f32", "bf16") else 0.15
            steps = []
            for tokens in (1, 3, 16, 40):
                inputs = {"x": floats(rng, tokens, d), "logits": spread(rng, tokens, count)}
                bound: Bound = lambda y, allowed=allowed: allowed * np.sqrt(np.mean(np.square(y))) + 1e-7  # noqa: E731
                steps.append(Step(single(tokens), inputs, bound))
            yield Case(f"moe-{label}-{way}", forward, steps, {"x": d, "logits": count})


def spread(rng: np.random.Generator, rows: int, count: int) -> Floats:
    """Logits whose order no rounding can change."""
    return (
        rng.permuted(np.tile(np.arange(count) * 0.4, (rows, 1)), axis=1) + rng.uniform(0, 0.1, (rows, count))
    ).astype(np.float32)


def _rows(weight: Layout, first: int, end: int) -> Layout:
    return replace(weight, data=weight.data[first:end])


def rope_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Both pairings, partial rotation, a magnitude, and positions far out."""
    for pairs in (True, False):
        for dim, head, magnitude in ((64, 64, 1.0), (32, 64, 1.2), (80, 80, 1.0)):
            freq = (1.0 / 10000.0 ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
            rope = Rope(frequencies=freq, dim=dim, pairs=pairs, magnitude=magnitude)

            def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor], rope: Rope = rope) -> Tensor:
                return ops.rope(inputs["x"], batch.pos, rope, 3)

            steps = [
                Step(single(6, start=start), {"x": floats(rng, 6, 3 * head)}, lambda _: 4e-6) for start in (0, 1000)
            ]
            kv = KV(layers=1, pages=64, page_size=16, kv_heads=1, head_dim=16)
            yield Case(f"rope-{'pairs' if pairs else 'half'}-{dim}of{head}", forward, steps, {"x": 3 * head}, kv)


def take_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Some rows, not in order of importance; exact."""

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.take(inputs["x"], batch.logit_rows)

    batch = single(9)
    batch.logit_rows = np.array([0, 3, 8], np.int32)
    yield Case("take", forward, [Step(batch, {"x": floats(rng, 9, 72)}, lambda _: 0.0)], {"x": 72})


def attention_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Prefill, chunks, decode and a mix of them, over shuffled pages, with several head shapes and both KV dtypes."""
    shapes = ((9, 3, 64), (4, 4, 80), (8, 1, 128), (2, 2, 256), (6, 2, 24), (3, 3, 8), (32, 1, 64), (14, 2, 40))
    for heads, kv_heads, dim in shapes:
        pages = [int(p) for p in rng.permutation(24)]
        a, b, c = pages[:6], pages[6:12], pages[12:18]
        batches = [
            ragged([(0, 37, a), (0, 1, b)]),  # two prefills, one of a single token
            ragged([(37, 1, a), (1, 20, b), (0, 5, c)]),  # decode, a chunk and a new one together
            ragged([(38, 1, a), (21, 1, b), (5, 60, c)]),
            ragged([(39, 1, a), (22, 1, b), (65, 1, c)]),
        ]
        for dtype in KV_DTYPES:
            yield _attention(
                f"attention-{heads}of{kv_heads}x{dim}", heads, KV(2, 24, 16, kv_heads, dim, dtype), batches, rng
            )
    for heads, kv_heads, dim in ((9, 3, 64), (8, 1, 24), (4, 4, 128)):
        for dtype in KV_DTYPES:
            kv = KV(2, 64, 16, kv_heads, dim, dtype)
            yield _attention(f"attention-long-{heads}of{kv_heads}x{dim}", heads, kv, _long(rng), rng)

    for heads, kv_heads, dim, window, cap, sink in (
        (4, 2, 64, 24, None, False),
        (6, 2, 256, 40, 50.0, False),
        (4, 1, 32, None, 20.0, False),
        (8, 2, 64, 16, None, True),
        (4, 4, 64, None, None, True),
    ):
        kv, sinks = KV(2, 64, 16, kv_heads, dim), Dense(floats(rng, heads), "f32") if sink else None
        name = f"attention-{heads}of{kv_heads}x{dim}-window{window}-cap{cap}-sink{sink}"
        yield _attention(name, heads, kv, _long(rng), rng, window=window, softcap=cap, sinks=sinks)


def latent_attention_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Many heads over one key whose front is the value, near and far."""
    for heads, dim, latent in ((4, 48, 32), (16, 576, 512), (3, 40, 40)):
        kv, scale = KV(2, 64, 16, 1, dim, latent=latent), dim**-0.5

        def forward(
            ops: Ops, batch: Batch, inputs: Mapping[str, Tensor], heads: int = heads, scale: float = scale
        ) -> Tensor:
            return ops.latent_attention(inputs["q"], inputs["k"], batch, layer=1, heads=heads, scale=scale)

        steps = []
        for batch in _long(rng)[: None if dim < 100 else 2]:  # wide ones take long
            inputs = {"q": floats(rng, batch.tokens, heads * dim, scale=2.0), "k": floats(rng, batch.tokens, dim)}
            steps.append(Step(batch, inputs, lambda _: 2e-5))
        yield Case(f"latent_attention-{heads}x{dim}-{latent}", forward, steps, {"q": heads * dim, "k": dim}, kv)


def encode_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Sequences of several lengths side by side, each seeing only itself, and all of itself."""
    for heads, kv_heads, dim in ((4, 4, 32), (6, 2, 64), (12, 12, 8)):

        def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor], heads: int = heads, dim: int = dim) -> Tensor:
            return ops.encode(inputs["q"], inputs["k"], inputs["v"], batch, heads=heads, scale=dim**-0.5)

        widths = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        steps = []
        for lengths in ((1,), (17, 1, 40), (64,)):
            rows, used = [], 0
            for n in lengths:
                rows.append((0, n, list(range(used, used + -(-n // 16)))))
                used += -(-n // 16)
            batch = ragged(rows)
            inputs = {name: floats(rng, batch.tokens, width) for name, width in widths.items()}
            steps.append(Step(batch, inputs, lambda _: 2e-5))
        yield Case(f"encode-{heads}of{kv_heads}x{dim}", forward, steps, widths)


def _long(rng: np.random.Generator) -> list[Batch]:
    """A past of many pages, and sequences that begin with the same ones: all of them, some, or only the first."""
    pages = [int(p) for p in rng.permutation(64)]
    a = pages[:40]
    b, c, d = a[:32] + pages[40:44], a[:20] + pages[44:48], a[:16] + pages[48:52]
    rows = [ragged([(start, min(120, 600 - start), a)]) for start in range(0, 600, 120)]
    rows.append(ragged([(512, 40, b), (320, 7, c), (256, 1, d)]))
    rows.append(ragged([(600, 1, a), (552, 1, b), (327, 1, c), (257, 1, d), (0, 1, pages[52:53])]))
    rows.append(ragged([(601, 3, a), (553, 1, b), (328, 30, c), (258, 2, d)]))
    return rows


def group_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Attention over several pools, for backends that have them (kv_groups)."""
    for windows in ((0, 40), (24, 100), (33,), (0, 0, 17)):
        for dtype in KV_DTYPES:
            yield _grouped(windows, dtype, rng)


def _grouped(windows: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Case:
    """A layer in each of several groups (window 0: everything is kept), added up. Pages behind a window are gone from the
    table and soon hold something else; groups have different numbers of pages, and the same page numbers for other tokens."""
    heads, kv_heads, dim = 4, 2, 64
    first, *more = [KV(2, 96 if w == 0 else 56, 16, kv_heads, dim, dtype, window=w) for w in windows]
    kv = KV(2, first.pages, 16, kv_heads, dim, dtype, window=first.window, more=tuple(more))
    width = kv_heads * dim

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        total: Tensor = None
        for g, window in enumerate(windows):
            q, k, v = (inputs[f"{name}{g}"] for name in "qkv")
            a = ops.attention(q, k, v, batch, layer=1, heads=heads, scale=dim**-0.5, window=window or None, group=g)
            total = a if total is None else ops.add(total, a)
        return total

    free = [[int(p) for p in rng.permutation(group.pages)] for group in kv.groups]
    held: list[dict[str, dict[int, int]]] = [{name: {} for name in "abc"} for _ in windows]  # by place in the row
    lengths = dict.fromkeys("abc", 0)
    turns: list[dict[str, int]] = [{"a": n} for n in (100, 128, 7)]
    turns += [{"a": 1, "b": 90}, {"a": 20, "b": 1, "c": 17}, {"c": 30, "b": 64}, *[{"a": 1, "b": 1, "c": 1}] * 5]
    widths = {f"{name}{g}": heads * dim if name == "q" else width for g in range(len(windows)) for name in "qkv"}
    steps = []
    for turn in turns:
        tables = []
        for g, window in enumerate(windows):
            rows = []
            for name, n in turn.items():
                start, own = lengths[name], held[g][name]
                low = max(0, start - window + 1) // 16 if window else 0
                free[g][:0] = [own.pop(i) for i in sorted(own) if i < low]  # taken again at once
                own |= {i: free[g].pop(0) for i in range(-(-(start + n) // 16)) if i >= low and i not in own}
                rows.append((start, n, [own.get(i, -1) for i in range(-(-(start + n) // 16))]))
            tables.append(ragged(rows))
        for name, n in turn.items():
            lengths[name] += n
        batch = tables[0]
        batch.more = tuple(Table(t.pages, t.write) for t in tables[1:])
        inputs = {
            name: floats(rng, batch.tokens, w, scale=2.0 if name[0] == "q" else 1.0) for name, w in widths.items()
        }
        steps.append(Step(batch, inputs, lambda _: 2e-5 * len(windows)))
    return Case(f"attention-groups-{'-'.join(map(str, windows))}-{dtype}", forward, steps, widths, kv)


def _attention(name: str, heads: int, kv: KV, batches: list[Batch], rng: np.random.Generator, **extra: Any) -> Case:
    width, scale = kv.kv_heads * kv.head_dim, kv.head_dim**-0.5

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.attention(inputs["q"], inputs["k"], inputs["v"], batch, layer=1, heads=heads, scale=scale, **extra)

    def inputs(tokens: int) -> dict[str, Floats]:
        return {
            "q": floats(rng, tokens, heads * kv.head_dim, scale=2.0),
            "k": floats(rng, tokens, width),
            "v": floats(rng, tokens, width),
        }

    steps = [Step(batch, inputs(batch.tokens), lambda _: 2e-5) for batch in batches]
    widths = {"q": heads * kv.head_dim, "k": width, "v": width}
    return Case(f"{name}-{kv.dtype}", forward, steps, widths, kv)
