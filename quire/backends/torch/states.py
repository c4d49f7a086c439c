"""States of layers that carry one from token to token, in plain torch: a step walks along each sequence, row by row.

States are float32 whatever is computed in. The host's copy of the batch says where they lie, so nothing of this can be
captured in a graph; a device that walks along them itself takes the pools from here. What a page of such a group is, and
when a state is kept: `conv` in backends/ops.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from quire.backends.ops import KV
from quire.backends.states import Walk, walks
from quire.backends.torch.batch import DeviceBatch


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a delta rule."""

    key_heads: int
    heads: int
    key_dim: int
    dim: int  # of values

    @property
    def keys(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.key_heads * self.key_dim


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a state layer for the rows of a step, and the shape of its heads."""

    qkv: torch.Tensor  # [T, 2 Hk Dk + H Dv]
    a: torch.Tensor  # [T, H]
    b: torch.Tensor  # [T, H]
    decay: torch.Tensor  # [H]
    bias: torch.Tensor  # [H]


class States:
    """The pools of states of one program."""

    def __init__(self, kv: KV, device: torch.device):
        self._size = kv.page_size
        self._pools = [torch.zeros((own.pages, own.layers, own.state), device=device) for own in kv.groups]

    def pool(self, group: int, layer: int) -> torch.Tensor:
        """[pages, state]: those of one layer."""
        return self._pools[group][:, layer]

    def words(self, group: int) -> torch.Tensor:
        """The memory of a group's pool as whole numbers, [layers, 1, pages, words]."""
        return self._pools[group].view(torch.int32).permute(1, 0, 2)[:, None]

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, batch: DeviceBatch, *, layer: int, group: int, at: int
    ) -> torch.Tensor:
        rows, factors = x.float(), weight.float().view(-1, x.shape[1])  # [T, n], [K, n]
        past = factors.shape[0] - 1
        held = self.pool(group, layer)[:, at : at + past * x.shape[1]]
        out = torch.empty_like(rows)
        for walk in self._walks(batch, group):
            before = rows.new_zeros(past, x.shape[1]) if walk.load < 0 else held[walk.load].view(past, -1)
            seen = torch.cat([before, rows[walk.rows]])
            n = seen.shape[0] - past
            out[walk.rows] = F.silu(sum((seen[j : j + n] * factors[j] for j in range(past + 1)), rows.new_zeros(())))
            for done, page in walk.stops:
                held[page] = seen[done : done + past].reshape(-1)
        return out.to(x.dtype)

    def delta_rule(
        self, inputs: Inputs, batch: DeviceBatch, heads: Heads, *, layer: int, group: int, at: int
    ) -> torch.Tensor:
        h, times = heads, heads.heads // heads.key_heads
        q, k, v = inputs.qkv.float().split([h.keys, h.keys, h.heads * h.dim], dim=1)
        v = v.unflatten(1, (h.heads, -1))  # [T, H, Dv]
        q, k = (_unit(x.unflatten(1, (h.key_heads, -1))).repeat_interleave(times, dim=1) for x in (q, k))
        q = q / math.sqrt(h.key_dim)
        slow = torch.exp(inputs.decay.float() * F.softplus(inputs.a.float() + inputs.bias.float()))  # [T, H]
        beta = inputs.b.float().sigmoid()
        shape = (h.heads, h.key_dim, h.dim)
        held = self.pool(group, layer)[:, at : at + math.prod(shape)]
        out = torch.empty_like(v)
        for walk in self._walks(batch, group):
            state = v.new_zeros(shape) if walk.load < 0 else held[walk.load].reshape(shape).clone()
            stops = dict(walk.stops)
            for t in range(walk.rows.start, walk.rows.stop):
                state = state * slow[t, :, None, None]
                change = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
                state = state + k[t][:, :, None] * change[:, None, :]
                out[t] = torch.einsum("hkv,hk->hv", state, q[t])
                if t + 1 - walk.rows.start in stops:
                    held[stops[t + 1 - walk.rows.start]] = state.reshape(-1)
        return out.flatten(1).to(inputs.qkv.dtype)

    def _walks(self, batch: DeviceBatch, group: int) -> list[Walk]:
        host = batch.host
        if host is None:
            raise RuntimeError("a step over states cannot be captured: the host must say where they lie")
        return batch.once(("walks", group), lambda: list(walks(host, group, self._size)))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
