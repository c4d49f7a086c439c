"""Cases of the ops that take rows as they are: norms, rotations, and rows or heads put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from quire.backends.batch import Batch
from quire.backends.cases.kit import Case, MakeWeight, Step, floats, relative, single
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Floats, Rope


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


def join_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Heads of unequal halves; exact."""
    for heads, m, n in ((1, 64, 16), (3, 32, 8), (4, 40, 24)):

        def forward(ops: Ops, _: Batch, inputs: Mapping[str, Tensor], heads: int = heads) -> Tensor:
            return ops.join(inputs["a"], inputs["b"], heads)

        inputs = {"a": floats(rng, 5, heads * m), "b": floats(rng, 5, heads * n)}
        step = Step(single(5), inputs, lambda _: 0.0)
        yield Case(f"join-{heads}x{m}+{n}", forward, [step], {"a": heads * m, "b": heads * n})


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
        axes = tuple(i % 3 for i in range(16))
        several = Rope((1.0 / 100.0 ** (np.arange(16) / 16)).astype(np.float32), 32, pairs, axes=axes)

        def turned(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor], rope: Rope = several) -> Tensor:
            return ops.rope(inputs["x"], batch.pos, rope, 3)

        steps = [Step(single(6), {"x": floats(rng, 6, 3 * 64)}, lambda _: 4e-6) for _ in range(2)]
        steps[1].batch.coords = rng.integers(0, 500, (3, 6)).astype(np.int32)
        yield Case(f"rope-{'pairs' if pairs else 'half'}-axes", turned, steps, {"x": 3 * 64})


def take_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Some rows, not in order of importance; exact."""

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return ops.take(inputs["x"], batch.logit_rows)

    batch = single(9)
    batch.logit_rows = np.array([0, 3, 8], np.int32)
    yield Case("take", forward, [Step(batch, {"x": floats(rng, 9, 72)}, lambda _: 0.0)], {"x": 72})
