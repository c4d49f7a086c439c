"""The reference backend: every op in plain numpy, executed as it goes. It is the specification and the oracle.

Nothing here is fast, and nothing is clever: weights are dequantized to float32, sums are taken in float64 where that
makes the answer more certain, and each sequence and head is handled on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from quire.backends.adapters import Pair, Site
from quire.backends.batch import I32, Batch, Table
from quire.backends.ops import KV, KV_DTYPES, TABLE, Forward, check_kv
from quire.backends.states import walks
from quire.layouts import Dense, Experts, Floats, Layout, Rope, Routing


class Cache:
    """K or V of every layer, rounded as the pool's dtype says."""

    def __init__(self, kv: KV):
        shape = (kv.layers, kv.pages * kv.page_size, kv.kv_heads, kv.head_dim)
        integers = {"int8": np.int8, "int16": np.int16}
        self._data = np.zeros(shape, integers.get(kv.dtype, np.float16))  # float16 holds every e4m3
        self._round = {"int8": round_to_int8, "int16": round_to_int16, "fp8": round_to_fp8}.get(kv.dtype)
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
    codes, scale = _round_to(x, 127, 1e-36)
    return codes.astype(np.int8), scale


def round_to_int16(x: Floats) -> tuple[npt.NDArray[np.int16], Floats]:
    codes, scale = _round_to(x, 127 * 256 + 127, 1e-34)  # two signed bytes, none of them -128 in front
    return codes.astype(np.int16), scale


def _round_to(x: Floats, top: int, least: float) -> tuple[Floats, Floats]:
    """Codes and scales of the last axis. What is not finite gets a scale that is not a number; what is tiny becomes 0."""
    amax = np.abs(x).max(axis=-1).astype(np.float32)
    finite, usable = np.isfinite(amax), np.isfinite(amax) & (amax >= np.float32(least))
    with np.errstate(divide="ignore", over="ignore"):
        by = np.where(usable, np.float32(top) / amax, np.float32(0)).astype(np.float32)
    codes = np.rint(np.where(finite[..., None], x, np.float32(0)) * by[..., None])
    scale = np.where(usable, amax / np.float32(top), np.where(finite, np.float32(0), np.float32("nan")))
    return np.clip(codes, -top, top).astype(np.float32), scale.astype(np.float32)


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
        self._keys = [Cache(own) for own in kv.groups]
        self._values = [None if own.latent else Cache(own) for own in kv.groups]
        self._states = [np.zeros((own.pages, own.layers, own.state), np.float32) for own in kv.groups]
        self.adapters: dict[int, Mapping[Site, Pair]] = {}  # by slot
        self.batch: Batch | None = None  # of the run

    def embed(self, ids: I32, table: Layout) -> Floats:
        rows, given = self._backend.dense(table)[ids], None if self.batch is None else self.batch.given
        if given is not None:
            rows[given.at] = given.rows
        return rows

    def rms_norm(self, x: Floats, weight: Dense, eps: float, heads: int = 1) -> Floats:
        parts = by_head(x, heads)
        mean = np.mean(np.square(parts, dtype=np.float64), axis=-1, keepdims=True)
        return self._weighted(parts / np.sqrt(mean + eps), weight).reshape(x.shape)

    def layer_norm(self, x: Floats, weight: Dense, bias: Dense | None, eps: float, heads: int = 1) -> Floats:
        parts = by_head(x, heads).astype(np.float64)
        centred = parts - parts.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centred), axis=-1, keepdims=True)
        y = self._weighted(centred / np.sqrt(variance + eps), weight).reshape(x.shape)
        return y if bias is None else y + np.tile(self._backend.dense(bias), x.shape[1] // bias.shape[0])

    def _weighted(self, parts: npt.NDArray[np.float64], weight: Dense) -> Floats:
        """parts [T, heads, n] times a weight of [n] or [heads * n]."""
        own = self._backend.dense(weight).reshape(-1, parts.shape[2])
        return (parts * own).astype(np.float32)

    def linear(self, x: Floats, weight: Layout, bias: Dense | None = None) -> Floats:
        y = x @ self._backend.dense(weight).T
        return y if bias is None else y + self._backend.dense(bias)

    def adapt(self, y: Floats, x: Floats, rows: I32 | None, site: Site) -> Floats:
        out = y.copy()
        for slot in () if rows is None else np.unique(rows[rows >= 0]).tolist():
            placed = self.adapters.get(slot)
            pair = site.pairs.get(slot) if placed is None else placed.get(site)
            if pair is not None:
                own = rows == slot
                inner = (x[own] @ pair.a.dequantize().T) * np.float32(pair.scale)
                out[own] += inner @ pair.b.dequantize().T
        return out

    def add(self, a: Floats, b: Floats) -> Floats:
        return a + b

    def rope(self, x: Floats, pos: I32, rope: Rope, heads: int) -> Floats:
        coords = None if self.batch is None else self.batch.coords
        at = pos[:, None] if coords is None or not rope.axes else coords[list(rope.axes)].T
        angle = (at.astype(np.float32) * rope.frequencies[None, :]).astype(np.float64)  # [T, dim / 2]
        cos = (np.cos(angle) * rope.magnitude).astype(np.float32)[:, None, :]
        sin = (np.sin(angle) * rope.magnitude).astype(np.float32)[:, None, :]
        out = x.reshape(x.shape[0], heads, -1).copy()  # [T, H, D]
        first, second = rope_columns(rope)
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return out.reshape(x.shape)

    def attention(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        batch: Batch,
        *,
        layer: int,
        heads: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Dense | None = None,
        group: int = 0,
    ) -> Floats:
        kv, keys, values, table = self._kv.groups[group], self._keys[group], self._values[group], batch.table(group)
        assert values is not None
        keys.write(layer, table.write, k)
        values.write(layer, table.write, v)
        queries = q.reshape(-1, heads, kv.head_dim)
        out = np.empty_like(queries)
        for b, rows, first, slots in self._pasts(batch, window, table):
            past_k = np.repeat(keys.read(layer, slots), heads // kv.kv_heads, axis=1)  # [S, H, D]
            past_v = np.repeat(values.read(layer, slots), heads // kv.kv_heads, axis=1)
            scores = np.einsum("thd,shd->hts", queries[rows], past_k, dtype=np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            where, pos = np.arange(first, int(batch.kv_len[b]))[None, :], batch.pos[rows][:, None]
            hidden = where > pos if window is None else (where > pos) | (where <= pos - window)
            scores = np.where(hidden[None], -np.inf, scores)
            out[rows] = np.einsum(
                "hts,shd->thd", softmax(scores, None if sinks is None else self._backend.dense(sinks)), past_v
            )
        return out.reshape(q.shape)

    def latent_attention(
        self, q: Floats, k: Floats, batch: Batch, *, layer: int, heads: int, scale: float, group: int = 0
    ) -> Floats:
        kv, keys, table = self._kv.groups[group], self._keys[group], batch.table(group)
        keys.write(layer, table.write, k)
        queries = q.reshape(-1, heads, kv.head_dim)
        out = np.empty((q.shape[0], heads, kv.latent), np.float32)
        for b, rows, _, slots in self._pasts(batch, None, table):
            past = keys.read(layer, slots)[:, 0]  # [S, D]
            scores = np.einsum("thd,sd->hts", queries[rows], past, dtype=np.float64) * scale
            hidden = np.arange(int(batch.kv_len[b]))[None, :] > batch.pos[rows][:, None]
            weights = softmax(np.where(hidden[None], -np.inf, scores))
            out[rows] = np.einsum("hts,sd->thd", weights, past[:, : kv.latent])
        return out.reshape(q.shape[0], heads * kv.latent)

    def _pasts(
        self, batch: Batch, window: int | None, table: Table
    ) -> Iterator[tuple[int, slice, int, npt.NDArray[np.integer]]]:
        """(sequence, its rows, first position any of them sees, where the tokens from there on lie)."""
        size = self._kv.page_size
        for b in range(batch.sequences):
            rows = slice(int(batch.q_start[b]), int(batch.q_start[b + 1]))
            first = 0 if window is None else max(0, int(batch.pos[rows.start]) - window + 1)
            where = np.arange(first, int(batch.kv_len[b]))
            yield b, rows, first, table.pages[b, where // size] * size + where % size

    def encode(self, q: Floats, k: Floats, v: Floats, batch: Batch, *, heads: int, scale: float) -> Floats:
        dim = q.shape[1] // heads
        queries, keys, values = (by_head(x, x.shape[1] // dim) for x in (q, k, v))
        share = heads // keys.shape[1]
        out = np.empty_like(queries)
        for b in range(batch.sequences):
            rows = slice(int(batch.q_start[b]), int(batch.q_start[b + 1]))
            own_k, own_v = (np.repeat(x[rows], share, axis=1) for x in (keys, values))
            scores = np.einsum("thd,shd->hts", queries[rows], own_k, dtype=np.float64) * scale
            out[rows] = np.einsum("hts,shd->thd", softmax(scores), own_v)
        return out.reshape(q.shape)

    def conv(self, x: Floats, weight: Dense, batch: Batch, *, layer: int, group: int, at: int = 0) -> Floats:
        factors = self._backend.dense(weight).reshape(-1, x.shape[1]).astype(np.float64)  # [K, n]
        past = len(factors) - 1
        states = self._states[group][:, layer, at : at + past * x.shape[1]].reshape(-1, past, x.shape[1])
        out = np.empty_like(x)
        for walk in walks(batch, group, self._kv.page_size):
            before = np.zeros_like(x, shape=states.shape[1:]) if walk.load < 0 else states[walk.load]
            seen = np.concatenate([before, x[walk.rows]])
            n = len(seen) - past
            out[walk.rows] = silu(np.asarray(sum(f * seen[j : j + n] for j, f in enumerate(factors))))
            for done, page in walk.stops:
                states[page] = seen[done : done + past]
        return out

    def delta_rule(
        self,
        qkv: Floats,
        a: Floats,
        b: Floats,
        decay: Dense,
        bias: Dense,
        batch: Batch,
        *,
        layer: int,
        group: int,
        key_heads: int,
        heads: int,
        key_dim: int,
        at: int = 0,
    ) -> Floats:
        q, k, v = np.split(qkv, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
        v = by_head(v, heads).astype(np.float64)
        q, k = (np.repeat(unit(by_head(x, key_heads)), heads // key_heads, axis=1) for x in (q, k))  # [T, H, Dk]
        slow = np.exp(self._backend.dense(decay) * np.logaddexp(0.0, a.astype(np.float64) + self._backend.dense(bias)))
        beta = 1.0 / (1.0 + np.exp(-b.astype(np.float64)))
        shape = (heads, key_dim, v.shape[2])
        states = self._states[group][:, layer, at : at + math.prod(shape)].reshape(-1, *shape)
        out = np.empty((len(qkv), heads, v.shape[2]), np.float32)
        for walk in walks(batch, group, self._kv.page_size):
            own = np.zeros(shape, np.float32) if walk.load < 0 else states[walk.load].copy()
            stops = dict(walk.stops)
            for t in range(walk.rows.start, walk.rows.stop):
                state = own * slow[t, :, None, None]
                change = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
                state += k[t][:, :, None] * change[:, None, :]
                out[t] = np.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(key_dim)
                own = state.astype(np.float32)  # what is carried on does not depend on where a step ends
                if t + 1 - walk.rows.start in stops:
                    states[stops[t + 1 - walk.rows.start]] = own
        return out.reshape(len(qkv), -1)

    def sigmoid_gate(self, x: Floats, gate: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return (x / (1.0 + np.exp(-gate.astype(np.float64)))).astype(np.float32)

    def swiglu(self, gate: Floats, up: Floats) -> Floats:
        return (silu(gate.astype(np.float64)) * up).astype(np.float32)

    def geglu(self, gate: Floats, up: Floats) -> Floats:
        x = gate.astype(np.float64)
        return (0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))) * up).astype(np.float32)

    def gelu(self, x: Floats) -> Floats:
        wide = x.astype(np.float64)
        return (0.5 * wide * (1.0 + np.vectorize(math.erf)(wide / math.sqrt(2.0)))).astype(np.float32)

    def scale(self, x: Floats, factor: float) -> Floats:
        return x * np.float32(factor)

    def softcap(self, x: Floats, cap: float) -> Floats:
        return (cap * np.tanh(x.astype(np.float64) / cap)).astype(np.float32)

    def join(self, a: Floats, b: Floats, heads: int) -> Floats:
        joined = np.concatenate([by_head(a, heads), by_head(b, heads)], axis=-1)
        return joined.reshape(a.shape[0], a.shape[1] + b.shape[1])

    def head_linear(self, x: Floats, weight: Layout, heads: int) -> Floats:
        own = self._backend.dense(weight).reshape(heads, -1, weight.shape[1])  # [H, n, k]
        return np.einsum("thk,hnk->thn", by_head(x, heads), own).reshape(x.shape[0], weight.shape[0])

    def moe(self, x: Floats, logits: Floats, experts: Experts, routing: Routing) -> Floats:
        bias = None if routing.bias is None else self._backend.dense(routing.bias)
        share = route(logits, routing, bias)  # [T, E]
        out = np.zeros_like(x)
        for e in range(experts.count):
            rows = np.flatnonzero(share[:, e])
            if rows.size:
                out[rows] += share[rows, e, None] * self._expert(x[rows], experts, e)
        return out

    def _expert(self, x: Floats, w: Experts, e: int) -> Floats:
        gate = self.linear(x, w.gate[e], w.gate_bias[e] if w.gate_bias else None)
        up = self.linear(x, w.up[e], w.up_bias[e] if w.up_bias else None)
        if w.limit is None:
            inner = self.swiglu(gate, up)
        else:
            g = np.minimum(gate.astype(np.float64), w.limit)
            inner = (silu(1.702 * g) / 1.702 * (np.clip(up, -w.limit, w.limit) + 1.0)).astype(np.float32)
        return self.linear(inner, w.down[e], w.down_bias[e] if w.down_bias else None)

    def take(self, x: Floats, rows: I32) -> Floats:
        return x[rows]


def by_head(x: Floats, heads: int) -> Floats:
    """[T, H * D] -> [T, H, D]; there may be no rows."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads)


def unit(x: Floats) -> npt.NDArray[np.float64]:
    """Vectors along the last axis, of length 1 or a little less."""
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.square(wide).sum(axis=-1, keepdims=True) + 1e-6)


def silu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-x))


def softmax(scores: npt.NDArray[np.float64], sinks: Floats | None = None) -> npt.NDArray[np.float64]:
    """scores [H, T, S]; a sink [H] is one more score that is left out of the result."""
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    return weights / total


def route(logits: Floats, routing: Routing, bias: Floats | None) -> Floats:
    """What each expert counts for each row: [T, E], zero for those that were not chosen."""
    wide = logits.astype(np.float64)
    scores = 1.0 / (1.0 + np.exp(-wide)) if routing.sigmoid else softmax(wide[None])[0]
    ranked = scores if bias is None else scores + bias
    if routing.groups > 1:
        runs = ranked.reshape(len(ranked), routing.groups, -1)
        worth = np.sort(runs, axis=-1)[..., -2:].sum(axis=-1) if routing.pair else runs.max(axis=-1)
        kept = np.argsort(-worth, axis=-1, kind="stable")[:, : routing.top_groups]
        allowed = np.zeros(worth.shape, np.bool_)
        np.put_along_axis(allowed, kept, True, axis=-1)
        ranked = np.where(allowed[..., None], runs, -np.inf).reshape(ranked.shape)
    chosen = np.argsort(-ranked, axis=-1, kind="stable")[:, : routing.top]
    out = np.zeros_like(scores)
    np.put_along_axis(out, chosen, np.take_along_axis(scores, chosen, axis=-1), axis=-1)
    if routing.renormalize:
        out /= out.sum(axis=-1, keepdims=True) + 1e-20
    return (out * routing.scale).astype(np.float32)


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

    def place(self, slot: int, pairs: Mapping[Site, Pair]) -> None:
        self._ops.adapters[slot] = dict(pairs)

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
        self._ops.batch = batch
        return np.ascontiguousarray(self._forward(self._ops, batch, inputs), np.float32)


class ReferenceBackend:
    """Dequantizes each weight once and keeps it as float32."""

    name = "reference"
    kv_dtypes = tuple(KV_DTYPES)
    kv_dtype = "f16"
    kv_states = True

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
