"""Attention for rows that share a prefix: the shared pages are read once for all of them, the rest row by row.

Two passes and a merge. In the first a group of rows is one tall tile of queries over the pages of its prefix, all of
which every row sees; in the second each row walks its own pages; `combine` merges the two by log-sum-exp. A row that
shares nothing is in a group whose prefix is empty. Group arrays have a fixed size: groups past the last one are empty.
"""

from __future__ import annotations

import torch
import triton

from quire.backends.cuda.kernels.attention import PROMPT, PROMPT_WIDE, Workspace, attend, decode_tile
from quire.backends.cuda.kernels.combine import combine
from quire.backends.torch.batch import Shared


def prefix_splits(rows: int, heads: int, kv_heads: int, processors: int = 132) -> int:
    """Parts of a shared prefix that fill the device about twice, where all rows share one."""
    tiles = -(-rows * heads // kv_heads // PROMPT.rows) * kv_heads
    return max(1, min(2 * processors // tiles, 16))


def shared_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    table: torch.Tensor,
    pos: torch.Tensor,
    groups: Shared,
    scale: float,
    max_q: int,
    space: Workspace,
    own_splits: int = 1,
    prefix_splits: int = 1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """`attention` for decode and verification rows (at most max_q a sequence), reading each shared prefix once.

    `space` has own_splits + prefix_splits parts.
    """
    heads, dim = q.shape[1], q.shape[2]
    group_pad = int(triton.next_power_of_2(heads // k_cache.shape[2]))  # which some releases of triton type as theirs
    if space.parts != own_splits + prefix_splits:
        raise ValueError(f"{own_splits} + {prefix_splits} parts need a workspace of as many, not {space.parts}")
    tile = decode_tile(kv_len.shape[0] * k_cache.shape[2] * own_splits, group_pad * max_q)
    tall = PROMPT if dim <= 128 else PROMPT_WIDE
    blocks = q.shape[0] // max(1, tall.rows // group_pad) + groups.length.shape[0]
    shared = {"scale": scale, "softcap": softcap, "k_scale": k_scale, "v_scale": v_scale, "space": space, "pdl": pdl}
    attend(
        q, k_cache, v_cache, out, q_start=groups.start, kv_len=groups.length, table=groups.table, pos=None, tile=tall,
        blocks=blocks, splits=prefix_splits, part_first=own_splits, **shared,
    )  # fmt: skip
    attend(
        q, k_cache, v_cache, out, q_start=q_start, kv_len=kv_len, table=table, pos=pos, tile=tile, max_rows=max_q,
        kv_begin=groups.own_from, splits=own_splits, **shared,
    )  # fmt: skip
    combine(space.part, space.lse, out, sinks=sinks, parts=space.parts, pdl=pdl)
