"""What adapters add to a product, for rows of any mixture of them: y += b (a x), with the pair of each row's own slot.

`_shrink` multiplies rows with the a of their slots and leaves sums of parts of k, `_expand` adds those up and multiplies them with
b. A program has some rows, finds out which slots they use, and takes these one after another: what it computes for rows of others is
thrown away, not multiplied by zero, so numbers that are none stay where they are. Rows without an adapter, and slots without a
pair here (rank 0), cost a look. Slots and ranks are read on the device: a captured step serves any of them. A row is summed in one
order, whatever its batch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.launch import Launcher

ROWS = 16  # of a program: what the tensor cores take at least
PART = 1024  # of k, in one program
RANK = 16  # columns of a pair that are multiplied together; ranks are padded to it
BLOCK_K = 128
BLOCK_N = 64
NONE = tl.constexpr(1 << 30)  # more than any slot


@Launcher
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots", "ranks"])
def _shrink(
    x, a, inner, slots, ranks, tokens, k, stride_x, R: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    PART: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    column = tl.program_id(2) * RANK + tl.arange(0, RANK)
    lane = tl.arange(0, BLOCK_K)
    there = row < tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row, mask=there, other=-1)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    wanted = rank > tl.program_id(2) * RANK
    left = tl.where(wanted, slot, NONE)
    own = tl.min(left, 0)
    total = tl.zeros([ROWS, RANK], tl.float32)
    while own < NONE:
        acc = tl.zeros([ROWS, RANK], tl.float32)
        of_slot = a + (own.to(tl.int64) * R + column)[None, :] * k
        for first in range(part * PART, tl.minimum((part + 1) * PART, k), BLOCK_K):
            at = first + lane
            if EVEN:
                rows = tl.load(x + row[:, None] * stride_x + at[None, :], mask=there[:, None], other=0.0)
                half = tl.load(of_slot + at[:, None])
            else:
                rows = tl.load(
                    x + row[:, None] * stride_x + at[None, :], mask=there[:, None] & (at < k)[None, :], other=0.0
                )
                half = tl.load(of_slot + at[:, None], mask=(at < k)[:, None], other=0.0)
            acc = tl.dot(rows, half, acc, input_precision="ieee")
        total = tl.where((left == own)[:, None], acc, total)
        left = tl.where(left == own, NONE, left)
        own = tl.min(left, 0)
    place = (part * tokens + row)[:, None] * R + column[None, :]
    tl.store(inner + place, total, mask=wanted[:, None])


@Launcher
@triton.jit(do_not_specialize=["tokens", "parts"], do_not_specialize_on_alignment=["slots", "ranks"])
def _expand(
    y, b, inner, slots, ranks, tokens, parts, n, stride_y, R: tl.constexpr, ROWS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, RANK)
    there = row < tokens
    keep = channel < n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row, mask=there, other=-1)
    rank = tl.load(ranks + slot, mask=slot >= 0, other=0)
    wanted = rank > 0
    left = tl.where(wanted, slot, NONE)
    own = tl.min(left, 0)
    if own == NONE:
        return
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    while own < NONE:
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
        mine = left == own
        of_slot = b + (own.to(tl.int64) * n + channel)[None, :] * R
        for first in range(0, tl.max(tl.where(mine, rank, 0), 0), RANK):
            column = first + lane
            source = inner + row[:, None] * R + column[None, :]
            low = tl.zeros([ROWS, RANK], tl.float32)
            for part in range(parts):
                low += tl.load(source + part * tokens * R, mask=mine[:, None], other=0.0)
            half = tl.load(of_slot + column[:, None], mask=keep[None, :], other=0.0)
            acc = tl.dot(low.to(half.dtype), half, acc, input_precision="ieee")
        total = tl.where(mine[:, None], acc, total)
        left = tl.where(mine, NONE, left)
        own = tl.min(left, 0)
    place = y + row[:, None] * stride_y + channel[None, :]
    mask = wanted[:, None] & keep[None, :]
    before = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    # Rounded as a product's result is, then added: so is a row in plain torch.
    after = before + total.to(y.dtype.element_ty).to(tl.float32)
    tl.store(place, after.to(y.dtype.element_ty), mask=mask)


def adapt(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    slots: torch.Tensor,
    ranks: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """y [T, n] += b[s] (a[s] x) for each row whose slot s has a rank here. a [S, R, k], b [S, n, R]; slots [T], -1: none.

    ranks [S] int32, 0 where a slot has no pair; what lies past a slot's rank is zero.
    """
    tokens, n = y.shape
    count, rank, k = a.shape
    if x.shape != (tokens, k) or b.shape != (count, n, rank) or rank % RANK or slots.shape != (tokens,):
        raise ValueError(f"adapters {list(a.shape)} and {list(b.shape)} for {list(x.shape)} and {list(y.shape)}")
    if tokens == 0:
        return
    blocks, parts = triton.cdiv(tokens, ROWS), triton.cdiv(k, PART)
    inner = torch.empty(parts, tokens, rank, dtype=torch.float32, device=x.device)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _shrink[(blocks, parts, rank // RANK)](
        x, a, inner, slots, ranks, tokens, k, x.stride(0), R=rank, ROWS=ROWS, RANK=RANK, PART=PART, BLOCK_K=BLOCK_K,
        EVEN=k % BLOCK_K == 0, PDL=pdl, num_warps=4, num_stages=4, **launch,
    )  # fmt: skip
    _expand[(blocks, triton.cdiv(n, BLOCK_N))](
        y, b, inner, slots, ranks, tokens, parts, n, y.stride(0), R=rank, ROWS=ROWS, RANK=RANK, BLOCK_N=BLOCK_N,
        PDL=pdl, num_warps=4, num_stages=2, **launch,
    )  # fmt: skip
