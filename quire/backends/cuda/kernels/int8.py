"""int8 weights for many rows: rows rounded to int8 each by its own largest number, an integer product, and its scales.

The product is exact in int32 (127 * 127 * k stays inside it for any k that a model has); only the rounding of the rows
is lost. Few rows are multiplied as they are, by `skinny`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 2048  # rows of a product at a time: its int32 sums are twice the size of its result


@triton.jit
def _quantize_rows(x, out, scales, width, stride_x, stride_o, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride_x + lane, mask=lane < width, other=0.0).to(tl.float32)
    # Anything times zero is zero, unless it is not finite: then so is the sum, and the scale no number.
    scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-30) / 127.0 + tl.sum(value * 0.0, 0)
    tl.store(scales + row, scale)
    code = tl.floor(value / scale + 0.5)
    tl.store(out + row * stride_o + lane, code.to(tl.int8), mask=lane < width)


@triton.jit
def _rescale(acc, y, x_scale, w_scale, bias, n, stride_a, stride_y, BLOCK: tl.constexpr, BIAS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = col < n
    value = tl.load(acc + row * stride_a + col, mask=keep, other=0).to(tl.float32)
    value = value * tl.load(x_scale + row) * tl.load(w_scale + col, mask=keep, other=0.0)
    if BIAS:
        value += tl.load(bias + col, mask=keep, other=0.0).to(tl.float32)
    tl.store(y + row * stride_y + col, value.to(y.dtype.element_ty), mask=keep)


def int8_product(
    x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, y: torch.Tensor, *, bias: torch.Tensor | None = None
) -> None:
    """y [m, n] = x [m, k] @ (w [n, k] * w_scale).T (+ bias), with more than 16 rows; k and n multiples of 8."""
    m, k = x.shape
    n = w.shape[0]
    if m <= 16 or k % 8 or n % 8 or w.shape[1] != k or y.shape != (m, n):
        raise ValueError(f"int8 product of x {list(x.shape)}, w {list(w.shape)} into y {list(y.shape)}")
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _quantize_rows[(m,)](
        x, codes, scales, k, x.stride(0), codes.stride(0), BLOCK=block, num_warps=max(1, min(16, block // 512))
    )
    step = -(-m // -(-m // _ROWS))  # even parts: none may be smaller than 17 rows
    for first in range(0, m, step):
        part = slice(first, first + step)
        acc, out = torch._int_mm(codes[part], w.t()), y[part]
        _rescale[(acc.shape[0], triton.cdiv(n, 1024))](
            acc, out, scales[part], w_scale, acc if bias is None else bias, n, acc.stride(0), out.stride(0),
            BLOCK=1024, BIAS=bias is not None, num_warps=4,
        )  # fmt: skip
