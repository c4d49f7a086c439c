"""Residual + RMSNorm in one pass over a row, with the fp8 row that the next product wants where one is asked for.

One program a row, the whole row in registers: reads x and the residual once, writes the residual and the output once.
The sum is rounded to the residual's type before it is normalized, as a model that stores it would see it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.fp8 import grouped_codes
from quire.backends.cuda.kernels.launch import Launcher

FP8_MAX = tl.constexpr(448.0)  # e4m3


@Launcher
@triton.jit(do_not_specialize=["stride_g"])
def _rms_norm(
    x, residual, total, weight, out, scales, width, eps, stride_p, stride_x, stride_r, stride_o, stride_g, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, ADD: tl.constexpr, QUANT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    keep = lane < width
    gain = tl.load(weight + lane, mask=keep, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride_x + lane, mask=keep, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        value += tl.load(x + i * stride_p + row * stride_x + lane, mask=keep, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * stride_r + lane, mask=keep, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(total + row * stride_r + lane, rounded, mask=keep)
        value = rounded.to(tl.float32)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)) * gain
    if QUANT == 2:
        value = grouped_codes(value, scales, row, width, stride_g, BLOCK)
    elif QUANT == 1:
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / FP8_MAX
        tl.store(scales + row, scale)
        value = value / scale  # 448 at most, to within a rounding that e4m3 does not see; a NaN stays one
    tl.store(out + row * stride_o + lane, value.to(out.dtype.element_ty), mask=keep)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out = RMSNorm(x) * weight, per row of [T, d]; with `residual`, first residual += x, and that is normalized;
    with `total` beside it the sum goes there, and the residual stays.

    x may be [parts, T, d], the parts of a split product: they are added first, in their order. With `scales` [T]
    float32, out is fp8 e4m3 and out * scales the value; with scales [d / 128, T] there is one for each 128 columns.
    """
    tokens, width = x.shape[-2:]
    grouped = scales is not None and scales.ndim == 2
    block = triton.next_power_of_2(max(width, 128) if grouped else width)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _rms_norm[(tokens,)](
        x, x if residual is None else residual, x if residual is None else residual if total is None else total, weight, out, x if scales is None else scales, width, eps,
        x.stride(0), x.stride(-2), 0 if residual is None else residual.stride(0), out.stride(0),
        scales.stride(0) if scales is not None and grouped else 0, BLOCK=block,
        PARTS=x.shape[0] if x.ndim == 3 else 1, ADD=residual is not None, QUANT=2 if grouped else int(scales is not None), PDL=pdl,
        num_warps=max(1, min(16, block // 512)), **launch,
    )  # fmt: skip
