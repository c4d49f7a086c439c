"""Products of rows with the matrices of their experts in MXFP4, as they lie packed: one launch for all experts.

Who works on what is as in grouped.py: pairs of (row, choice) in the order of experts, a program for a block of one expert's pairs
and some of its output channels. The weights of a tile become bfloat16 in registers, once for all rows of the block (unpack.py), so
the bytes that are read are those of the file. With few pairs a product may be split over k: parts are added by `add_shares`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.unpack import MX_TIMES, mx_tile
from quire.backends.torch.words import HIGH, MxWords


@dataclass(frozen=True, slots=True)
class Block:
    """A launch configuration: rows of an expert, rows of its matrix, and parts of k."""

    rows: int
    high: int
    warps: int
    stages: int
    splits: int = 1


# By how many rows an expert has on average: what `benchmarks.gpu_kernels --only experts` found best on an H200. Small blocks are
# multiplied by instructions that wait for nothing; large ones by Hopper's own.
BLOCKS = ((2, Block(8, 128, 4, 4)), (10, Block(16, 128, 4, 4)), (40, Block(32, 128, 4, 3)), (256, Block(64, 128, 4, 3)))
LARGEST = Block(128, 128, 4, 3)
_FEW = 4, 4  # so many rows at most, and parts of k that fill the device then


def block_of(pairs: int, count: int, top: int, gated: bool = False) -> Block:
    """The launch configuration for so many pairs of rows and their `top` choices."""
    block = next((b for most, b in BLOCKS if pairs <= most * count), LARGEST)
    rows = pairs // max(top, 1)
    return replace(block, splits=_FEW[1]) if rows <= _FEW[0] and not gated else block


@Launcher
@triton.jit(do_not_specialize=["pairs", "count", "tiles"])
def _grouped_words(
    x, words, scale, y, bias, shares, order, starts, pairs, count, n, k, tiles, limit, stride_x, stride_y,
    E_PAD: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, HIGH: tl.constexpr, GATED: tl.constexpr,
    LIMIT: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr, CHOICES: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    part = tl.program_id(2)
    lane = tl.arange(0, E_PAD)
    CHANNELS: tl.constexpr = HIGH // 2 if GATED else HIGH
    high = tl.arange(0, HIGH)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(starts + lane, mask=lane < count, other=pairs)
    end = tl.load(starts + lane + 1, mask=lane < count, other=pairs)
    need = tl.cdiv(end - start, BLOCK_M)
    upto = tl.cumsum(need, 0)
    expert = tl.sum((upto <= block).to(tl.int32), 0)
    if expert >= count:
        return
    mine = lane == expert
    local = (block - tl.sum(tl.where(mine, upto - need, 0), 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.sum(tl.where(mine, start, 0), 0) + local
    live = at < tl.sum(tl.where(mine, end, 0), 0)
    pair = tl.load(order + at, mask=live, other=0)
    # From rows to the places of pairs, or from places to pairs. What is past the end reads row 0, and is not stored.
    if TOP > 0:
        source = pair // TOP
        target = at
    else:
        source = tl.where(live, at, 0)
        target = pair
    inner = tl.arange(0, 128)
    x_row = x + source.to(tl.int64)[:, None] * stride_x + inner[None, :]
    channel = tl.program_id(0) * CHANNELS + high % CHANNELS
    channel = tl.where(channel < n, channel, 0)
    if GATED:  # the first half of the rows are gates, the second are what is multiplied with them
        row = channel + high // CHANNELS * n + expert * 2 * n
    else:
        row = channel + expert * n
    first = (row // 64).to(tl.int64) * tiles * 64 + row % 64  # of the row in its first tile, in rows
    w_row = words + first[:, None] * 16 + tl.arange(0, 16)[None, :]
    s_row = scale + first
    share = tl.cdiv(tiles, SPLITS)
    acc = tl.zeros([HIGH, BLOCK_M], tl.float32)
    for tile in range(part * share, tl.minimum(tiles, part * share + share)):
        four = tl.load(w_row + tile * 1024)
        factors = tl.load(s_row + tile * 64)
        if EVEN:
            values = tl.load(x_row + tile * 128)
        else:
            values = tl.load(x_row + tile * 128, mask=(tile * 128 + inner < k)[None, :], other=0.0)
        acc = tl.dot(mx_tile(four, factors, HIGH, values.dtype), tl.trans(values), acc)
    acc = tl.trans(acc) * MX_TIMES
    if GATED:
        acc, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, CHANNELS]), 0, 2, 1))
    col = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    if BIAS:
        if GATED:
            up += tl.load(bias + expert * 2 * n + n + col, mask=col < n, other=0.0)[None, :]
            acc += tl.load(bias + expert * 2 * n + col, mask=col < n, other=0.0)[None, :]
        elif part == 0:
            acc += tl.load(bias + expert * n + col, mask=col < n, other=0.0)[None, :]
    if GATED:
        if LIMIT:
            acc = tl.minimum(acc, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            acc = acc * (1.0 / (1.0 + tl.exp(-1.702 * acc))) * up
        else:
            acc = acc * (1.0 / (1.0 + tl.exp(-acc))) * up
    if CHOICES > 0:  # parts that a norm adds: [part, choice, row]
        acc *= tl.load(shares + pair, mask=live, other=0.0)[:, None]
        target = pair % CHOICES * (pairs // CHOICES) + pair // CHOICES
    place = y + (part * pairs + target).to(tl.int64)[:, None] * stride_y + col[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=live[:, None] & (col < n)[None, :])


def grouped_words(
    x: torch.Tensor,
    w: MxWords,
    y: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    top: int = 0,
    gated: bool = False,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    block: Block,
    pdl: bool = False,
) -> None:
    """The product of each pair with its expert's matrix, as `grouped` has it; w has those of all experts, one below the other.

    y is [P, n], or with a block that splits k [splits, P, n] float32, whose parts somebody adds; the bias is in the first.
    With `shares` [T, top] each result is multiplied with its own, and y is [splits * top, T, n]: its sum is all there is to add.
    """
    count, pairs, n, k = starts.shape[0] - 1, order.shape[0], y.shape[-1], x.shape[1]
    if (
        w.shape != (count * (2 * n if gated else n), k)
        or y.numel() != pairs * n * (block.splits if y.ndim == 3 else 1)
        or x.stride(1) != 1
        or n % HIGH
    ):
        raise ValueError(f"rows {list(x.shape)} and experts {count} x {list(w.shape)} into {list(y.shape)}")
    if x.shape[0] * max(top, 1) != pairs:
        raise ValueError(f"{x.shape[0]} rows, {top} choices each, are not {pairs} pairs")
    choices = 0 if shares is None else shares.shape[1]
    if shares is not None:
        if gated or shares.numel() != pairs or y.shape != (block.splits * choices, pairs // choices, n):
            raise ValueError(f"shares {list(shares.shape)} of {pairs} pairs into {list(y.shape)}")
    elif block.splits > 1 and (
        gated or y.shape[0] != block.splits or y.dtype != torch.float32 or not y.is_contiguous()
    ):
        raise ValueError(f"{block.splits} parts of sums into {list(y.shape)}")
    blocks = min(pairs, pairs // block.rows + count)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _grouped_words[(triton.cdiv(n, block.high // 2 if gated else block.high), blocks, block.splits)](
        x, w.words, w.scale, y, x if bias is None else bias, x if shares is None else shares, order, starts, pairs, count, n, k, w.words.shape[1],
        limit or 0.0, x.stride(0), y.stride(-2), E_PAD=triton.next_power_of_2(count), TOP=top, BLOCK_M=block.rows,
        HIGH=block.high, GATED=gated, LIMIT=limit is not None, BIAS=bias is not None, SPLITS=block.splits, CHOICES=choices,
        EVEN=k % 128 == 0, PDL=pdl, num_warps=block.warps, num_stages=block.stages, **launch,
    )  # fmt: skip
