"""Cases of attention over one pool: prompts, chunks and decode rows in one batch, near and far, of every kind of head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from quire.backends.batch import Batch
from quire.backends.cases.kit import Case, MakeWeight, Step, attention_bound, floats, ragged
from quire.backends.kv import KV_DTYPES
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Floats


def attention_cases(weights: Mapping[str, MakeWeight], rng: np.random.Generator) -> Iterator[Case]:
    """Prefill, chunks, decode and a mix of them, over shuffled pages, with several head shapes and every KV dtype."""
    yield from _shapes([name for name in KV_DTYPES if name != "int16"], rng)
    yield from _kinds("f16", rng)
    yield from _shapes(["int16"], rng)
    yield from _kinds("int16", rng)


def _shapes(dtypes: Sequence[str], rng: np.random.Generator) -> Iterator[Case]:
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
        for dtype in dtypes:
            kv = KV(2, 24, 16, kv_heads, dim, dtype)
            yield _attention(f"attention-{heads}of{kv_heads}x{dim}", heads, kv, batches, rng)
    for heads, kv_heads, dim in ((9, 3, 64), (8, 1, 24), (4, 4, 128)):
        for dtype in dtypes:
            kv = KV(2, 64, 16, kv_heads, dim, dtype)
            yield _attention(f"attention-long-{heads}of{kv_heads}x{dim}", heads, kv, _long(rng), rng)


def _kinds(dtype: str, rng: np.random.Generator) -> Iterator[Case]:
    for heads, kv_heads, dim, window, cap, sink in (
        (4, 2, 64, 24, None, False),
        (6, 2, 256, 40, 50.0, False),
        (4, 1, 32, None, 20.0, False),
        (8, 2, 64, 16, None, True),
        (4, 4, 64, None, None, True),
    ):
        kv, sinks = KV(2, 64, 16, kv_heads, dim, dtype), Dense(floats(rng, heads), "f32") if sink else None
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

    bound = attention_bound(kv)
    steps = [Step(batch, inputs(batch.tokens), lambda _: bound) for batch in batches]
    widths = {"q": heads * kv.head_dim, "k": width, "v": width}
    return Case(f"{name}-{kv.dtype}", forward, steps, widths, kv)
