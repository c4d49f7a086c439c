"""Matrix products whose rows do not know how many they are: the same bits for a row alone, in any batch, at any place.

An element of y = x @ w.T is summed in one order, whatever the shape: k is cut into segments of SEGMENT; inside one, the
tensor cores add 16 products at a time to a float32, in the order of k; segments are added in their order. Segments may be
one loop of one program (many rows) or programs of their own (few rows, so that the device is full): that is who adds, not
in which order.

The weights are always the left operand (64 of them are the least that Hopper's warpgroup instructions take), so that rows
of x can be few and the instruction is still the same one. `TILES` is the set of launch configurations in use. It must hold
nothing that gives other bits: tests/gpu/test_deterministic.py compares all of them.
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

SEGMENT = 2048  # of k
BLOCK_K = 64
_FULL = 256  # tiles of channels that fill a device: then segments need no programs of their own
_GROUP = 8  # row tiles that are walked together, so that they find each other's weights in the L2


@dataclass(frozen=True, slots=True)
class Tile:
    """A launch configuration. `apart`: segments are programs of their own, whose sums a second launch adds."""

    rows: int
    channels: int
    warps: int
    stages: int
    apart: bool = False


# The first that holds all rows, or the last. Half floats; one tile for float32, which has no tensor cores of its own.
TILES = (Tile(16, 64, 4, 8, apart=True), Tile(64, 64, 4, 5, apart=True), Tile(128, 128, 8, 4))
WIDE_TILES = (Tile(16, 64, 4, 2),)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles that may be used for x and w of that type."""
    return WIDE_TILES if dtype == torch.float32 else TILES


@triton.jit
def _segment(x_row, w_row, first, end, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             EVEN: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """The sum over first .. end of k: [BLOCK_N, BLOCK_M]."""
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(first, end, BLOCK_K):
        inner = at + lane
        if EVEN:
            weights = tl.load(w_row[:, None] + inner[None, :])
            values = tl.load(x_row[:, None] + inner[None, :])
        else:
            weights = tl.load(w_row[:, None] + inner[None, :], mask=(inner < k)[None, :], other=0.0)
            values = tl.load(x_row[:, None] + inner[None, :], mask=(inner < k)[None, :], other=0.0)
        if IEEE:
            acc = tl.dot(weights, tl.trans(values), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights, tl.trans(values), acc)
    return acc


@triton.jit
def _finish(
    acc, y, residual, bias, row, col, m, n, stride_y, stride_r, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """acc, plus bias, plus residual, rounded once. row and col broadcast to acc's shape."""
    keep = col < tl.where(row < m, n, 0)
    if BIAS:
        acc += tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + row.to(tl.int64) * stride_r + col, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * stride_y + col, acc.to(y.dtype.element_ty), mask=keep)


@Launcher
@triton.jit(do_not_specialize=["m"])
def _product(
    x, w, y, part, residual, bias, m, n, k, stride_x, stride_w, stride_y, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
    APART: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    IEEE: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if HEADS > 1:  # a matrix for each head: its own columns of x and y, and rows of w
        x += tl.program_id(2) * k
        w += tl.program_id(2).to(tl.int64) * n * stride_w
        y += tl.program_id(2) * n
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    index = tl.program_id(0)
    first_m = index // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first_m, GROUP)
    tile_m = first_m + index % (GROUP * tiles_n) % group
    tile_n = index % (GROUP * tiles_n) // group
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # What lies past the end reads row 0, and is not stored.
    x_row = x + tl.where(row < m, row, 0).to(tl.int64) * stride_x
    w_row = w + tl.where(col < n, col, 0).to(tl.int64) * stride_w
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if APART:
        first = tl.program_id(1) * SEGMENT
        acc = _segment(
            x_row, w_row, first, tl.minimum(k, first + SEGMENT), k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, IEEE
        )  # fmt: skip
        place = part + (tl.program_id(1) * m + row).to(tl.int64)[:, None] * n + col[None, :]
        tl.store(place, tl.trans(acc), mask=(row < m)[:, None] & (col < n)[None, :])
    else:
        total = _segment(x_row, w_row, 0, tl.minimum(k, SEGMENT), k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, IEEE)
        if SEGMENTS > 1:
            for i in range(1, SEGMENTS):
                first = i * SEGMENT
                total += _segment(
                    x_row, w_row, first, tl.minimum(k, first + SEGMENT), k, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, IEEE
                )  # fmt: skip
        _finish(
            tl.trans(total), y, residual, bias, row[:, None], col[None, :], m, n, stride_y, stride_r, BIAS, RESIDUAL
        )


@Launcher
@triton.jit(do_not_specialize=["m"])
def _add_segments(
    part, y, residual, bias, m, n, stride_y, stride_r, BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(part + row.to(tl.int64) * n + col, mask=col < n, other=0.0)
    for i in tl.static_range(1, SEGMENTS):
        total += tl.load(part + (i * m + row).to(tl.int64) * n + col, mask=col < n, other=0.0)
    _finish(total, y, residual, bias, row, col, m, n, stride_y, stride_r, BIAS, RESIDUAL)


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tile: Tile | None = None,
    heads: int = 1,
    pdl: bool = False,
) -> None:
    """y [m, n] = x [m, k] @ w [n, k].T + bias + residual, summed in float32, rounded once. `residual` may be y itself.

    With `heads`, each of as many equal parts of x and y has a matrix of its own, equal rows of w.
    """
    m, k, n = x.shape[0], x.shape[1] // heads, w.shape[0] // heads
    fit = w.shape == (heads * n, k) and y.shape == (m, heads * n) and x.shape[1] == heads * k
    if not fit or x.stride(1) != 1 or w.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(f"a product of x {list(x.shape)}, w {list(w.shape)} into y {list(y.shape)}")
    if x.dtype != w.dtype:
        raise ValueError(f"a product of {x.dtype} with weights of {w.dtype}")
    if heads > 1 and (bias is not None or residual is not None):
        raise ValueError("a product by head takes no bias and no residual")
    if m == 0:
        return
    if tile is None:
        known = tiles(x.dtype)
        tile = next((t for t in known if m <= t.rows), known[-1])
    segments = triton.cdiv(k, SEGMENT)
    apart = tile.apart and segments > 1 and heads == 1 and m <= tile.rows and n < _FULL * tile.channels
    res, b = x if residual is None else residual, x if bias is None else bias
    part = torch.empty(segments, m, n, dtype=torch.float32, device=x.device) if apart else y
    ends = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    grid = (triton.cdiv(m, tile.rows) * triton.cdiv(n, tile.channels), segments if apart else 1, heads)
    _product[grid](
        x, w, y, part, res, b, m, n, k, x.stride(0), w.stride(0), y.stride(0), res.stride(0), BLOCK_M=tile.rows,
        BLOCK_N=tile.channels, BLOCK_K=BLOCK_K, SEGMENT=SEGMENT, SEGMENTS=segments, APART=apart, GROUP=_GROUP,
        EVEN=k % BLOCK_K == 0, IEEE=x.dtype == torch.float32, HEADS=heads, PDL=pdl, num_warps=tile.warps,
        num_stages=tile.stages,
        **ends, **launch,
    )  # fmt: skip
    if apart:
        _add_segments[(triton.cdiv(n, 512), m)](
            part, y, res, b, m, n, y.stride(0), res.stride(0), BLOCK=512, SEGMENTS=segments, PDL=pdl, num_warps=4,
            **ends, **launch,
        )  # fmt: skip
