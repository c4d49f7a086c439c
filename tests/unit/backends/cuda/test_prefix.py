"""Shared-prefix attention against the definition: several groups, loners, splits, verification rows, sinks."""

from __future__ import annotations

import pytest
import torch

from quire.backends.cuda.kernels.attention import workspace
from quire.backends.cuda.kernels.prefix import shared_attention
from quire.backends.torch.batch import Shared
from tests.unit.backends.cuda.paged import Paged, error, exact, paged


def groups_of(p: Paged, members: list[int], prefixes: list[int], spare: int = 1) -> Shared:
    """members[g] sequences in group g, which share prefixes[g] tokens; `spare` groups are empty."""
    count = len(members) + spare
    first_seq = [sum(members[:g]) for g in range(len(members) + 1)]
    start = [int(p.q_start[s]) for s in first_seq] + [int(p.q_start[-1])] * spare
    table = torch.full((count, p.table.shape[1]), -1, dtype=torch.int32)
    for g, prefix in enumerate(prefixes):
        table[g, : prefix // 16] = p.table[first_seq[g], : prefix // 16].cpu()
    own = torch.repeat_interleave(torch.tensor(prefixes), torch.tensor(members)).int()
    device = p.q.device
    length = torch.tensor(prefixes + [0] * spare, dtype=torch.int32)
    return Shared(torch.tensor(start).int().to(device), length.to(device), table.to(device), own.to(device))


@pytest.mark.parametrize("rows, own_splits, prefix_splits", [(1, 1, 1), (1, 2, 3), (3, 1, 2)])
def test_shared_prefix(rows: int, own_splits: int, prefix_splits: int, device: str):
    lens = [120, 130, 100, 150, 96 + rows, 60]
    p = paged([rows] * 6, lens, heads=4, kv_heads=2, dim=64, device=device, shared=0)
    q = paged([rows] * 5, lens[:5], heads=4, kv_heads=2, dim=64, device=device, shared=96)  # five share 96 tokens
    whole = merge(q, p)
    groups = groups_of(whole, [5, 1], [96, 0])
    sinks = torch.randn(4, device=device)
    for options in ({}, {"sinks": sinks}, {"softcap": 3.0}):
        out = torch.full_like(whole.q, float("nan"))
        space = workspace(whole.q.shape[0], 4, 64, own_splits + prefix_splits, device)
        shared_attention(
            whole.q, whole.k_cache, whole.v_cache, out, **whole.arrays, groups=groups, scale=0.125, max_q=rows,
            space=space, own_splits=own_splits, prefix_splits=prefix_splits, **options,
        )  # fmt: skip
        assert error(out, exact(whole, 0.125, **options)) < 2e-3


def merge(a: Paged, b: Paged) -> Paged:
    """a's sequences, then the last one of b, over one cache."""
    rows = int(b.q_start[-1] - b.q_start[-2])
    width = max(a.table.shape[1], b.table.shape[1])
    pad = lambda t: torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-1)  # noqa: E731
    moved = torch.where(b.table[-1:] >= 0, b.table[-1:] + a.k_cache.shape[0], -1)
    return Paged(
        torch.cat([a.q, b.q[-rows:]]),
        torch.cat([a.k_cache, b.k_cache]),
        torch.cat([a.v_cache, b.v_cache]),
        torch.cat([pad(a.table), pad(moved)]),
        torch.cat([a.q_start, a.q_start[-1:] + rows]),
        torch.cat([a.kv_len, b.kv_len[-1:]]),
        torch.cat([a.pos, b.pos[-rows:]]),
        a.write,
        [*a.keys, b.keys[-1]],
        [*a.values, b.values[-1]],
    )
