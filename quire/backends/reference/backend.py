"""The reference backend: every op in plain numpy, executed as it goes. It is the specification and the oracle.

Nothing here is fast, and nothing is clever: weights are dequantized to float32, sums are taken in float64 where that
makes the answer more certain, and each sequence and head is handled on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32, Batch
from quire.backends.ops import KV, KV_DTYPES, TABLE, Forward, check_kv
from quire.layouts import Dense, Floats, Layout, Rope


class Cache:
    """K or V of every layer, rounded as the pool's dtype says."""

    def __init__(self, kv: KV):
        shape = (kv.layers, kv.pages * kv.page_size, kv.kv_heads, kv.head_dim)
        self._data = np.zeros(shape, np.int8 if kv.dtype == "int8" else np.float16)  # float16 holds every e4m3
        self._round = {"int8": round_to_int8, "fp8": round_to_fp8}.get(kv.dtype)
        self._scale = None if self._round is None else np.zeros(shape[:-1], np.float32)

    def write(self, layer: int, slots: I32, x: Floats) -> None:
        rows = x.reshape(-1, *self._data.shape[2:])  # [T, Hk, D]
        if self._scale is None or self._round is None:
            self._data[layer, slots] = rows
        else:
            self._data[layer, slots], self._scale[layer, slots] = self._round(rows)

    def read(self, layer: int, slots: npt.NDArray[np.integer]) -> Floats:  # [S, Hk, D]
        data = self._data[layer, slots].astype(np.float32)
        return data if self._scale is None else data * self._scale[layer, slots][..., None]


def round_to_int8(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Codes and scales of the last axis. What is not finite gets a scale that is not a number; what is tiny becomes 0."""
    amax = np.abs(x).max(axis=-1).astype(np.float32)
    finite, usable = np.isfinite(amax), np.isfinite(amax) & (amax >= np.float32(1e-36))
    with np.errstate(divide="ignore", over="ignore"):
        by = np.where(usable, np.float32(127) / amax, np.float32(0)).astype(np.float32)
    codes = np.rint(np.where(finite[..., None], x, np.float32(0)) * by[..., None])
    scale = np.where(usable, amax / np.float32(127), np.where(finite, np.float32(0), np.float32("nan")))
    return np.clip(codes, -127, 127).astype(np.int8), scale.astype(np.float32)


def round_to_fp8(x: Floats) -> tuple[npt.NDArray[np.float16], Floats]:
    """Numbers that e4m3 has, ties to the even one, and scales of the last axis; what is not finite as for int8."""
    amax = np.abs(x).max(axis=-1).astype(np.float32)
    scale = np.maximum(amax, np.float32(1e-30)) / np.float32(448)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = x / scale[..., None]
        exponent = np.maximum(np.frexp(codes)[1] - 1, -6)  # below 2^-6 the steps stay as they are there
        step = np.ldexp(np.float32(1), exponent - 3)  # three bits behind the first
        codes = np.rint(codes / step) * step
    return codes.astype(np.float16), np.where(np.isfinite(amax), scale, np.float32("nan")).astype(np.float32)


class ReferenceOps:
    """Ops over numpy arrays, with the KV pool of one program."""

    def __init__(self, backend: ReferenceBackend, kv: KV):
        self._backend = backend
        self._kv = kv
        self._keys, self._values = Cache(kv), Cache(kv)

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
        self._keys.write(layer, batch.write, k)
        self._values.write(layer, batch.write, v)
        queries = q.reshape(-1, heads, kv.head_dim)
        out = np.empty_like(queries)
        for b in range(batch.sequences):
            length = int(batch.kv_len[b])
            where = np.arange(length)
            slots = batch.pages[b, where // kv.page_size] * kv.page_size + where % kv.page_size
            past_k = np.repeat(self._keys.read(layer, slots), heads // kv.kv_heads, axis=1)  # [S, H, D]
            past_v = np.repeat(self._values.read(layer, slots), heads // kv.kv_heads, axis=1)
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
    kv_dtypes = tuple(KV_DTYPES)

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
        check_kv(kv, self)
        return ReferenceProgram(forward, ReferenceOps(self, kv))

    def describe(self) -> str:
        return "reference (numpy)"

    def implementations(self) -> dict[str, str]:
        return {op.name: "numpy" for op in TABLE}
