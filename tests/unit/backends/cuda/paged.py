"""A ragged batch over a paged cache, filled with random numbers, and attention over it in float64, row by row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

PAGE = 16


@dataclass
class Paged:
    q: torch.Tensor  # [T, H, D]
    k_cache: torch.Tensor  # [pages, 16, Hk, D]
    v_cache: torch.Tensor
    table: torch.Tensor  # [B, P] int32, padded with -1
    q_start: torch.Tensor
    kv_len: torch.Tensor
    pos: torch.Tensor
    write: torch.Tensor
    keys: list[torch.Tensor]  # [S, Hk, D] of each sequence, as the cache holds them
    values: list[torch.Tensor]

    @property
    def arrays(self) -> dict[str, torch.Tensor]:
        return {"q_start": self.q_start, "kv_len": self.kv_len, "table": self.table, "pos": self.pos}


def paged(
    rows: list[int],
    lens: list[int],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    shared: int = 0,
) -> Paged:
    """Sequence b has rows[b] new rows at the end of lens[b] tokens; all share their first `shared` tokens' pages."""
    g = torch.Generator().manual_seed(seed)
    pages_of = [math.ceil(n / PAGE) for n in lens]
    total = sum(pages_of) + 3
    order = torch.randperm(total, generator=g)
    table = torch.full((len(lens), max(pages_of) + 2), -1, dtype=torch.int32)
    used = 0
    for b, n in enumerate(pages_of):
        common = shared // PAGE if b else 0
        table[b, :common] = table[0, :common]
        table[b, common:n] = order[used : used + n - common]
        used += n - common
    k_cache = torch.full((total, PAGE, kv_heads, dim), float("nan"))  # what nobody wrote must not be used
    v_cache = torch.full((total, PAGE, kv_heads, dim), float("nan"))
    keys, values = [], []
    for b, n in enumerate(lens):
        where = torch.arange(n)
        slot = table[b, where // PAGE].long() * PAGE + where % PAGE
        k, v = torch.randn(n, kv_heads, dim, generator=g), torch.randn(n, kv_heads, dim, generator=g)
        if b and shared:
            k[:shared], v[:shared] = keys[0][:shared].float(), values[0][:shared].float()
        k_cache.view(-1, kv_heads, dim)[slot], v_cache.view(-1, kv_heads, dim)[slot] = k, v
        keys.append(k.to(dtype))
        values.append(v.to(dtype))
    q_start = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    pos = torch.cat([torch.arange(n - r, n) for r, n in zip(rows, lens, strict=True)]).int()
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    write = table[owner, pos.long() // PAGE] * PAGE + pos % PAGE
    q = torch.randn(int(q_start[-1]), heads, dim, generator=g)
    on = lambda t: t.to(device)  # noqa: E731
    return Paged(
        on(q.to(dtype)), on(k_cache.to(dtype)), on(v_cache.to(dtype)), on(table), on(q_start),
        on(torch.tensor(lens, dtype=torch.int32)), on(pos), on(write.int()), [on(k) for k in keys], [on(v) for v in values],
    )  # fmt: skip


def exact(
    p: Paged, scale: float, *, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, in float64."""
    out = torch.empty(p.q.shape, dtype=torch.float64, device=p.q.device)
    group = p.q.shape[1] // p.k_cache.shape[2]
    for b in range(p.kv_len.shape[0]):
        k = p.keys[b].double().repeat_interleave(group, 1)  # [S, H, D]
        v = p.values[b].double().repeat_interleave(group, 1)
        rows = slice(int(p.q_start[b]), int(p.q_start[b + 1]))
        score = torch.einsum("thd,shd->hts", p.q[rows].double(), k) * scale
        if softcap:
            score = torch.tanh(score / softcap) * softcap
        token = torch.arange(k.shape[0], device=p.q.device)
        seen = token[None, :] <= p.pos[rows, None]
        if window:
            seen &= token[None, :] > p.pos[rows, None] - window
        score = score.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, score.shape[1], 1)
            score = torch.cat([score, column], 2)
            v = torch.cat([v, torch.zeros_like(v[:1])])
        out[rows] = torch.einsum("hts,shd->thd", torch.softmax(score, -1), v)
    return out


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
