"""Every op in plain torch, over the KV pools of one program: complete, on any device, and meant to be read.

Norms, rotations, softmax and gates are computed in float32 and rounded once to the compute dtype. Where K and V lie is
caches.py's; an attention is given its layer's cache. Quantized weights are dequantized a part at a time whenever they are used:
exact, and slow. A faster device inherits this and overrides methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from quire.backends.elementwise import Elementwise
from quire.backends.ops import KV
from quire.backends.torch.adapters import Stack
from quire.backends.torch.batch import DeviceBatch, DeviceGiven
from quire.backends.torch.caches import Cache, Pool
from quire.backends.torch.elementwise import function_of
from quire.backends.torch.experts import Mixture, mix
from quire.backends.torch.quantized import Mixed, Quantized, Weight, encode
from quire.backends.torch.sampler import DeviceSampler, TorchSampler
from quire.backends.torch.states import Heads, Inputs, States
from quire.layouts import Rope

_SCORES = 1 << 26  # attention scores, or gathered keys, that are in memory at a time
_NUMBERS = 1 << 26  # of a quantized matrix, dequantized at a time


@dataclass(frozen=True, slots=True)
class Sight:
    """The part of the context that a layer's attention sees, where it is not all of it."""

    window: int = 0  # tokens a row sees at most, its own among them; 0: all
    softcap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [heads] float32


PLAIN = Sight()


class TorchKernels:
    """The ops of one program. `dtype` is what is computed in; `caches` are by group and by layer in it."""

    invariant = False  # whether a row's bits are promised not to depend on its batch

    def __init__(self, kv: KV, device: torch.device, dtype: torch.dtype):
        self.kv = kv
        self.device = device
        self.dtype = dtype
        self.pools = [Pool.of(g, own, dtype, device) for g, own in enumerate(kv.groups)]
        self.caches = [[pool.cache(layer) for layer in range(pool.kv.layers)] for pool in self.pools]
        self._frequencies: dict[int, tuple[Rope, torch.Tensor]] = {}
        self.states = States(kv, device)

    def sampler(self) -> DeviceSampler:
        """The sampler for the logits of a program here."""
        return TorchSampler()

    def embed(self, ids: torch.Tensor, table: Weight) -> torch.Tensor:
        if isinstance(table, torch.Tensor):
            return F.embedding(ids, table)
        assert not isinstance(table, Mixed)  # a table is of one kind
        return table.take(ids).to(self.dtype)

    def place(self, x: torch.Tensor, given: DeviceGiven) -> torch.Tensor:
        """x, with the given rows written over the embedding's."""
        return x.index_copy_(0, given.at, given.rows.to(x.dtype))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, heads: int = 1, soon: Sequence[Weight] = ()
    ) -> Any:
        """`soon`: only products with these weights read the result, and before x changes.

        It may be handed on undone for them to do, or in the form that they want. Never with heads.
        """
        parts = x.float().unflatten(-1, (heads, -1))
        scaled = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight.view(-1, parts.shape[-1])).flatten(-2).to(self.dtype)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, heads: int = 1
    ) -> torch.Tensor:
        parts = x.float().unflatten(-1, (heads, -1))
        centred = parts - parts.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.view(-1, parts.shape[-1])
        if bias is not None:
            y = y + bias.view(-1, parts.shape[-1])
        return y.flatten(-2).to(self.dtype)

    def add_norm(
        self, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, *, soon: Sequence[Weight] = ()
    ) -> tuple[torch.Tensor, Any]:
        """a + b, and its norm."""
        total = a + b
        return total, self.rms_norm(total, weight, eps, soon=soon)

    def linear(self, x: Any, weight: Weight, bias: torch.Tensor | None, *, loose: bool = False) -> torch.Tensor:
        """`loose`: only `attention` reads the result, so it may be [parts, T, n], which attention adds up."""
        if isinstance(weight, torch.Tensor):
            return F.linear(x, weight, bias)
        y = torch.cat([F.linear(x, part) for part in self._dequantized(weight)], dim=-1)
        return y if bias is None else y + bias

    def _dequantized(self, weight: Quantized) -> Iterator[torch.Tensor]:
        """A matrix in the compute dtype, some rows at a time."""
        n, k = weight.shape
        step = max(1, _NUMBERS // k)
        for first in range(0, n, step):
            yield weight.rows(first, min(first + step, n)).dequantize().to(self.dtype)

    def logits(
        self, x: Any, weight: Weight, bias: torch.Tensor | None, *, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The last product of a program, as float32; in `into` (at least as many rows) where that spares a copy."""
        return self.linear(x, weight, bias).float()

    def adapt(
        self,
        ys: Sequence[torch.Tensor],
        x: torch.Tensor,
        stacks: Sequence[Stack],
        batch: DeviceBatch,
        *,
        taken: bool,
        alone: bool,
    ) -> Sequence[torch.Tensor]:
        """Add the products of adapters to products of x, each with its stack.

        `taken`: rows are those of batch.logit_rows. `alone`: nobody else reads ys, so their memory may be used.
        """
        return [self._adapted(y, x, stack, batch, taken) for y, stack in zip(ys, stacks, strict=True)]

    def _adapted(self, y: torch.Tensor, x: torch.Tensor, stack: Stack, batch: DeviceBatch, taken: bool) -> torch.Tensor:
        if batch.adapters is None or not stack.rank:
            return y
        inner = F.linear(x, stack.a)
        mine = torch.where(stack.mine(batch, taken), inner, torch.zeros((), dtype=inner.dtype, device=inner.device))
        return y + F.linear(mine, stack.b).to(y.dtype)

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, batch: DeviceBatch, *, layer: int, group: int, at: int
    ) -> torch.Tensor:
        return self.states.conv(x, weight, batch, layer=layer, group=group, at=at)

    def delta_rule(
        self, inputs: Inputs, batch: DeviceBatch, heads: Heads, *, layer: int, group: int, at: int
    ) -> torch.Tensor:
        return self.states.delta_rule(inputs, batch, heads, layer=layer, group=group, at=at)

    def elementwise(self, op: Elementwise, number: float = 0.0) -> Callable[..., torch.Tensor]:
        """An elementwise op of the program, as a function of its tensors."""
        return function_of(op, number)

    def join(self, a: torch.Tensor, b: torch.Tensor, heads: int) -> torch.Tensor:
        return torch.cat([x.unflatten(-1, (heads, -1)) for x in (a, b)], dim=-1).flatten(-2)

    def head_linear(self, x: torch.Tensor, weight: torch.Tensor, heads: int) -> torch.Tensor:
        """weight [heads * n, k], never quantized."""
        own, rows = weight.unflatten(0, (heads, -1)), x.unflatten(-1, (heads, -1))
        y = torch.empty(x.shape[0], heads, own.shape[1], dtype=self.dtype, device=self.device)
        torch.bmm(rows.transpose(0, 1), own.transpose(1, 2), out=y.transpose(0, 1))
        return y.flatten(1)

    def moe(self, x: torch.Tensor, logits: torch.Tensor, mixture: Mixture, *, loose: bool = False) -> torch.Tensor:
        """`loose`: only `add_norm` reads the result, so it may be [parts, T, d], which that adds up."""
        return mix(x, logits, mixture)

    def gated(
        self,
        x: Any,
        weight: Weight,
        bias: torch.Tensor | None,
        act: Elementwise,
        *,
        soon: Sequence[Weight] = (),
    ) -> Any:
        """An activation of the two halves of each row of a product. `soon`: the products that alone read it, if so."""
        gate, up = self.linear(x, weight, bias).chunk(2, dim=-1)
        return self.elementwise(act)(gate, up)

    def linear_add_norm(
        self,
        x: Any,
        weight: Weight,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        *,
        soon: Sequence[Weight] = (),
    ) -> tuple[torch.Tensor, Any]:
        """residual + a product, and its norm. Nobody reads `residual` after this: its memory may be used."""
        return self.add_norm(residual, self.linear(x, weight, bias), norm, eps, soon=soon)

    def take(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    def rope(self, x: torch.Tensor, batch: DeviceBatch, rope: Rope, heads: int) -> torch.Tensor:
        cos, sin = self.rotation(batch, rope)
        out = x.reshape(x.shape[0], heads, -1).float()  # [T, H, D]
        if out.data_ptr() == x.data_ptr():
            out = out.clone()
        if rope.pairs:
            first, second = slice(0, rope.dim, 2), slice(1, rope.dim, 2)
        else:
            first, second = slice(0, rope.dim // 2), slice(rope.dim // 2, rope.dim)
        a, b = out[..., first].clone(), out[..., second].clone()
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return out.to(self.dtype).reshape(x.shape[0], -1)

    def rotation(self, batch: DeviceBatch, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of every row's angles, float32 [T, 1, dim / 2]; computed once a step."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            if batch.coords is None or not rope.axes:
                at = batch.pos[:, None, None]
            else:
                at = batch.coords[list(rope.axes)].T[:, None]
            angle = at.float() * self.frequencies(rope)
            wide = angle.double()  # float32 angles of far positions lose nothing more
            return (wide.cos() * rope.magnitude).float(), (wide.sin() * rope.magnitude).float()

        return batch.once(("rope", id(rope)), make)

    def frequencies(self, rope: Rope) -> torch.Tensor:
        """Radians per position, on the device."""
        if id(rope) not in self._frequencies:
            self._frequencies[id(rope)] = rope, torch.tensor(rope.frequencies, device=self.device)
        return self._frequencies[id(rope)][1]

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: DeviceBatch,
        *,
        cache: Cache,
        heads: int,
        scale: float,
        rope: Rope | None,
        sight: Sight = PLAIN,
        norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    ) -> torch.Tensor:
        """Normalize each head of q and k and rotate them if they still need it, write k and v, and attend.

        `norms` are the weights for a head of q and of k, and eps.
        """
        kv = cache.kv
        if norms is not None:
            q = self.rms_norm(q, norms[0], norms[2], heads=heads)
            k = self.rms_norm(k, norms[1], norms[2], heads=kv.kv_heads)
        if rope is not None:
            q, k = self.rope(q, batch, rope, heads), self.rope(k, batch, rope, kv.kv_heads)
        self._store((k, v), batch, cache)
        return self.attend(q.reshape(-1, heads, kv.head_dim), batch, cache, scale, sight).reshape(q.shape[0], -1)

    def latent_attention(
        self, q: torch.Tensor, k: torch.Tensor, batch: DeviceBatch, *, cache: Cache, heads: int, scale: float
    ) -> torch.Tensor:
        """Write k, whose front is the value too, and attend: [T, heads * latent]."""
        self._store((k,), batch, cache)
        queries = q.reshape(-1, heads, cache.kv.head_dim)
        return self.attend_latent(queries, batch, cache, scale).reshape(q.shape[0], -1)

    def _store(self, new: Sequence[torch.Tensor], batch: DeviceBatch, cache: Cache) -> None:
        """Keys, and values if they are apart, into a layer's pages."""
        where = batch.once(("write", cache.group), lambda: batch.table(cache.group).write.long())
        for rows, (pages, scales) in zip(new, _parts(cache), strict=True):
            self._write(pages, scales, where, rows)

    def _write(self, pages: torch.Tensor, scales: torch.Tensor | None, where: torch.Tensor, new: torch.Tensor) -> None:
        """Rows into a layer's keys or values, at flat places."""
        flat = pages.flatten(0, 1)
        rows = new.reshape(-1, *flat.shape[1:])
        if scales is None:
            flat.index_copy_(0, where, rows.to(pages.dtype))
            return
        codes, scale = encode(rows, pages.dtype)
        flat.view(torch.uint8).index_copy_(0, where, codes.view(torch.uint8))
        size = pages.shape[1]
        scales[where // size, :, where % size] = scale

    def attend(
        self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float, sight: Sight = PLAIN
    ) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]."""
        return self._attend(q, batch, cache, scale, sight)

    def attend_latent(self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float) -> torch.Tensor:
        """q [T, H, D] -> [T, H, latent]."""
        return self._attend(q, batch, cache, scale, PLAIN)

    def _attend(self, q: torch.Tensor, batch: DeviceBatch, cache: Cache, scale: float, sight: Sight) -> torch.Tensor:
        """Sequences of one row are handled together, longer ones one by one."""
        table, kv = batch.table(cache.group).pages, cache.kv
        if batch.longest <= 1:
            return self._attend_rows(q, table, batch.kv_len, batch.reach, cache, scale, sight)
        host = batch.host
        assert host is not None  # a captured batch has one row a sequence
        out = torch.empty(*q.shape[:2], kv.latent or kv.head_dim, dtype=q.dtype, device=q.device)
        ones: list[int] = []
        for b, (first, end) in enumerate(zip(host.q_start[:-1].tolist(), host.q_start[1:].tolist(), strict=True)):
            if end - first == 1:
                ones.append(b)
            elif end > first:
                seen = max(0, int(host.pos[first]) - sight.window + 1) if sight.window else 0, int(host.kv_len[b])
                sure = int(host.pos[end - 1]) + 1 == seen[1]  # otherwise only the device knows where the rows are
                args = table[b : b + 1], batch.pos[first:end], seen, sure, cache, scale, sight
                out[first:end] = self._attend_sequence(q[first:end], *args)
        if ones:
            own, rows = batch.once("ones", lambda: self._places(ones, [int(host.q_start[b]) for b in ones]))
            reach = int(host.kv_len[ones].max())
            out[rows] = self._attend_rows(q[rows], table[own], batch.kv_len[own], reach, cache, scale, sight)
        return out

    def _places(self, *lists: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(each, device=self.device) for each in lists)

    def _past(self, pages: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in each row of pages, float32 [B, Hk, S, D] and [B, Hk, S, D or latent]."""
        kv = cache.kv
        table = pages.clamp(min=0).long()
        shape = (table.shape[0], -1, kv.kv_heads, kv.head_dim)
        found: list[torch.Tensor] = []
        for held, scales in _parts(cache):
            if scales is None:
                past = held[table].float()  # [B, P, page, Hk, D]
            else:
                codes = held.view(torch.uint8)[table].view(held.dtype).float()
                past = codes * scales[table].transpose(2, 3)[..., None]
            found.append(past.reshape(shape).transpose(1, 2))
        return found[0], found[0][..., : kv.latent] if kv.latent else found[1]

    def _attend_rows(
        self,
        q: torch.Tensor,
        pages: torch.Tensor,
        kv_len: torch.Tensor,
        reach: int,
        cache: Cache,
        scale: float,
        sight: Sight,
    ) -> torch.Tensor:
        """One row of each sequence: q [B, H, D]. With a window only the pages that it touches are looked at."""
        kv, window = cache.kv, sight.window
        out = torch.empty(*q.shape[:2], kv.latent or kv.head_dim, dtype=q.dtype, device=q.device)
        columns = torch.arange(-(-reach // kv.page_size), device=self.device)[None].expand(q.shape[0], -1)
        if window:
            first = (kv_len - window).clamp(min=0) // kv.page_size
            columns = first[:, None] + columns[:, : (window - 1) // kv.page_size + 2]
        table = pages.gather(1, columns.clamp(max=pages.shape[1] - 1))  # what lies past the row is hidden below
        where = columns[:, :, None] * kv.page_size + torch.arange(kv.page_size, device=self.device)
        where = where.flatten(1)  # [B, S]: the position of each key
        hidden = where >= kv_len[:, None]
        if window:
            hidden |= where < kv_len[:, None] - window
        step = max(1, _SCORES // max(1, where.shape[1] * kv.kv_heads * kv.head_dim))
        sinks = None if sight.sinks is None else sight.sinks.view(kv.kv_heads, -1, 1)
        for at in range(0, q.shape[0], step):
            part = slice(at, at + step)
            keys, values = self._past(table[part], cache)
            grouped = q[part].reshape(-1, kv.kv_heads, q.shape[1] // kv.kv_heads, kv.head_dim).float()
            # What an earlier owner left in a page may be anything, and 0 * NaN is NaN.
            values = values.masked_fill(hidden[part, None, :, None], 0.0)
            mixed = softmax_product(grouped, keys, values, hidden[part, None, None], scale, sight.softcap, sinks)
            out[part] = mixed.reshape(out[part].shape)
        return out

    def _attend_sequence(
        self,
        q: torch.Tensor,
        pages: torch.Tensor,
        pos: torch.Tensor,
        seen: tuple[int, int],
        sure: bool,
        cache: Cache,
        scale: float,
        sight: Sight,
    ) -> torch.Tensor:
        """Rows of one sequence: q [n, H, D], pages [1, P]; none of them sees what is not in `seen`.

        `sure`: all of it is there. Otherwise what follows the last row's own position may be anything.
        """
        size = cache.kv.page_size
        first = seen[0] // size * size
        own = slice(seen[0] - first, seen[1] - first)
        keys, values = (x[:, :, own] for x in self._past(pages[:, first // size : -(-seen[1] // size)], cache))
        where = torch.arange(*seen, device=self.device)[None]
        if not sure:  # 0 * NaN is NaN
            values = values.masked_fill((where > pos.max())[..., None], 0.0)

        def hidden(rows: slice) -> torch.Tensor:
            at = pos[rows, None]
            return (where > at) | (where <= at - sight.window) if sight.window else where > at

        return self._rows_of_one(q, keys, values, hidden, scale, sight)

    def encode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: DeviceBatch, *, heads: int, scale: float
    ) -> torch.Tensor:
        dim = q.shape[1] // heads
        queries, keys, values = (x.unflatten(-1, (-1, dim)) for x in (q, k, v))
        out = torch.empty(queries.shape, dtype=self.dtype, device=self.device)
        starts = np.arange(batch.tokens + 1) if batch.host is None else batch.host.q_start  # captured: a row each
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            own = slice(first, end)
            past = [x[own].float().transpose(0, 1)[None] for x in (keys, values)]  # [1, Hk, S, D]
            out[own] = self._rows_of_one(queries[own], past[0], past[1], None, scale, PLAIN)
        return out.flatten(1)

    def _rows_of_one(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        hidden: Callable[[slice], torch.Tensor] | None,
        scale: float,
        sight: Sight,
    ) -> torch.Tensor:
        """q [n, H, D] over keys and values [1, Hk, S, D]; hidden(rows) says [n, S] what those rows do not see."""
        (rows, heads, dim), kv_heads = q.shape, keys.shape[1]
        share = heads // kv_heads
        out = torch.empty(rows, heads, values.shape[-1], dtype=q.dtype, device=q.device)
        step = max(1, _SCORES // max(1, keys.shape[2] * heads))
        for at in range(0, rows, step):
            own = slice(at, min(at + step, rows))
            n = own.stop - at
            flat = q[own].reshape(n, kv_heads, share, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim).float()
            masked = None if hidden is None else hidden(own).repeat(share, 1)  # [G * n, S]
            sinks = None if sight.sinks is None else sight.sinks.view(kv_heads, share, 1).repeat_interleave(n, 1)
            mixed = softmax_product(flat, keys, values, masked, scale, sight.softcap, sinks)  # [1, Hk, G * n, D]
            out[own] = mixed.reshape(kv_heads, share, n, -1).permute(2, 0, 1, 3).reshape(n, heads, -1)
        return out


def _parts(cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Keys, and values if they are apart, each with the scales of its codes."""
    found = [(cache.keys, cache.key_scale)]
    return found if cache.values is None else [*found, (cache.values, cache.value_scale)]


def softmax_product(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    hidden: torch.Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v, float32. sinks [Hk, rows, 1]: one more score for each row."""
    scores = q @ keys.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return (weights if sinks is None else weights[..., :-1]) @ values
