"""Cases of mixtures of experts: every way of routing, with biases and the clamped activation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from quire.backends.batch import Batch
from quire.backends.cases.kit import Bound, Case, MakeWeight, Step, floats, single
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Experts, Floats, Layout, Routing


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
                steps.append(Step(single(tokens), inputs, within(allowed)))
            yield Case(f"moe-{label}-{way}", forward, steps, {"x": d, "logits": count})


def within(share: float) -> Bound:
    """An error bound: that share of the root of the mean square."""
    return lambda y: share * np.sqrt(np.mean(np.square(y))) + 1e-7


def spread(rng: np.random.Generator, rows: int, count: int) -> Floats:
    """Logits whose order no rounding can change."""
    return (
        rng.permuted(np.tile(np.arange(count) * 0.4, (rows, 1)), axis=1) + rng.uniform(0, 0.1, (rows, count))
    ).astype(np.float32)
