"""Attention of long prompts through cuDNN, which keeps the tensor cores busier than our own kernel does.

It is used for a sequence that begins in this step: then its keys are the rows of the step, and only the future is hidden. Its
keys and values are read back from the cache, so that what is seen is what was kept. Everything else (a past, few rows, a
window, a cap, codes in the cache) is the paged kernel's.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quire.backends.torch.batch import DeviceBatch

LONG = 2048  # rows from which it is faster, with what the calls cost


@cache
def usable(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the library takes such heads here: tried, for the rules change between versions."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    q = torch.zeros(64, heads, dim, dtype=dtype, device=device)
    k = torch.zeros(64, kv_heads, dim, dtype=dtype, device=device)
    try:
        _causal(q, k, k, 1.0)
    except RuntimeError:
        return False
    return True


def beginnings(batch: DeviceBatch) -> tuple[list[tuple[int, int, int]], bool] | None:
    """(sequence, first row, rows) of the long prompts that begin here, and whether there are decode rows beside them.

    None where another kind of sequence is among them.
    """
    host = batch.host
    if host is None or batch.longest < LONG:
        return None
    rows = np.diff(host.q_start)
    long = (rows >= LONG) & (rows == host.kv_len)
    if not (long | (rows == 1)).all():
        return None
    found = [(int(b), int(host.q_start[b]), int(rows[b])) for b in np.flatnonzero(long)]
    return found, len(found) < rows.size


def attend_beginnings(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    pages: torch.Tensor,
    found: list[tuple[int, int, int]],
    scale: float,
) -> None:
    """The rows of each of those. keys and values [pages, page size, Hk, D], q and out [T, H, D]."""
    size = keys.shape[1]
    for b, first, count in found:
        own = pages[b, : -(-count // size)]
        k, v = (x.index_select(0, own).flatten(0, 1)[:count] for x in (keys, values))
        out[first : first + count] = _causal(q[first : first + count], k, v, scale)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[S, H, D], [S, Hk, D] -> [S, H, D]"""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        got = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return got[0].transpose(0, 1)
