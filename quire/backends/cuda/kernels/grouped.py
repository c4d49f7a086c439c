"""Products of rows with the matrices of their experts: one launch for all experts, whatever their shares of the rows.

Pairs of (row, choice) lie in the order of experts (route.py). A program takes a block of one expert's pairs and some of its
output channels, and finds out which by the experts' starts: the grid is the most blocks that there can be, and those past
the last one return. Weights are the left operand, as in product.py, and an element is summed in the order of k by one
program, so a row's bits do not depend on its batch. There is no atomic: each pair has a row of results, and `add_shares`
adds them in the order of experts.
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

from quire.backends.cuda.kernels.int4 import _pair
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.skinny import sixteenth
from quire.backends.cuda.kernels.tiled import tiled_sums, uniform
from quire.backends.torch.quantized import E4M3, WIDTH, Int4, Scaled, Tiled

BLOCK_K = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """A launch configuration: rows of an expert, and channels."""

    rows: int
    channels: int
    warps: int
    stages: int


# By how many rows an expert has on average. One for float32, which has no tensor cores of its own.
TILES = (Tile(16, 64, 4, 5), Tile(64, 64, 4, 4), Tile(128, 128, 8, 3))
WIDE = Tile(16, 64, 4, 2)
# Weights with scales for tiles: the last one is for rows of fp8, and keeps three sums at a time.
TILED = (Tile(16, 64, 4, 5), Tile(64, 64, 4, 3), Tile(64, 128, 8, 3))
# fp8 with a scale for each row, by how many rows an expert has on average: gate and up, then down. Few rows stay as they are, in
# blocks whose instructions take what was converted from registers; more are fp8 too, and nothing is converted.
FP8_FEW = (Tile(8, 64, 4, 4), Tile(8, 128, 4, 3))
FP8 = (
    (4, FP8_FEW),
    (24, (Tile(32, 128, 4, 5), Tile(32, 256, 8, 3))),
    (64, (Tile(64, 128, 8, 4), Tile(64, 256, 8, 3))),
)
_FEW_PAIRS = 64  # of however few experts: rounding rows would cost more than it gains
FP8_MANY = (Tile(128, 128, 8, 4), Tile(128, 256, 8, 3))


def fp8_tile(pairs: int, count: int, gated: bool) -> Tile:
    if pairs <= _FEW_PAIRS:
        return FP8_FEW[0 if gated else 1]
    return next((own for most, own in FP8 if pairs <= most * count), FP8_MANY)[0 if gated else 1]


def tile_of(dtype: torch.dtype, pairs: int, count: int, tiled: bool = False) -> Tile:
    if dtype == torch.float32:
        return WIDE
    known = TILED if tiled else TILES
    return next((t for t in known if pairs <= t.rows * count), known[-1])


@triton.jit
def _dense(
    x_row, w_row, up_row, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, IEEE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Sums over k with the rows of one matrix, and of a second one: [BLOCK_N, BLOCK_M] each."""
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(0, k, BLOCK_K):
        inner = at + lane
        if EVEN:
            values = tl.load(x_row[:, None] + inner[None, :])
            weights = tl.load(w_row[:, None] + inner[None, :])
        else:
            values = tl.load(x_row[:, None] + inner[None, :], mask=(inner < k)[None, :], other=0.0)
            weights = tl.load(w_row[:, None] + inner[None, :], mask=(inner < k)[None, :], other=0.0)
        if HALF:  # e4m3 becomes fp16 in one instruction, bf16 in many
            values = sixteenth(values)
        values = tl.trans(values)
        if IEEE:
            acc = tl.dot(weights, values, acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(values.dtype), values, acc)
        if GATED:
            if EVEN:
                weights = tl.load(up_row[:, None] + inner[None, :])
            else:
                weights = tl.load(up_row[:, None] + inner[None, :], mask=(inner < k)[None, :], other=0.0)
            if IEEE:
                up = tl.dot(weights, values, up, input_precision="ieee")
            else:
                up = tl.dot(weights.to(values.dtype), values, up)
    if HALF:
        acc *= 16.0
        up *= 16.0
    return acc, up


@triton.jit
def _four_bits(
    x_row, w_row, up_row, scale, zero, col, k, n, stride_s, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """The same with codes of four bits: [BLOCK_M, BLOCK_N]."""
    lane = tl.arange(0, GROUP)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(0, k, 2 * GROUP):
        low = tl.load(x_row[:, None] + (at + lane)[None, :])
        high = tl.load(x_row[:, None] + (at + GROUP + lane)[None, :])
        sum_low = tl.sum(low.to(tl.float32), 1)
        sum_high = tl.sum(high.to(tl.float32), 1)
        acc = _pair(acc, w_row, scale, zero, low, high, sum_low, sum_high, at, col, n, stride_s, GROUP, True)
        if GATED:
            up = _pair(up, up_row, scale + n, zero + n, low, high, sum_low, sum_high, at, col, n, stride_s, GROUP, True)
    return acc, up


@Launcher
@triton.jit(do_not_specialize=["pairs", "count", "stride_g"])
def _grouped(
    x, w, y, bias, scale, zero, own, order, starts, pairs, count, n, k, limit, stride_x, stride_w, stride_y, stride_s,
    stride_g,
    E_PAD: tl.constexpr, TOP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    HEIGHT: tl.constexpr, UNIFORM: tl.constexpr, EIGHT: tl.constexpr,
    EVEN: tl.constexpr, IEEE: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    lane = tl.arange(0, E_PAD)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
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
    x_row = x + source.to(tl.int64) * stride_x
    channels = n * 2 if GATED else n
    row = expert * channels
    inside = tl.where(col < n, col, 0)
    w_row = w + (row + inside).to(tl.int64) * stride_w
    up_row = w_row + n.to(tl.int64) * stride_w
    if GROUP > 0:
        acc, up = _four_bits(
            x_row, w_row, up_row, scale + row, zero + row, col, k, n, stride_s, BLOCK_M, BLOCK_N, GROUP, GATED
        )
    elif HEIGHT > 0:
        if UNIFORM:
            s_row = scale + (row + tl.program_id(0) * BLOCK_N) // HEIGHT * stride_s
            s_up = s_row + n // HEIGHT * stride_s
        else:
            s_row = scale + (row + inside) // HEIGHT * stride_s
            s_up = scale + (row + n + inside) // HEIGHT * stride_s
        acc, up = tiled_sums(
            x_row, own + source, w_row, s_row, up_row, s_up, 0, k, stride_g, BLOCK_M, BLOCK_N, True, GATED, EVEN, EIGHT,
            HALF, UNIFORM,
        )  # fmt: skip
        acc = tl.trans(acc)
        up = tl.trans(up)
    else:
        acc, up = _dense(x_row, w_row, up_row, k, BLOCK_M, BLOCK_N, BLOCK_K, GATED, EVEN, IEEE, HALF)
        acc = tl.trans(acc)
        up = tl.trans(up)
    if SCALED:
        acc *= tl.load(scale + row + inside)[None, :]
        if GATED:
            up *= tl.load(scale + row + n + inside)[None, :]
        if EIGHT:
            factor = tl.load(own + source)[:, None]
            acc *= factor
            if GATED:
                up *= factor
    if BIAS:
        acc += tl.load(bias + row + inside)[None, :]
        if GATED:
            up += tl.load(bias + row + n + inside)[None, :]
    if GATED:
        if LIMIT:
            acc = tl.minimum(acc, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            acc = acc * (1.0 / (1.0 + tl.exp(-1.702 * acc))) * up
        else:
            acc = acc * (1.0 / (1.0 + tl.exp(-acc))) * up
    place = y + target.to(tl.int64)[:, None] * stride_y + col[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), mask=live[:, None] & (col < n)[None, :])


def grouped(
    x: torch.Tensor,
    w: torch.Tensor | Scaled | Tiled | Int4,
    y: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    top: int = 0,
    gated: bool = False,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    tile: Tile | None = None,
    pdl: bool = False,
) -> None:
    """The product of each pair with its expert's matrix; w has those of all experts, one below the other.

    With `top`, pair p reads row p // top of x, and row i of y is that of pair order[i]; without, the other way round: row
    i of x is that of pair order[i], and row p of y that of pair p. `gated`: an expert has 2n rows, gates first, and y
    is their swiglu, or with `limit` the clamped one. bias float32 [E, rows of an expert]. With `x_scale` [k / 128, rows of x]
    float32, x is fp8, and w has scales for tiles; with [rows of x], w has one for each of its rows.
    """
    count, pairs, (_, n), k = starts.shape[0] - 1, order.shape[0], y.shape, x.shape[1]
    if tuple(w.shape) != (count * (2 * n if gated else n), k) or y.shape[0] != pairs or x.stride(1) != 1:
        raise ValueError(f"rows {list(x.shape)} and experts {count} x {list(w.shape)} into {list(y.shape)}")
    if x.shape[0] * max(top, 1) != pairs:
        raise ValueError(f"{x.shape[0]} rows, {top} choices each, are not {pairs} pairs")
    if not isinstance(w, torch.Tensor) and x.dtype == torch.float32:
        raise ValueError("quantized experts are multiplied with half floats")
    by_row = isinstance(w, Scaled) and w.codes.dtype == E4M3
    if (x_scale is not None or x.dtype == E4M3) and not (x_scale is not None and (by_row or isinstance(w, Tiled))):
        raise ValueError("rows of fp8 have scales, and are multiplied with fp8")
    if tile is None:
        tile = fp8_tile(pairs, count, gated) if by_row else tile_of(x.dtype, pairs, count, isinstance(w, Tiled))
    codes, scale, zero, group, height, step = w, x, x, 0, 0, BLOCK_K
    if isinstance(w, Tiled):
        codes, scale, height, step = w.codes, w.scale, w.height, WIDTH
    elif isinstance(w, Scaled):
        codes, scale, step = w.codes, w.scale, BLOCK_K * (2 if by_row else 1)
    elif isinstance(w, Int4):
        codes, scale, zero, group = w.packed, w.scale, w.zero, w.group
    assert isinstance(codes, torch.Tensor)
    blocks = min(pairs, pairs // tile.rows + count)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _grouped[(triton.cdiv(n, tile.channels), blocks)](
        x, codes, y, x if bias is None else bias, scale, zero, x if x_scale is None else x_scale, order, starts, pairs,
        count, n, k, limit or 0.0, x.stride(0), codes.stride(0), y.stride(0), scale.stride(0),
        0 if x_scale is None else x_scale.stride(0), E_PAD=triton.next_power_of_2(count), TOP=top,
        BLOCK_M=tile.rows, BLOCK_N=tile.channels, BLOCK_K=step, GATED=gated, LIMIT=limit is not None,
        BIAS=bias is not None, SCALED=isinstance(w, Scaled), GROUP=group, HEIGHT=height,
        UNIFORM=isinstance(w, Tiled) and uniform(w, tile.channels, n), EIGHT=x_scale is not None, EVEN=k % step == 0,
        IEEE=x.dtype == torch.float32, HALF=x.dtype == torch.bfloat16 and codes.dtype == E4M3, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, **launch,
    )  # fmt: skip


@Launcher
@triton.jit
def _add_shares(
    y, shares, out, width, stride_p, stride_y, stride_o, TOP: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP):
        value = tl.load(y + (row * TOP + i) * stride_y + col, mask=col < width, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            value += tl.load(y + part * stride_p + (row * TOP + i) * stride_y + col, mask=col < width, other=0.0)
        total += tl.load(shares + row * TOP + i) * value
    tl.store(out + row * stride_o + col, total.to(out.dtype.element_ty), mask=col < width)


def add_shares(y: torch.Tensor, shares: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """out [T, d] = the sum of shares [T, top] * y [T * top, d], in the order of choices, in float32.

    y may be [parts, T * top, d] float32, the parts of a product split over k: they are added first, in their order.
    """
    (rows, top), width = shares.shape, out.shape[1]
    if y.shape[-2:] != (rows * top, width) or out.shape[0] != rows:
        raise ValueError(f"shares {list(shares.shape)} of {list(y.shape)} into {list(out.shape)}")
    block = min(1024, triton.next_power_of_2(width))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _add_shares[(triton.cdiv(width, block), rows)](
        y, shares, out, width, y.stride(0), y.stride(-2), out.stride(0), TOP=top, PARTS=y.shape[0] if y.ndim == 3 else 1,
        BLOCK=block, PDL=pdl, num_warps=4, **launch,
    )  # fmt: skip
