"""Norms of the equal parts of a row: RMSNorm by head, and LayerNorm of heads or whole rows.

A program has some parts of one row, each in registers. Whole rows of RMSNorm, with all that is fused into it, are norm.py.
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


@Launcher
@triton.jit
def _head_norm(
    x, weight, bias, out, heads, width, eps, stride_x, stride_o, stride_w, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    CENTRE: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    keep = (lane < width) & (head < heads)
    gain = tl.load(weight + head * stride_w + lane, mask=keep, other=0.0).to(tl.float32)
    if BIAS:
        shift = tl.load(bias + head * stride_w + lane, mask=keep, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride_x + head * width + lane, mask=keep, other=0.0).to(tl.float32)
    if CENTRE:
        value = tl.where(keep, value - (tl.sum(value, 1) / width)[:, None], 0.0)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value, 1) / width + eps))[:, None] * gain
    if BIAS:
        value += shift
    tl.store(out + row * stride_o + head * width + lane, value.to(out.dtype.element_ty), mask=keep)


def head_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    heads: int,
    bias: torch.Tensor | None = None,
    centre: bool = False,
    pdl: bool = False,
) -> None:
    """out [T, d] = the norm of each of the `heads` parts of x [T, d]; weight and bias [d / heads] or [d].

    With `centre` the mean is taken off first: LayerNorm.
    """
    tokens, columns = x.shape
    width = columns // heads
    if columns % heads or weight.shape[0] not in (width, columns) or (bias is not None and bias.shape != weight.shape):
        raise ValueError(f"a norm of {heads} parts of {list(x.shape)} with a weight {list(weight.shape)}")
    block = triton.next_power_of_2(width)
    some = max(1, min(triton.next_power_of_2(heads), 1024 // block))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _head_norm[(tokens, triton.cdiv(heads, some))](
        x, weight, x if bias is None else bias, out, heads, width, eps, x.stride(0), out.stride(0),
        0 if weight.shape[0] == width else width, HEADS=some, BLOCK=block, CENTRE=centre, BIAS=bias is not None, PDL=pdl,
        num_warps=max(1, min(16, some * block // 256)), **launch,
    )  # fmt: skip
