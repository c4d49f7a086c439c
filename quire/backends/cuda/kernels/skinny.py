"""Matrix products for one to 64 rows, where reading the weights is the whole cost.

y = epilogue(x @ w.T): a scale per channel (fp8 and int8 weights), a bias, an activation over the two halves of w, a residual; for one
row also RMSNorm of x on the way in (its scale is a factor of the finished row, so one pass over x serves both).
Weights [n, k] are bf16, fp16, fp8 e4m3 or int8; x stays in its own precision, sums are float32. Where x is bf16 and w fp8
both become fp16, and x a sixteenth of itself, so that what bf16 can hold and fp16 cannot starts at a million.

A program owns BLOCK_N channels and all of k, or one of `splits` parts of k. Parts are added in their order, by a second
launch here or by whoever reads the result next (`rms_norm` and `rope_write` take parts as they are): the order of
additions is fixed by the configuration alone, which `tuning.py` chooses by shape.
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
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]

from quire.backends.cuda.kernels.gates import KINDS, gate
from quire.backends.cuda.kernels.launch import Launcher


@dataclass(frozen=True, slots=True)
class Shape:
    """A launch configuration. `dot`: on the tensor cores (any rows), else by plain sums (one row)."""

    block_n: int
    block_k: int
    warps: int
    stages: int
    splits: int = 1
    dot: bool = True
    swap: bool = False  # weights as the left operand: needs block_n of 64 or more to be worth it
    pdl: bool = False  # start while the previous kernel drains; every kernel of such a chain must wait as this one does
    lines: int = 0  # with pdl: how many 128-byte lines of each weight row to ask for before waiting
    ahead: bool = False  # one row: the first weights are loaded before waiting, the next while these are multiplied
    early: int = 0  # with dot: columns of a program's share that are loaded before waiting and multiplied last


@triton.jit
def _epilogue(
    acc, y, residual, bias, rows, columns, keep, n, stride_y, stride_r, BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """acc [M, N] plus bias and residual, stored at rows [M, 1] and columns [1, N]."""
    if BIAS:
        acc += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + rows * stride_r + columns, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + rows * stride_y + columns, acc.to(y.dtype.element_ty), mask=keep)


@triton.jit
def store_part(where, acc, keep):
    """Parts are read by the next kernel and written again by the next product: weights that pass through the L2 must not
    push them out to memory, which costs sixteen rows 4% of their time."""
    tl.store(where, acc, mask=keep, eviction_policy="evict_last")


INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def sixteenth(values):
    """bf16 numbers as a sixteenth of themselves in fp16. Exact: only the exponent changes."""
    if INTERPRETED:  # which cannot multiply bf16
        return (values.to(tl.float32) * 0.0625).to(tl.float16)
    return (values * 0.0625).to(tl.float16)  # written in float32, LLVM would convert to fp16 first, and overflow


@triton.jit
def _prefetch(w_row, n, stride_w, BLOCK_N: tl.constexpr, LINES: tl.constexpr, GATE: tl.constexpr):
    """Ask the L2 for the first LINES * 128 bytes of each weight row; w_row: pointers [BLOCK_N]."""
    width: tl.constexpr = 1024 // w_row.dtype.element_ty.primitive_bitwidth  # elements in a line
    lines = w_row[:, None] + tl.arange(0, LINES)[None, :] * width
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
    if GATE:
        lines += n.to(tl.int64) * stride_w
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@triton.jit
def _tile(w, inner, last, EVEN: tl.constexpr):
    """Weights [BLOCK_N, BLOCK_K] from row pointers w."""
    if EVEN:
        return tl.load(w[:, None] + inner[None, :])
    return tl.load(w[:, None] + inner[None, :], mask=(inner < last)[None, :], other=0.0)


@triton.jit
def _rows(x, row, inner, m, last, stride_x, EVEN: tl.constexpr, HALF: tl.constexpr):
    """Columns `inner` of the rows there are, zeros for the others."""
    inside = (row < m)[:, None]
    if not EVEN:
        inside = inside & (inner < last)[None, :]
    values = tl.load(x + row[:, None] * stride_x + inner[None, :], mask=inside, other=0.0)
    if HALF:
        values = sixteenth(values)
    return values


@triton.jit
def _later(values):
    """The same 16-bit numbers, behind what the compiler cannot see through: it would wait for them where they are loaded."""
    if INTERPRETED:
        return values
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2)


@triton.jit
def _multiply(acc, tile, values, EIGHT: tl.constexpr, SWAP: tl.constexpr):
    if not EIGHT:
        tile = tile.to(values.dtype)
    if SWAP:
        acc = tl.dot(tile, tl.trans(values), acc)
    else:
        acc = tl.dot(values, tl.trans(tile), acc)
    return acc


@Launcher
@triton.jit(do_not_specialize=["m"])
def _dot(
    x, w, y, residual, bias, w_scale, x_scale, part, m, n, k, stride_x, stride_w, stride_y, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, EIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    SWAP: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr, EVEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    split = tl.program_id(0)  # programs that run side by side read the same rows of weights
    col = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    share = tl.cdiv(tl.cdiv(k, BLOCK_K), SPLITS) * BLOCK_K
    first = split * share
    last = tl.minimum(k, first + share)
    w_row = w + tl.where(col < n, col, 0).to(tl.int64) * stride_w  # a row past the end reads row 0, and is not stored
    if EARLY:
        rest = first + share - EARLY + tl.arange(0, EARLY)
        last -= EARLY
        early = _tile(w_row, rest, k, EVEN)
    elif PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL:
        if LINES:
            _prefetch(w_row + first, n, stride_w, BLOCK_N, LINES, GATE)
        tl.extra.cuda.gdc_wait()
    if EARLY:
        if PDL:  # only now: the next kernel's programs would wait in places that this one's are meant for
            tl.extra.cuda.gdc_launch_dependents()
        beside = _rows(x, row, rest, m, k, stride_x, EVEN, HALF)
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for at in range(first, last, BLOCK_K):
        inner = at + lane
        values = _rows(x, row, inner, m, last, stride_x, EVEN, HALF)
        acc = _multiply(acc, _tile(w_row, inner, last, EVEN), values, EIGHT, SWAP)
        if GATE:
            up = _multiply(up, _tile(w_row + n.to(tl.int64) * stride_w, inner, last, EVEN), values, EIGHT, SWAP)
    if EARLY:
        acc = _multiply(acc, early, _later(beside), EIGHT, SWAP)
    if SWAP:
        acc = tl.trans(acc)
        up = tl.trans(up)
    if SCALED:
        acc *= tl.load(w_scale + col, mask=col < n, other=0.0)[None, :]
        if GATE:
            up *= tl.load(w_scale + n + col, mask=col < n, other=0.0)[None, :]
    if HALF:
        acc *= 16.0
        up *= 16.0
    if EIGHT:
        own = tl.load(x_scale + row, mask=row < m, other=0.0)[:, None]
        acc *= own
        up *= own
    keep = (row < m)[:, None] & (col < n)[None, :]
    if SPLITS > 1:
        store_part(part + (split * m + row[:, None]) * n + col[None, :], acc, keep)
    else:
        if GATE:
            acc = gate(acc, up, GATE)
        _epilogue(acc, y, residual, bias, row[:, None], col[None, :], keep, n, stride_y, stride_r, BIAS, RESIDUAL)


@Launcher
@triton.jit(do_not_specialize=["m"])
def _sum_parts(
    part, y, residual, bias, m, n, stride_y, stride_r, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.static_range(SPLITS):
        acc += tl.load(part + (i * m + row) * n + col, mask=col < n, other=0.0)
    _epilogue(acc, y, residual, bias, row, col, col < n, n, stride_y, stride_r, BIAS, RESIDUAL)


@triton.jit
def _one_row(x, norm, inner, k, squares, NORM: tl.constexpr):
    """Columns `inner` of the row, times the norm's gain; its squares are added up on the way."""
    values = tl.load(x + inner, mask=inner < k, other=0.0).to(tl.float32)
    if NORM:
        squares += values * values
        gain = tl.load(norm + inner, mask=inner < k, other=0.0).to(tl.float32)
        values = (values * gain).to(x.dtype.element_ty).to(tl.float32)
    return values, squares


@Launcher
@triton.jit
def _vector(
    x, w, y, residual, bias, w_scale, norm, n, k, eps, stride_w, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr, LINES: tl.constexpr, EVEN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One row: products are summed where they are loaded, across threads once at the end. AHEAD: k, and the loop is unrolled."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    w_row = w + tl.where(col < n, col, 0).to(tl.int64) * stride_w
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            _prefetch(w_row, n, stride_w, BLOCK_N, LINES, GATE)
    if AHEAD:
        tile = _tile(w_row, lane, k, EVEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    if AHEAD:
        for at in tl.static_range(0, AHEAD, BLOCK_K):
            inner = at + lane
            if at + BLOCK_K < AHEAD:
                after = _tile(w_row, inner + BLOCK_K, k, EVEN)
            values, squares = _one_row(x, norm, inner, k, squares, NORM)
            acc += tile.to(tl.float32) * values[None, :]
            if at + BLOCK_K < AHEAD:
                tile = after
    else:
        for at in range(0, k, BLOCK_K):
            inner = at + lane
            tile = _tile(w_row, inner, k, EVEN)
            if GATE:
                other = _tile(w_row + n.to(tl.int64) * stride_w, inner, k, EVEN)
            values, squares = _one_row(x, norm, inner, k, squares, NORM)
            acc += tile.to(tl.float32) * values[None, :]
            if GATE:
                up += other.to(tl.float32) * values[None, :]
    total = tl.sum(acc, 1)
    if SCALED:
        total *= tl.load(w_scale + col, mask=col < n, other=0.0)
    if NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / k + eps)
        total *= factor
    if GATE:
        second = tl.sum(up, 1)
        if SCALED:
            second *= tl.load(w_scale + n + col, mask=col < n, other=0.0)
        if NORM:
            second *= factor
        total = gate(total, second, GATE)
    _epilogue(total, y, residual, bias, 0, col, col < n, n, 0, 0, BIAS, RESIDUAL)


def skinny(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    shape: Shape,
    *,
    w_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    act: str = "",
    part: torch.Tensor | None = None,
    add_parts: bool = True,
) -> None:
    """y [m, n] = x [m, k] @ w [n, k].T, with w [2n, k] where there is an `act` of gates.py (gates first). `residual` may
    be y itself.

    w_scale is one float32 a channel. x is fp8 where w is and x_scale gives one float32 a row, else bf16 or fp16 (fp16
    is the partner that fp8 weights are multiplied with: e4m3 becomes fp16 in one instruction, bf16 in many). `part` [splits, m, n] float32
    holds partial sums where the shape has splits; add_parts=False leaves them there (y, bias and residual are the
    reader's). An activation needs all of k in one program, and the norm a shape for one row.
    """
    m, k = x.shape
    n = y.shape[1]
    if w.shape != ((2 * n if act else n), k) or y.shape[0] != m:
        raise ValueError(f"skinny product of x {list(x.shape)}, w {list(w.shape)} into y {list(y.shape)}")
    if shape.splits > 1 and (act or part is None or not shape.dot):
        raise ValueError("a split sum needs the partial sums' space, and takes no activation or single row")
    if x_scale is not None and not shape.dot:
        raise ValueError("rows of fp8 need the tensor cores: a shape with dot")
    if shape.ahead and (shape.dot or act):
        raise ValueError("weights are loaded ahead for one row, and one product of it")
    share, uneven = divmod(k, shape.splits)
    steps = share - shape.early  # columns of them
    if shape.early and (not shape.dot or act or x_scale is not None or uneven or steps <= 0 or steps % shape.block_k):
        raise ValueError("columns are loaded early for half floats, one product, and equal parts of whole steps")
    if norm is not None and shape.dot:
        raise ValueError("the norm on the way in is for one row: normalize first")
    flags = {
        "GATE": KINDS[act],
        "SCALED": w_scale is not None,
        "PDL": shape.pdl,
        "LINES": shape.lines,
    }
    ends = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    res, b = x if residual is None else residual, x if bias is None else bias
    scales, gains = x if w_scale is None else w_scale, x if norm is None else norm
    launch: dict[str, object] = {"num_warps": shape.warps, "num_stages": shape.stages}
    if shape.pdl:
        launch["launch_pdl"] = True
    if not shape.dot:
        if m != 1:
            raise ValueError(f"the plain kernel takes one row, not {m}")
        _vector[(triton.cdiv(n, shape.block_n),)](
            x, w, y, res, b, scales, gains, n, k, eps, w.stride(0), BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
            NORM=norm is not None, EVEN=k % shape.block_k == 0, AHEAD=k if shape.ahead else 0, **flags, **ends, **launch,
        )  # fmt: skip
        return
    single = shape.splits == 1
    first_ends = ends if single else {"BIAS": False, "RESIDUAL": False}
    _dot[(shape.splits, triton.cdiv(n, shape.block_n))](
        x, w, y, res, b, scales, x if x_scale is None else x_scale, y if part is None else part, m, n, k,
        x.stride(0), w.stride(0), y.stride(0), res.stride(0), BLOCK_M=triton.next_power_of_2(max(16, m)),
        BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
        SPLITS=shape.splits, SWAP=shape.swap, EIGHT=x_scale is not None,
        HALF=x.dtype == torch.bfloat16 and w.dtype == torch.float8_e4m3fn,
        EVEN=k % (shape.block_k * shape.splits) == 0, EARLY=shape.early, **flags, **first_ends, **launch,
    )  # fmt: skip
    if not single and add_parts:
        _sum_parts[(triton.cdiv(n, 512), m)](
            part, y, res, b, m, n, y.stride(0), res.stride(0), BLOCK_N=512, SPLITS=shape.splits, num_warps=4, **ends
        )
