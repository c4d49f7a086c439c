"""Cases of the ops that multiply with a matrix or read rows of one: every format, and row counts around the tile sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from quire.backends.batch import Batch, Given
from quire.backends.cases.kit import Case, MakeWeight, Step, embed_bound, floats, linear_bound, single
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Layout


def embed_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Rows of a table of every format; exact but for those that may be kept as integers of 14 bits."""
    for label, make in weights.items():
        table = make(37, 256, rng)

        def forward(ops: Ops, batch: Batch, _: Mapping[str, Tensor], table: Layout = table) -> Tensor:
            return ops.embed(batch.ids, table)

        ids = rng.permutation(37)
        allowed = embed_bound(table, ids)
        yield Case(f"embed-{label}", forward, [Step(single(37, ids), {}, lambda _, allowed=allowed: allowed)])
    if "f32" not in weights:
        return
    table = weights["f32"](37, 256, rng)

    def placed(ops: Ops, batch: Batch, _: Mapping[str, Tensor]) -> Tensor:
        return ops.embed(batch.ids, table)

    steps = []
    for at in (np.arange(9), np.array([0, 4, 5, 8]), np.array([8])):
        batch = single(9, rng.integers(0, 37, 9))
        batch.given = Given(at.astype(np.int32), floats(rng, at.size, 256))
        steps.append(Step(batch, {}, lambda _: 0.0))
    yield Case("embed-given", placed, steps)


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


def head_linear_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """A matrix per head, wider and narrower than its input."""
    for label in ("f32", "f16", "bf16", "q8_0", "q4_k"):
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


def _rows(weight: Layout, first: int, end: int) -> Layout:
    return replace(weight, data=weight.data[first:end])
