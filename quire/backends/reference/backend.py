"""The reference backend: every op in plain numpy, executed as it goes. It is the specification and the oracle.

Nothing here is fast, and nothing is clever: weights are dequantized to float32, sums are taken in float64 where that
makes the answer more certain, and each sequence and head is handled on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from quire.backends.adapters import Pair, Target
from quire.backends.batch import I32, Batch, Table
from quire.backends.elementwise import Elementwise, ElementwiseOps, evaluate, silu
from quire.backends.kv import KV_DTYPES
from quire.backends.ops import KV, TABLE, Forward, check_kv
from quire.backends.outputs import Hidden, check_keep, kept
from quire.backends.pages import CopiedPages, PageBytes, PageIds, PageLayout, PageRequest, blank, checked_group
from quire.backends.recorder import record
from quire.backends.reference.cache import Cache, Part, layout_of, read, write
from quire.backends.states import walks
from quire.layouts import Dense, Experts, Floats, Layout, Rope, Routing
from quire.machine import cpu_model


class ReferenceOps(ElementwiseOps):
    """Ops over numpy arrays, with the KV pool of one program."""

    def __init__(self, backend: ReferenceBackend, kv: KV):
        self._backend = backend
        self.kv = kv
        self._keys = [Cache(own) for own in kv.groups]
        self._values = [None if own.latent else Cache(own) for own in kv.groups]
        self._states = [np.zeros((own.pages, own.layers, own.state), np.float32) for own in kv.groups]
        self.adapters: dict[int, Mapping[Target, Pair]] = {}  # by slot
        self.batch: Batch | None = None  # of the run
        self.marked: dict[int, Floats] | None = None  # of the run, by layer; None: nobody asks

    def by_page(self, group: int) -> list[Part]:
        """Views of a group's pool, [layers, pages, numbers], in the order in which a page's bytes have them."""
        kv, values = self.kv.groups[group], self._values[group]
        if kv.state:
            return [self._states[group].swapaxes(0, 1)]
        keys = self._keys[group].by_page(kv.page_size)
        return keys if values is None else [*keys, *values.by_page(kv.page_size)]

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

    def adapt(self, y: Floats, x: Floats, rows: I32 | None, target: Target) -> Floats:
        out = y.copy()
        for slot in () if rows is None else np.unique(rows[rows >= 0]).tolist():
            placed = self.adapters.get(slot)
            pair = target.pairs.get(slot) if placed is None else placed.get(target)
            if pair is not None:
                own = rows == slot
                inner = (x[own] @ pair.a.dequantize().T) * np.float32(pair.scale)
                out[own] += inner @ pair.b.dequantize().T
        return out

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
        kv, keys, values, table = self.kv.groups[group], self._keys[group], self._values[group], batch.table(group)
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
        kv, keys, table = self.kv.groups[group], self._keys[group], batch.table(group)
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
        size = self.kv.page_size
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
        for walk in walks(batch, group, self.kv.page_size):
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
        for walk in walks(batch, group, self.kv.page_size):
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

    def elementwise(self, op: Elementwise, *inputs: Floats, number: float = 0.0) -> Floats:
        return evaluate(op, inputs, number)

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

    def mark(self, x: Floats, layer: int) -> None:
        if self.marked is not None:
            self.marked[layer] = x


def by_head(x: Floats, heads: int) -> Floats:
    """[T, H * D] -> [T, H, D]; there may be no rows."""
    return x.reshape(x.shape[0], heads, x.shape[1] // heads)


def unit(x: Floats) -> npt.NDArray[np.float64]:
    """Vectors along the last axis, of length 1 or a little less."""
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.square(wide).sum(axis=-1, keepdims=True) + 1e-6)


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

    def __init__(self, forward: Forward, ops: ReferenceOps, keep: Sequence[Hidden] = ()):
        self._forward = forward
        self._ops = ops
        self._hidden: dict[Hidden, Floats] = {}
        self._keep = keep

    def place(self, slot: int, pairs: Mapping[Target, Pair]) -> None:
        self._ops.adapters[slot] = dict(pairs)

    def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
        self._ops.batch = batch
        self._ops.marked = {} if self._keep else None
        result = np.ascontiguousarray(self._forward(self._ops, batch, inputs), np.float32)
        marked, self._ops.marked = self._ops.marked or {}, None
        check_keep(self._keep, marked)
        self._hidden = {h: marked[h.layer][batch.logit_rows] if h.taken else marked[h.layer] for h in self._keep}
        return result

    def hidden(self, which: Hidden) -> Floats:
        return kept(self._hidden, which)

    def page_layout(self, group: int) -> PageLayout:
        """A layer's bytes are the keys, [token, head, column], their scales, [token, head], then values in the same way."""
        return layout_of(self._ops.kv.groups[checked_group(self._ops.kv.groups, group)], self._ops.by_page(group))

    def page_buffer(self, group: int, count: int) -> PageBytes:
        return blank(self.page_layout(group), count)

    def read_pages(
        self, group: int, pages: PageIds, out: PageBytes | None = None, *, layers: range | None = None
    ) -> CopiedPages:
        asked = PageRequest.checked(self._ops.kv.groups, group, pages, layers)
        layout = self.page_layout(group)
        out = asked.fresh(layout) if out is None else out
        asked.check_buffer(out, layout, written=True)
        read(self._ops.by_page(group), asked, out)
        return CopiedPages(out)

    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes, *, layers: range | None = None) -> CopiedPages:
        asked = PageRequest.checked(self._ops.kv.groups, group, pages, layers)
        asked.check_buffer(buffer, self.page_layout(group), written=False)
        write(self._ops.by_page(group), asked, buffer)
        return CopiedPages(buffer)


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
        keep: Sequence[Hidden] = (),
    ) -> ReferenceProgram:
        check_kv(kv, self)
        if keep:
            record(forward, kv, inputs, keep)  # what is not marked is found now
        return ReferenceProgram(forward, ReferenceOps(self, kv), keep)

    def describe(self) -> str:
        return "reference (numpy)"

    def computes(self) -> str:
        """The libraries under numpy choose their kernels by the processor."""
        return f"reference, numpy {np.__version__}, {cpu_model()}"

    def implementations(self) -> dict[str, str]:
        return {op.name: "numpy" for op in TABLE}
