"""The products of adapters, for rows of any mixture of them: y += b (a x), with the pair of each row's own slot.

`_shrink` multiplies rows with the a of their slots and leaves sums of parts of k, `_expand` adds those up and multiplies them with
b. Targets that add to columns of one product are done together. A program has some rows, finds out which slots they use, and takes these one after another: what it computes for rows of others is
thrown away, not multiplied by zero, so numbers that are none stay where they are. Rows without an adapter, and slots without a
pair here (rank 0), cost a look. Slots and ranks are read on the device: a captured step serves any of them. A row is summed in one
order, whatever its batch.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of every slot, of one target or of several whose channels are neighbours. What lies past a rank is zero."""

    a: torch.Tensor  # [slots, targets * rank, k]
    b: torch.Tensor  # [slots, n, rank]
    ranks: torch.Tensor  # int32 [targets, slots]; 0 where there is no pair
    blocks: torch.Tensor  # int32 [blocks, 3]: the target, the first channel and the end of each piece of channels

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@Launcher
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots", "ranks"])
def _shrink(
    x, a, inner, slots, ranks, tokens, count, k, stride_x, stride_slot, stride_row, R: tl.constexpr, ROWS: tl.constexpr,
    RANK: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    column = tl.program_id(2) * RANK + tl.arange(0, RANK)
    target = tl.program_id(2) * RANK // R
    lane = tl.arange(0, BLOCK_K)
    there = row < tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row, mask=there, other=-1)
    rank = tl.load(ranks + target * count + slot, mask=slot >= 0, other=0)
    wanted = rank > tl.program_id(2) * RANK % R
    left = tl.where(wanted, slot, NONE)
    own = tl.min(left, 0)
    total = tl.zeros([ROWS, RANK], tl.float32)
    while own < NONE:
        acc = tl.zeros([ROWS, RANK], tl.float32)
        of_slot = a + own.to(tl.int64) * stride_slot + column[None, :] * k
        for first in range(part * PART, tl.minimum((part + 1) * PART, k), BLOCK_K):
            at = first + lane
            if EVEN:
                rows = tl.load(x + row[:, None] * stride_x + at[None, :], mask=there[:, None], other=0.0)
                half = tl.load(of_slot + at[:, None])
            else:
                inside = there[:, None] & (at < k)[None, :]
                rows = tl.load(x + row[:, None] * stride_x + at[None, :], mask=inside, other=0.0)
                half = tl.load(of_slot + at[:, None], mask=(at < k)[:, None], other=0.0)
            acc = tl.dot(rows, half, acc, input_precision="ieee")
        total = tl.where((left == own)[:, None], acc, total)
        left = tl.where(left == own, NONE, left)
        own = tl.min(left, 0)
    place = (part * tokens + row)[:, None] * stride_row + column[None, :]
    tl.store(inner + place, total, mask=wanted[:, None])


@Launcher
@triton.jit(do_not_specialize=["tokens", "parts"], do_not_specialize_on_alignment=["slots", "ranks", "blocks"])
def _expand(
    y, b, inner, slots, ranks, blocks, tokens, parts, count, stride_y, stride_slot, stride_row, R: tl.constexpr,
    ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    piece = blocks + tl.program_id(1) * 3
    target = tl.load(piece)
    channel = tl.load(piece + 1) + tl.arange(0, BLOCK_N)
    keep = channel < tl.load(piece + 2)
    lane = tl.arange(0, RANK)
    there = row < tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots + row, mask=there, other=-1)
    rank = tl.load(ranks + target * count + slot, mask=slot >= 0, other=0)
    wanted = rank > 0
    left = tl.where(wanted, slot, NONE)
    own = tl.min(left, 0)
    if own == NONE:
        return
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    while own < NONE:
        acc = tl.zeros([ROWS, BLOCK_N], tl.float32)
        mine = left == own
        of_slot = b + own.to(tl.int64) * stride_slot + channel[None, :] * R
        for first in range(0, tl.max(tl.where(mine, rank, 0), 0), RANK):
            column = first + lane
            source = inner + row[:, None] * stride_row + target * R + column[None, :]
            low = tl.zeros([ROWS, RANK], tl.float32)
            for part in range(parts):
                low += tl.load(source + part * tokens * stride_row, mask=mine[:, None], other=0.0)
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


def adapt(y: torch.Tensor, x: torch.Tensor, pairs: Pairs, slots: torch.Tensor, *, pdl: bool = False) -> None:
    """y [T, n] += b[s] (a[s] x), by target, for each row whose slot s has a pair there. slots int32 [T], -1: none."""
    tokens, n = y.shape
    (count, width, k), rank = pairs.a.shape, pairs.rank
    targets = pairs.ranks.shape[0]
    if (
        x.shape != (tokens, k)
        or pairs.b.shape[1] != n
        or width != targets * rank
        or rank % RANK
        or slots.shape != (tokens,)
    ):
        raise ValueError(f"adapters {list(pairs.a.shape)}, {list(pairs.b.shape)} for {list(x.shape)}, {list(y.shape)}")
    if pairs.a.stride()[1:] != (k, 1) or pairs.b.stride()[1:] != (rank, 1):
        raise ValueError("the pairs of a slot must lie together")
    if tokens == 0:
        return
    rows, parts = triton.cdiv(tokens, ROWS), triton.cdiv(k, PART)
    inner = torch.empty(parts, tokens, width, dtype=torch.float32, device=x.device)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _shrink[(rows, parts, width // RANK)](
        x, pairs.a, inner, slots, pairs.ranks, tokens, count, k, x.stride(0), pairs.a.stride(0), width, R=rank, ROWS=ROWS,
        RANK=RANK, PART=PART, BLOCK_K=BLOCK_K, EVEN=k % BLOCK_K == 0, PDL=pdl, num_warps=4, num_stages=4, **launch,
    )  # fmt: skip
    _expand[(rows, pairs.blocks.shape[0])](
        y, pairs.b, inner, slots, pairs.ranks, pairs.blocks, tokens, parts, count, y.stride(0), pairs.b.stride(0), width,
        R=rank, ROWS=ROWS, RANK=RANK, BLOCK_N=BLOCK_N, PDL=pdl, num_warps=4, num_stages=2, **launch,
    )  # fmt: skip
