"""Inputs for the conformance test of `adapt`.

Rows of several adapters of different ranks, and of none, in every order; a slot that is empty; an adapter that has nothing at
one of the targets; the op after a linear, after another tensor, inside a gated pair and after rows were taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from quire.backends.adapters import Pair, Target
from quire.backends.batch import Batch
from quire.backends.cases.kit import ROUND, Case, MakeWeight, Step, floats, single
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Floats

RANKS = (4, 16, 40)  # of slots 0 to 2; slot 3 is empty
SLOTS = 4
PATTERNS: tuple[tuple[int, ...], ...] = ((0,), (-1,), (3,), (0, 1, 2, -1), (2, 2, 2, 0, 0, -1, 1), (1, -1))


def adapt_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Pairs of every type; they are plain numbers whatever the weight is."""
    for dtype in ("f32", "f16", "bf16"):
        yield _plain(rng, dtype, 50, 96)
    yield _plain(rng, "f16", 64, 30)
    yield _gated(rng)
    yield _taken(rng)


def _plain(rng: np.random.Generator, dtype: str, n: int, k: int) -> Case:
    target = _target("plain", n, k, rng, dtype)

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.adapt(inputs["y"], inputs["x"], batch.adapters, target)

    steps = []
    for tokens in (1, 2, 5, 16, 33, 70):
        for pattern in PATTERNS:
            slots = np.resize(np.array(pattern, np.int32), tokens)
            x, y = floats(rng, tokens, k), floats(rng, tokens, n)
            steps.append(_step(replace(single(tokens), adapters=slots), {"y": y, "x": x}, _bound(target, x, y, slots)))
    x, y = floats(rng, 3, k), floats(rng, 3, n)
    steps.append(_step(single(3), {"y": y, "x": x}, np.zeros((3, n), np.float32)))  # a step without adapters
    return Case(f"adapt-{dtype}-{n}x{k}", forward, steps, {"y": n, "x": k})


def _gated(rng: np.random.Generator) -> Case:
    """gate and up, which backends compute together: each is a target of its own, and slot 1 has nothing at up's."""
    k, n = 64, 48
    gate, up, down = (Dense(floats(rng, *shape, scale=0.1), "f32") for shape in ((n, k), (n, k), (k, n)))
    at_gate, at_up = _target("gate", n, k, rng, "f32"), _target("up", n, k, rng, "f32", leave=1)
    at_down = _target("down", k, n, rng, "f32")

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x, rows = inputs["x"], batch.adapters
        g = ops.adapt(ops.linear(x, gate), x, rows, at_gate)
        h = ops.swiglu(g, ops.adapt(ops.linear(x, up), x, rows, at_up))
        return ops.add(x, ops.adapt(ops.linear(h, down), h, rows, at_down))

    steps = []
    for tokens in (1, 4, 40):
        slots = np.resize(np.array((0, 1, 1, -1, 2), np.int32), tokens)
        x = floats(rng, tokens, k)
        steps.append(_step(replace(single(tokens), adapters=slots), {"x": x}, np.full((tokens, k), 2e-4, np.float32)))
    return Case("adapt-gated", forward, steps, {"x": k})


def _taken(rng: np.random.Generator) -> Case:
    """The op after `take`: a row's adapter is that of the row it was."""
    k, n = 32, 40
    head, target = Dense(floats(rng, n, k, scale=0.1), "f32"), _target("head", n, k, rng, "f32")

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = ops.take(inputs["x"], batch.logit_rows)
        return ops.adapt(ops.linear(x, head), x, batch.taken_adapters, target)

    steps = []
    for rows in ([4], [6, 0, 3], [5, 5, 1, 2]):
        batch = replace(
            single(7), adapters=np.array((0, 0, 1, -1, 2, 1, 0), np.int32), logit_rows=np.array(rows, np.int32)
        )
        steps.append(_step(batch, {"x": floats(rng, 7, k)}, np.full((len(rows), n), 1e-4, np.float32)))
    return Case("adapt-taken", forward, steps, {"x": k})


def _target(name: str, n: int, k: int, rng: np.random.Generator, dtype: str, leave: int = -1) -> Target:
    pairs = {
        slot: Pair(_matrix(rng, r, k, dtype), _matrix(rng, n, r, dtype), scale)
        for slot, (r, scale) in enumerate(zip(RANKS, (2.0, 1.0, 0.7), strict=True))
        if slot != leave
    }
    return Target(name, n, k, slots=SLOTS, rank=max(RANKS), pairs=pairs)


def _matrix(rng: np.random.Generator, n: int, k: int, dtype: str) -> Dense:
    values = floats(rng, n, k, scale=0.2)
    if dtype == "f16":
        return Dense(values.astype(np.float16), dtype)
    return Dense((values.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else values, dtype)


def _bound(target: Target, x: Floats, y: Floats, slots: np.ndarray) -> Floats:
    """Rounding of the two sums; rows without a pair are exact."""
    out = np.zeros(y.shape)
    for slot, pair in target.pairs.items():
        inner = np.abs(x).astype(np.float64) @ np.abs(pair.a.dequantize().astype(np.float64)).T * pair.scale
        size = inner @ np.abs(pair.b.dequantize().astype(np.float64)).T
        own = slots == slot
        out[own] = (4 * np.sqrt(x.shape[1] + pair.rank) * ROUND * size + 2 * ROUND * np.abs(y))[own] + 1e-6
    return out.astype(np.float32)


def _step(batch: Batch, inputs: dict[str, Floats], bound: Floats) -> Step:
    return Step(batch, inputs, lambda _: bound)
