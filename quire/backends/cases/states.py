"""Cases of layers that carry a state: a convolution, the delta rule, and the gate behind attention.

Every case carries states over several steps: in chunks that end inside pages, token by token, from the first token and
from a state that another sequence left behind, with pages of the table that have no state in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from quire.backends.batch import Batch, Table
from quire.backends.cases.kit import NO_KV, Case, MakeWeight, Step, floats, ragged
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense

Rows = list[tuple[int, int, list[int]]]  # first position, tokens, the row of states

STATES = 10
TURNS: tuple[Rows, ...] = (
    [(0, 20, [3, 5])],
    [(20, 1, [-1, 5]), (0, 7, [6])],
    [(21, 1, [-1, 5]), (16, 40, [3, -1, 2, 7]), (7, 9, [6])],  # the second goes on from what the first left
    [(22, 30, [-1, 5, 8, 9]), (56, 3, [-1, -1, -1, 7]), (16, 1, [6, 1]), (48, 5, [-1, -1, 2, 4])],
    [(52, 1, [-1, -1, -1, 9]), (17, 1, [-1, 1]), (53, 12, [-1, -1, -1, 4, 0]), (48, 2, [-1, -1, 2, 3])],
)


def over_states(rows: Rows) -> Batch:
    """A batch whose second group is one of states. Nothing is read of the first."""
    batch = ragged([(start, n, list(range(len(row)))) for start, n, row in rows])
    table = np.full_like(batch.pages, -1)
    for b, (_, _, row) in enumerate(rows):
        table[b, : len(row)] = row
    batch.more = (Table(table, np.full_like(batch.write, -1)),)
    return batch


def states(size: int) -> KV:
    """Two layers of such states, behind a group of keys and values."""
    return replace(NO_KV, more=(KV(2, STATES, 16, 0, 0, state=size),))


def conv_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Widths off the vector size and beyond what one thread takes; two to five taps; a part of the state that is another's."""
    for n, taps, at in ((72, 4, 0), (300, 2, 7), (520, 5, 0)):
        weight = Dense(floats(rng, taps * n, scale=0.6), "f32")

        def forward(
            ops: Ops, batch: Batch, inputs: Mapping[str, Tensor], weight: Dense = weight, at: int = at
        ) -> Tensor:
            return ops.conv(inputs["x"], weight, batch, layer=1, group=1, at=at)

        steps = [
            Step(batch, {"x": floats(rng, batch.tokens, n)}, lambda y: 2e-6 * max(1.0, float(np.abs(y).max())))
            for batch in map(over_states, TURNS)
        ]
        yield Case(f"conv-{n}-{taps}", forward, steps, {"x": n}, states(at + (taps - 1) * n))


def delta_rule_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Heads of one size and of two, shared keys, columns off the vector size, states that fade at once or hardly at all."""
    for key_heads, heads, key_dim, dim, at in ((2, 2, 16, 16, 0), (2, 6, 24, 72, 11), (1, 2, 128, 128, 0)):
        decay = Dense(-rng.uniform(0.01, 4.0, heads).astype(np.float32), "f32")
        bias = Dense(floats(rng, heads), "f32")
        width = 2 * key_heads * key_dim + heads * dim

        def forward(
            ops: Ops,
            batch: Batch,
            inputs: Mapping[str, Tensor],
            vectors: tuple[Dense, Dense] = (decay, bias),
            sizes: tuple[int, int, int, int] = (key_heads, heads, key_dim, at),
        ) -> Tensor:
            key_heads, heads, key_dim, at = sizes
            return ops.delta_rule(
                inputs["qkv"], inputs["a"], inputs["b"], *vectors, batch,
                layer=1, group=1, key_heads=key_heads, heads=heads, key_dim=key_dim, at=at,
            )  # fmt: skip

        widths = {"qkv": width, "a": heads, "b": heads}
        steps = []
        for batch in map(over_states, TURNS):
            inputs = {name: floats(rng, batch.tokens, n, scale=1.0 if n > heads else 2.0) for name, n in widths.items()}
            inputs["qkv"][0, : key_heads * key_dim] = 0.0  # a query without a direction
            inputs["a"][-1, 0] = 60.0
            steps.append(Step(batch, inputs, lambda _: 1e-5))
        name = f"delta_rule-{heads}of{key_heads}-{key_dim}x{dim}"
        yield Case(name, forward, steps, widths, states(at + heads * key_dim * dim))
