"""The reference backend: every op in plain numpy, executed as it goes. It is the specification and the oracle.

Nothing here is fast, and nothing is clever: weights are dequantized to float32, sums are taken in float64 where that
makes the answer more certain, and each sequence and head is handled on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV, TABLE, Forward
from quire.layouts import Dense, Floats, Layout, Rope


class ReferenceOps:
    """Ops over numpy arrays, with the KV pool of one program."""

    def __init__(self, backend: ReferenceBackend, kv: KV):
        self._backend = backend
        self._kv = kv
        shape = (kv.layers, kv.pages * kv.page_size, kv.kv_heads, kv.head_dim)
        self._keys = np.zeros(shape, np.float16)
        self._values = np.zeros(shape, np.float16)

    def embed(self, ids: I32, table: Layout) -> Floats:
        return self._backend.dense(table)[ids]

    def rms_norm(self, x: Floats, weight: Dense, eps: float) -> Floats:
        mean = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
        return ((x / np.sqrt(mean + eps)) * self._backend.dense(weight)).astype(np.float32)

    def linear(self, x: Floats, weight: Layout, bias: Dense | None = None) -> Floats:
        y = x @ self._backend.dense(weight).T
        return y if bias is None else y + self._backend.dense(bias)

    def add(self, a: Floats, b: Floats) -> Floats:
        return a + b

    def rope(self, x: Floats, pos: I32, rope: Rope, heads: int) -> Floats:
        angle = (pos.astype(np.float32)[:, None] * rope.frequencies[None, :]).astype(np.float64)  # [T, dim / 2]
        cos = (np.cos(angle) * rope.magnitude).astype(np.float32)[:, None, :]
        sin = (np.sin(angle) * rope.magnitude).astype(np.float32)[:, None, :]
        out = x.reshape(x.shape[0], heads, -1).copy()  # [T, H, D]
        first, second = rope_columns(rope)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return out.reshape(x.shape)

    def attention(
        self, q: Floats, k: Floats, v: Floats, batch: Batch, *, layer: int, heads: int, scale: float
    ) -> Floats:
        kv = self._kv
        keys, values = self._keys[layer], self._values[layer]  # [slots, Hk, D]
        keys[batch.write] = k.reshape(-1, kv.kv_heads, kv.head_dim)
        values[batch.write] = v.reshape(-1, kv.kv_heads, kv.head_dim)
        queries = q.reshape(-1, heads, kv.head_dim)
        out = np.empty_like(queries)
        for b in range(batch.sequences):
            length = int(batch.kv_len[b])
            where = np.arange(length)
            slots = batch.pages[b, where // kv.page_size] * kv.page_size + where % kv.page_size
            past_k = np.repeat(keys[slots].astype(np.float32), heads // kv.kv_heads, axis=1)  # [S, H, D]
            past_v = np.repeat(values[slots].astype(np.float32), heads // kv.kv_heads, axis=1)
            rows = slice(int(batch.q_start[b]), int(batch.q_start[b + 1]))
            scores = np.einsum("thd,shd->hts", queries[rows], past_k, dtype=np.float64) * scale
            hidden = where[None, None, :] > batch.pos[rows][None, :, None]
            scores = np.where(hidden, -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[rows] = np.einsum("hts,shd->thd", weights, past_v)
        return out.reshape(q.shape)

    def swiglu(self, gate: Floats, up: Floats) -> Floats:
        wide = gate.astype(np.float64)
        with np.errstate(over="ignore"):
            return (wide / (1.0 + np.exp(-wide)) * up).astype(np.float32)

    def take(self, x: Floats, rows: I32) -> Floats:
        return x[rows]


def rope_columns(rope: Rope) -> tuple[slice, slice]:
    """The two halves of each rotated pair, as column slices of a head."""
    if rope.pairs:
        return slice(0, rope.dim, 2), slice(1, rope.dim, 2)
    return slice(0, rope.dim // 2), slice(rope.dim // 2, rope.dim)


class ReferenceProgram:
    """Runs the forward as it is, every time."""

    def __init__(self, forward: Forward, ops: ReferenceOps):
        self._forward = forward
        self._ops = ops

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
        return np.ascontiguousarray(self._forward(self._ops, batch, inputs), np.float32)


class ReferenceBackend:
    """Dequantizes each weight once and keeps it as float32."""

    name = "reference"

    def __init__(self) -> None:
        self._dense: dict[int, tuple[Layout, Floats]] = {}  # the layout is kept so that its id stays its own

    def dense(self, layout: Layout) -> Floats:
        """The weight as float32."""
        if id(layout) not in self._dense:
            self._dense[id(layout)] = (layout, layout.dequantize())
        return self._dense[id(layout)][1]

    def compile(
        self,
        forward: Forward,
        *,
        kv: KV,
        max_tokens: int,
        max_rows: int,
        inputs: Mapping[str, int] = {},
        packed: Callable[[Layout, int, int], None] | None = None,
    ) -> ReferenceProgram:
        return ReferenceProgram(forward, ReferenceOps(self, kv))

    def describe(self) -> str:
        return "reference (numpy)"

    def implementations(self) -> dict[str, str]:
        return {op.name: "numpy" for op in TABLE}
