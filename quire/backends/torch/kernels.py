"""Every op in plain torch, over the KV pool of one program: complete, on any device, and meant to be read.

Norms, rotations, softmax and gates are computed in float32 and rounded once to the compute dtype. K and V lie in pages,
[pages, page_size, kv_heads, head_dim] a layer, so that a flat index addresses [pages * page_size, kv_heads, head_dim];
one page more than the pool has takes what padding rows write. Where they are codes, the scales of a page lie beside it,
[pages, kv_heads, page_size]. Quantized weights are dequantized a part at a time whenever they are used: exact, and slow.
A faster device inherits this and overrides methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from quire.backends.ops import KV
from quire.backends.torch.batch import DeviceBatch
from quire.backends.torch.quantized import E4M3, Mixed, Quantized, Weight, encode
from quire.backends.torch.sampler import DeviceSampler, TorchSampler
from quire.layouts import Rope

_SCORES = 1 << 26  # attention scores, or gathered keys, that are in memory at a time
_NUMBERS = 1 << 26  # of a quantized matrix, dequantized at a time


class TorchKernels:
    """The ops of one program. `dtype` is what is computed in.

    Keys and values keep float16 unless that is bfloat16, or are codes where the pool says so.
    """

    def __init__(self, kv: KV, device: torch.device, dtype: torch.dtype):
        self.kv = kv
        self.device = device
        self.dtype = dtype
        halves = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        self.kv_dtype = {"f16": halves, "int8": torch.int8, "fp8": E4M3}[kv.dtype]
        shape = (kv.pages + 1, kv.page_size, kv.kv_heads, kv.head_dim)
        self.keys = [torch.zeros(shape, dtype=self.kv_dtype, device=device) for _ in range(kv.layers)]
        self.values = [torch.zeros(shape, dtype=self.kv_dtype, device=device) for _ in range(kv.layers)]
        beside = (kv.pages + 1, kv.kv_heads, kv.page_size)
        scaled = kv.layers if kv.dtype != "f16" else 0
        self.key_scales = [torch.zeros(beside, dtype=torch.float32, device=device) for _ in range(scaled)]
        self.value_scales = [torch.zeros(beside, dtype=torch.float32, device=device) for _ in range(scaled)]
        self._frequencies: dict[int, tuple[Rope, torch.Tensor]] = {}

    def sampler(self) -> DeviceSampler:
        """Who chooses tokens from the logits of a program here."""
        return TorchSampler()

    def embed(self, ids: torch.Tensor, table: Weight) -> torch.Tensor:
        if isinstance(table, torch.Tensor):
            return F.embedding(ids, table)
        assert not isinstance(table, Mixed)  # a table is of one kind
        return table.take(ids).to(self.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, soon: Sequence[Weight] = ()) -> Any:
        """`soon`: only products with these weights read the result, and before x changes.

        It may be handed on undone for them to do, or in the form that they want.
        """
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (scaled * weight).to(self.dtype)

    def add_norm(
        self, a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, eps: float, *, soon: Sequence[Weight] = ()
    ) -> tuple[torch.Tensor, Any]:
        """a + b, and its norm."""
        total = self.add(a, b)
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

    def logits(self, x: Any, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        """The last product of a program, as float32."""
        return self.linear(x, weight, bias).float()

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return (F.silu(gate.float()) * up.float()).to(self.dtype)

    def gated(self, x: Any, weight: Weight, bias: torch.Tensor | None, *, soon: Sequence[Weight] = ()) -> Any:
        """swiglu of the two halves of each row of a product. `soon`: the products that alone read it, if so."""
        gate, up = self.linear(x, weight, bias).chunk(2, dim=-1)
        return self.swiglu(gate, up)

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
            angle = batch.pos.float()[:, None, None] * self.frequencies(rope)
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
        layer: int,
        heads: int,
        scale: float,
        rope: Rope | None,
    ) -> torch.Tensor:
        """Rotate q and k if they still need it, write k and v, and attend."""
        kv = self.kv
        if rope is not None:
            q, k = self.rope(q, batch, rope, heads), self.rope(k, batch, rope, kv.kv_heads)
        where = batch.once("write", lambda: batch.write.long())
        for at, new in enumerate((k, v)):
            self._write((self.keys, self.values)[at][layer], self._scales(at, layer), where, new)
        return self.attend(q.reshape(-1, heads, kv.head_dim), batch, layer, scale).reshape(q.shape[0], -1)

    def _scales(self, of_values: int, layer: int) -> torch.Tensor | None:
        held = (self.key_scales, self.value_scales)[of_values]
        return held[layer] if held else None

    def _write(self, pool: torch.Tensor, scales: torch.Tensor | None, where: torch.Tensor, new: torch.Tensor) -> None:
        """Rows into a layer's keys or values, at flat places."""
        kv = self.kv
        rows = new.reshape(-1, kv.kv_heads, kv.head_dim)
        flat = pool.view(-1, kv.kv_heads, kv.head_dim)
        if scales is None:
            flat.index_copy_(0, where, rows.to(self.kv_dtype))
            return
        codes, scale = encode(rows, self.kv_dtype)
        flat.view(torch.uint8).index_copy_(0, where, codes.view(torch.uint8))
        scales[where // kv.page_size, :, where % kv.page_size] = scale

    def attend(self, q: torch.Tensor, batch: DeviceBatch, layer: int, scale: float) -> torch.Tensor:
        """q [T, H, D] -> [T, H, D]. Sequences of one row are handled together, longer ones one by one."""
        if batch.longest <= 1:
            return self._attend_rows(q, batch.pages, batch.kv_len, batch.reach, layer, scale)
        host = batch.host
        assert host is not None  # a captured batch has one row a sequence
        out = torch.empty_like(q)
        ones: list[int] = []
        for b, (first, end) in enumerate(zip(host.q_start[:-1].tolist(), host.q_start[1:].tolist(), strict=True)):
            if end - first == 1:
                ones.append(b)
            elif end > first:
                length = int(host.kv_len[b])
                args = batch.pages[b : b + 1], batch.pos[first:end], length, layer, scale
                out[first:end] = self._attend_sequence(q[first:end], *args)
        if ones:
            own, rows = batch.once("ones", lambda: self._places(ones, [int(host.q_start[b]) for b in ones]))
            reach = int(host.kv_len[ones].max())
            out[rows] = self._attend_rows(q[rows], batch.pages[own], batch.kv_len[own], reach, layer, scale)
        return out

    def _places(self, *lists: list[int]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.tensor(each, device=self.device) for each in lists)

    def _past(self, pages: torch.Tensor, reach: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of each row of pages, float32 [B, Hk, S, D] with S at least `reach`."""
        kv = self.kv
        table = pages[:, : -(-reach // kv.page_size)].clamp(min=0).long()
        shape = (table.shape[0], -1, kv.kv_heads, kv.head_dim)
        found: list[torch.Tensor] = []
        for at in range(2):
            pool, scales = (self.keys, self.values)[at][layer], self._scales(at, layer)
            if scales is None:
                past = pool[table].float()  # [B, P, page, Hk, D]
            else:
                codes = pool.view(torch.uint8)[table].view(self.kv_dtype).float()
                past = codes * scales[table].transpose(2, 3)[..., None]
            found.append(past.reshape(shape).transpose(1, 2))
        return found[0], found[1]

    def _attend_rows(
        self, q: torch.Tensor, pages: torch.Tensor, kv_len: torch.Tensor, reach: int, layer: int, scale: float
    ) -> torch.Tensor:
        """One row of each sequence: q [B, H, D]."""
        kv, out = self.kv, torch.empty_like(q)
        step = max(1, _SCORES // max(1, reach * kv.kv_heads * kv.head_dim))
        for at in range(0, q.shape[0], step):
            part = slice(at, at + step)
            keys, values = self._past(pages[part], reach, layer)
            grouped = q[part].reshape(-1, kv.kv_heads, q.shape[1] // kv.kv_heads, kv.head_dim).float()
            hidden = torch.arange(keys.shape[2], device=self.device)[None] >= kv_len[part, None]  # [B, S]
            # What an earlier owner left in a page may be anything, and 0 * NaN is NaN.
            values = values.masked_fill(hidden[:, None, :, None], 0.0)
            out[part] = _softmax_product(grouped, keys, values, hidden[:, None, None], scale).reshape(q[part].shape)
        return out

    def _attend_sequence(
        self, q: torch.Tensor, pages: torch.Tensor, pos: torch.Tensor, length: int, layer: int, scale: float
    ) -> torch.Tensor:
        """Rows of one sequence: q [n, H, D], pages [1, P]."""
        kv, out, heads = self.kv, torch.empty_like(q), q.shape[1]
        keys, values = (past[:, :, :length] for past in self._past(pages, length, layer))
        share = heads // kv.kv_heads
        where = torch.arange(keys.shape[2], device=self.device)
        step = max(1, _SCORES // (keys.shape[2] * heads))
        for at in range(0, q.shape[0], step):
            part = q[at : at + step]
            grouped = part.reshape(-1, kv.kv_heads, share, kv.head_dim).permute(1, 2, 0, 3).float()  # [Hk, G, n, D]
            flat = grouped.reshape(1, kv.kv_heads, -1, kv.head_dim)
            hidden = (where[None] > pos[at : at + step, None]).repeat(share, 1)  # [G * n, S]
            mixed = _softmax_product(flat, keys, values, hidden[None, None], scale)  # [1, Hk, G * n, D]
            out[at : at + step] = mixed.reshape(grouped.shape).permute(2, 0, 1, 3).reshape(part.shape)
        return out


def _softmax_product(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k^T * scale) v, float32."""
    scores = (q @ keys.transpose(-1, -2) * scale).masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1) @ values
