"""Products with 4-bit affine weights for one to 64 rows: w = scale[group] * code + zero[group].

Codes lie in pairs of groups: the byte at column j of a pair holds code j of its first group in the low half and code j
of its second in the high half, so that unpacking is a mask and a shift and each half is one product with one scale a
channel. A code becomes a float by setting its bits into the mantissa of 128 (bf16) or 1024 (fp16); what that adds is
taken off with the zero, by the sum of x over the group.
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
from quire.backends.cuda.kernels.skinny import Shape, _epilogue, _prefetch, _sum_parts, store_part
from quire.backends.torch.quantized import pack as pack
from quire.backends.torch.quantized import unpack as unpack


@triton.jit
def _as_float(code, like: tl.constexpr):
    """code + 128 in bf16, code + 1024 in fp16: exact, and no conversion."""
    wide = code.to(tl.uint16)
    if like == tl.bfloat16:
        value = (wide | 0x4300).to(tl.bfloat16, bitcast=True)
    else:
        value = (wide | 0x6400).to(tl.float16, bitcast=True)
    return value


@triton.jit
def _pair(
    acc,
    w_row,
    scale,
    zero,
    x_low,
    x_high,
    sum_low,
    sum_high,
    at,
    col,
    n,
    stride_s,
    GROUP: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Add one pair of groups to acc [M, N]. `at` is its first column; x [M, GROUP], sums [M]."""
    lane = tl.arange(0, GROUP)
    code = tl.load(w_row[:, None] + (at // 2 + lane)[None, :])
    if SWAP:
        low = tl.trans(tl.dot(_as_float(code & 15, x_low.dtype), tl.trans(x_low)))
        high = tl.trans(tl.dot(_as_float(code >> 4, x_low.dtype), tl.trans(x_high)))
    else:
        low = tl.dot(x_low, tl.trans(_as_float(code & 15, x_low.dtype)))
        high = tl.dot(x_high, tl.trans(_as_float(code >> 4, x_low.dtype)))
    first = at // GROUP * stride_s + col
    s_low = tl.load(scale + first, mask=col < n, other=0.0).to(tl.float32)
    s_high = tl.load(scale + first + stride_s, mask=col < n, other=0.0).to(tl.float32)
    magic: tl.constexpr = 128.0 if x_low.dtype == tl.bfloat16 else 1024.0
    z_low = tl.load(zero + first, mask=col < n, other=0.0).to(tl.float32) - magic * s_low
    z_high = tl.load(zero + first + stride_s, mask=col < n, other=0.0).to(tl.float32) - magic * s_high
    acc += low * s_low[None, :] + high * s_high[None, :]
    return acc + z_low[None, :] * sum_low[:, None] + z_high[None, :] * sum_high[:, None]


@Launcher
@triton.jit(do_not_specialize=["m"])
def _int4(
    x, w, y, residual, bias, scale, zero, part, m, n, k, stride_s, stride_x, stride_w, stride_y, stride_r,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, GATE: tl.constexpr,
    SWAP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, GROUP)
    share = tl.cdiv(k // (2 * GROUP), SPLITS) * 2 * GROUP
    first = tl.program_id(1) * share
    last = tl.minimum(k, first + share)
    w_row = w + tl.where(col < n, col, 0).to(tl.int64) * stride_w
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            _prefetch(w_row + first // 2, n, stride_w, BLOCK_N, LINES, GATE)
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_row = x + row[:, None] * stride_x
    for at in range(first, last, 2 * GROUP):
        x_low = tl.load(x_row + (at + lane)[None, :], mask=(row < m)[:, None], other=0.0)
        x_high = tl.load(x_row + (at + GROUP + lane)[None, :], mask=(row < m)[:, None], other=0.0)
        sum_low = tl.sum(x_low.to(tl.float32), 1)
        sum_high = tl.sum(x_high.to(tl.float32), 1)
        acc = _pair(acc, w_row, scale, zero, x_low, x_high, sum_low, sum_high, at, col, n, stride_s, GROUP, SWAP)
        if GATE:
            up = _pair(
                up, w_row + n.to(tl.int64) * stride_w, scale + n, zero + n, x_low, x_high, sum_low, sum_high, at, col,
                n, stride_s, GROUP, SWAP,
            )  # fmt: skip
    keep = (row < m)[:, None] & (col < n)[None, :]
    if SPLITS > 1:
        store_part(part + (tl.program_id(1) * m + row[:, None]) * n + col[None, :], acc, keep)
    else:
        if GATE:
            acc = gate(acc, up, GATE)
        _epilogue(acc, y, residual, bias, row[:, None], col[None, :], keep, n, stride_y, stride_r, BIAS, RESIDUAL)


def int4_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    y: torch.Tensor,
    shape: Shape,
    *,
    group: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    act: str = "",
    part: torch.Tensor | None = None,
    add_parts: bool = True,
) -> None:
    """y [m, n] = x [m, k] @ w.T, m up to 64; packed [n, k / 2] as `pack` makes it, scale and zero [k / group, n].

    With an `act` (see gates.py) the weights have 2n rows, gates first. The shape's block_k is not looked at: a step is
    a pair of groups.
    """
    m, k = x.shape
    n = y.shape[1]
    rows = packed.shape[0]
    if packed.shape != (2 * n if act else n, k // 2) or scale.shape != (k // group, rows) or k % (2 * group):
        raise ValueError(f"int4 product of x {list(x.shape)}, bytes {list(packed.shape)}, scales {list(scale.shape)}")
    if shape.splits > 1 and (act or part is None):
        raise ValueError("a split sum needs the partial sums' space, and takes no activation")
    single = shape.splits == 1
    ends = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    res, b = x if residual is None else residual, x if bias is None else bias
    launch: dict[str, object] = {"num_warps": shape.warps, "num_stages": shape.stages}
    if shape.pdl:
        launch["launch_pdl"] = True
    _int4[(triton.cdiv(n, shape.block_n), shape.splits)](
        x, packed, y, res, b, scale, zero, y if part is None else part, m, n, k, scale.stride(0), x.stride(0), packed.stride(0),
        y.stride(0), res.stride(0), BLOCK_M=triton.next_power_of_2(max(16, m)), BLOCK_N=shape.block_n, GROUP=group,
        SPLITS=shape.splits, GATE=KINDS[act], SWAP=shape.swap, PDL=shape.pdl, LINES=shape.lines,
        **(ends if single else {"BIAS": False, "RESIDUAL": False}), **launch,
    )  # fmt: skip
    if not single and add_parts:
        _sum_parts[(triton.cdiv(n, 512), m)](
            part, y, res, b, m, n, y.stride(0), res.stride(0), BLOCK_N=512, SPLITS=shape.splits, num_warps=4, **ends
        )
