"""Products with fp8 weights that have a scale for each tile of 128 columns and some rows, and rows of fp8 with a scale for
each 128 columns.

A step of the inner loop is the 128 columns that share a scale: their product is summed on the tensor cores from zero, and
added to a float32 sum times its scales, so no sum of fp8 products is longer than 128. Rows of half floats are multiplied with
weights that become fp16 on the way (few rows: reading the weights is the whole cost, and rows are not rounded); rows of fp8
with the weights as they are.

One kernel serves both, and any number of rows: a program owns some rows, some channels, and all of k or one of `splits`
parts of it, which are added in their order. `tiled_sums` is also the inner loop of grouped.py.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.gates import KINDS, gate
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.skinny import (
    Shape,
    _epilogue,
    _prefetch,
    _sum_parts,
    _tile,
    sixteenth,
    store_part,
)
from quire.backends.torch.quantized import E4M3, WIDTH, Tiled

GROUP = tl.constexpr(WIDTH)
FP8_MAX = tl.constexpr(448.0)
_HIGH = 16  # rows that a program quantizes
_NEAR = 8  # row tiles that are walked together, so that they find each other's weights in the L2


@triton.jit
def _add(acc, tile, values, s, own, SWAP: tl.constexpr, EIGHT: tl.constexpr, UNIFORM: tl.constexpr):
    """acc plus the product of 128 columns, times the scales of channels (s: [N], or one) and of rows (own: [M])."""
    if not EIGHT:
        tile = tile.to(values.dtype)
    if SWAP:
        got = tl.dot(tile, tl.trans(values))
    else:
        got = tl.dot(values, tl.trans(tile))
    if UNIFORM:
        if EIGHT:
            got *= tl.expand_dims(own * s, 0 if SWAP else 1)
        else:
            got *= s
    else:
        got *= tl.expand_dims(s, 1 if SWAP else 0)
        if EIGHT:
            got *= tl.expand_dims(own, 0 if SWAP else 1)
    return acc + got


@triton.jit
def tiled_sums(
    x_row, own_row, w_row, s_row, up_row, s_up, first, last, stride_g, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr, GATED: tl.constexpr, EVEN: tl.constexpr, EIGHT: tl.constexpr, HALF: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """Sums over first .. last of k with the rows of one matrix, and of a second one: [N, M] with SWAP, else [M, N].

    own_row: where the scales of rows begin, [M]; s_row: those of channels, [N], or one where a tile has them all.
    """
    lane = tl.arange(0, GROUP)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    # Scales come a step ahead of their use: what is no operand of a product is not pipelined for us.
    final = tl.cdiv(last, GROUP) - 1
    begin = tl.minimum(first // GROUP, final)
    own = 0.0
    t = 0.0
    s = tl.load(s_row + begin)
    if EIGHT:
        own = tl.load(own_row + begin * stride_g)
    if GATED:
        t = tl.load(s_up + begin)
    for at in range(first, last, GROUP):
        inner = at + lane
        group = tl.minimum(at // GROUP + 1, final)
        s_next = tl.load(s_row + group)
        if EIGHT:
            own_next = tl.load(own_row + group * stride_g)
        if GATED:
            t_next = tl.load(s_up + group)
        values = _tile(x_row, inner, last, EVEN)
        if HALF:  # e4m3 becomes fp16 in one instruction, bf16 in many
            values = sixteenth(values)
        acc = _add(acc, _tile(w_row, inner, last, EVEN), values, s, own, SWAP, EIGHT, UNIFORM)
        if GATED:
            up = _add(up, _tile(up_row, inner, last, EVEN), values, t, own, SWAP, EIGHT, UNIFORM)
            t = t_next
        if EIGHT:
            own = own_next
        s = s_next
    if HALF:
        acc *= 16.0
        up *= 16.0
    return acc, up


@Launcher
@triton.jit(do_not_specialize=["m", "stride_g"])
def _tiled(
    x, w, y, residual, bias, w_scale, x_scale, part, m, n, k, stride_x, stride_g, stride_w, stride_s, stride_y, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEIGHT: tl.constexpr, SPLITS: tl.constexpr, NEAR: tl.constexpr,
    GATE: tl.constexpr, EIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SWAP: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr, EVEN: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    index = tl.program_id(0)
    first_m = index // (NEAR * tiles_n) * NEAR
    near = tl.minimum(tiles_m - first_m, NEAR)
    tile_m = first_m + index % (NEAR * tiles_n) % near
    tile_n = index % (NEAR * tiles_n) // near
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    share = tl.cdiv(tl.cdiv(k, GROUP), SPLITS) * GROUP
    first = tl.program_id(1) * share
    last = tl.minimum(k, first + share)
    # What lies past the end reads row 0, and is not stored.
    inside = tl.where(row < m, row, 0)
    channel = tl.where(col < n, col, 0)
    w_row = w + channel.to(tl.int64) * stride_w
    if UNIFORM:
        s_row = w_scale + tile_n * BLOCK_N // HEIGHT * stride_s
        s_up = s_row + n // HEIGHT * stride_s
    else:
        s_row = w_scale + channel // HEIGHT * stride_s
        s_up = w_scale + (channel + n) // HEIGHT * stride_s
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            _prefetch(w_row + first, n, stride_w, BLOCK_N, LINES, GATE)
        tl.extra.cuda.gdc_wait()
    acc, up = tiled_sums(
        x + inside.to(tl.int64) * stride_x, x_scale + inside, w_row, s_row, w_row + n.to(tl.int64) * stride_w, s_up, first,
        last, stride_g, BLOCK_M, BLOCK_N, SWAP, GATE, EVEN, EIGHT, HALF, UNIFORM,
    )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    keep = (row < m)[:, None] & (col < n)[None, :]
    if SPLITS > 1:
        store_part(part + (tl.program_id(1) * m + row).to(tl.int64)[:, None] * n + col[None, :], acc, keep)
    else:
        if GATE:
            acc = gate(acc, up, GATE)
        at = row.to(tl.int64)[:, None]
        _epilogue(acc, y, residual, bias, at, col[None, :], keep, n, stride_y, stride_r, BIAS, RESIDUAL)


def tiled_product(
    x: torch.Tensor,
    w: Tiled,
    y: torch.Tensor,
    shape: Shape,
    *,
    rows: int = 0,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    act: str = "",
    part: torch.Tensor | None = None,
    add_parts: bool = True,
) -> None:
    """y [m, n] = x [m, k] @ w.T; with an `act` (see gates.py) the weights have 2n rows, gates first.

    x is fp8 with x_scale [k / 128, m] float32, or bf16 or fp16. `rows` are those of a program; 0: all of them, up to 64. The
    shape's block_k is not looked at: a step is the 128 columns of a scale. `part` [splits, m, n] float32 as for `skinny`.
    """
    (m, k), n, codes, scale = x.shape, y.shape[1], w.codes, w.scale
    if codes.shape != ((2 * n if act else n), k) or y.shape[0] != m or x.stride(1) != 1 or w.skip:
        raise ValueError(f"product of x {list(x.shape)} and tiles {list(codes.shape)} into y {list(y.shape)}")
    if x_scale is not None and (x_scale.shape != (triton.cdiv(k, WIDTH), m) or x_scale.stride(1) != 1):
        raise ValueError(f"rows {list(x.shape)} with scales {list(x_scale.shape)}")
    if (x.dtype == E4M3) != (x_scale is not None):
        raise ValueError("rows of fp8 have scales, and others none")
    if shape.splits > 1 and (act or part is None):
        raise ValueError("a split sum needs the partial sums' space, and takes no activation")
    if m == 0:
        return
    rows = rows or triton.next_power_of_2(max(16, m))
    single, ends = shape.splits == 1, {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    res, b, own = x if residual is None else residual, x if bias is None else bias, x if x_scale is None else x_scale
    launch: dict[str, object] = {"num_warps": shape.warps, "num_stages": shape.stages}
    if shape.pdl:
        launch["launch_pdl"] = True
    _tiled[(triton.cdiv(m, rows) * triton.cdiv(n, shape.block_n), shape.splits)](
        x, codes, y, res, b, scale, own, y if part is None else part, m, n, k, x.stride(0), own.stride(0),
        codes.stride(0), scale.stride(0), y.stride(0), res.stride(0), BLOCK_M=rows, BLOCK_N=shape.block_n,
        HEIGHT=w.height, SPLITS=shape.splits, NEAR=_NEAR, GATE=KINDS[act],
        EIGHT=x_scale is not None, SWAP=shape.swap, HALF=x.dtype == torch.bfloat16, PDL=shape.pdl, LINES=shape.lines,
        EVEN=k % WIDTH == 0, UNIFORM=uniform(w, shape.block_n, n if act else 0),
        **(ends if single else {"BIAS": False, "RESIDUAL": False}), **launch,
    )  # fmt: skip
    if not single and add_parts:
        _sum_parts[(triton.cdiv(n, 512), m)](
            part, y, res, b, m, n, y.stride(0), res.stride(0), BLOCK_N=512, SPLITS=shape.splits, num_warps=4, **ends
        )


def uniform(w: Tiled, channels: int, step: int) -> bool:
    """Whether so many channels, from a multiple of that on, lie in one tile; `step`: rows from which they are counted anew."""
    return w.height % channels == 0 and step % w.height == 0


@Launcher
@triton.jit(do_not_specialize=["m", "stride_g"])
def _quantize_groups(
    x, out, scales, m, width, stride_x, stride_o, stride_g, HIGH: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * HIGH + tl.arange(0, HIGH)
    col = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    keep = (row < m)[:, None] & (col < width)[None, :]
    at = row.to(tl.int64)[:, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + at * stride_x + col[None, :], mask=keep, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 1), 1e-10) / FP8_MAX
    tl.store(scales + tl.program_id(1) * stride_g + row, scale, mask=row < m)
    value = value / scale[:, None]  # 448 at most, to within a rounding that e4m3 does not see; a NaN stays one
    tl.store(out + at * stride_o + col[None, :], value.to(out.dtype.element_ty), mask=keep)


def quantize_groups(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor, *, pdl: bool = False) -> None:
    """out [T, d] fp8 and scales [d / 128, T] float32: out times the scale of its 128 columns is x, to half a step of e4m3."""
    m, width = x.shape
    groups = triton.cdiv(width, WIDTH)
    if out.shape != x.shape or scales.shape != (groups, m) or scales.stride(1) != 1:
        raise ValueError(f"rows {list(x.shape)} into {list(out.shape)} with scales {list(scales.shape)}")
    if m == 0:
        return
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _quantize_groups[(triton.cdiv(m, _HIGH), groups)](
        x,
        out,
        scales,
        m,
        width,
        x.stride(0),
        out.stride(0),
        scales.stride(0),
        HIGH=_HIGH,
        PDL=pdl,
        num_warps=4,
        **launch,
    )
