"""Activations of gated MLPs: behind a product, and over a fused gate/up projection, with fp8 rows for the down projection if asked.

`KINDS` numbers them by the names of backends/elementwise.py. One that is not here is computed by torch, after the product.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.attention import tanh
from quire.backends.cuda.kernels.fp8 import grouped_codes
from quire.backends.cuda.kernels.launch import Launcher

FP8_MAX = tl.constexpr(448.0)
KINDS = {"": 0, "swiglu": 1, "geglu": 2}


@triton.jit
def gate(gates, up, KIND: tl.constexpr):
    """The activation of that number."""
    if KIND == 2:
        return 0.5 * gates * (1.0 + tanh(0.7978845608028654 * (gates + 0.044715 * gates * gates * gates))) * up
    return gates * (1.0 / (1.0 + tl.exp(-gates))) * up


@Launcher
@triton.jit(do_not_specialize=["stride_g"])
def _gated_rows(
    x, out, scales, width, stride_x, stride_o, stride_g, BLOCK: tl.constexpr, QUANT: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = lane < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    gates = tl.load(x + row * stride_x + lane, mask=keep, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride_x + width + lane, mask=keep, other=0.0).to(tl.float32)
    value = gate(gates, up, KIND)
    if QUANT == 2:
        first = tl.program_id(1) * BLOCK
        value = grouped_codes(value, scales + first // 128 * stride_g, row, width - first, stride_g, BLOCK)
    elif QUANT == 1:
        scale = tl.maximum(tl.max(tl.abs(value), 0), 1e-10) / FP8_MAX
        tl.store(scales + row, scale)
        value = value / scale  # 448 at most, to within a rounding that e4m3 does not see; a NaN stays one
    tl.store(out + row * stride_o + lane, value.to(out.dtype.element_ty), mask=keep)


def gated_rows(
    x: torch.Tensor,
    out: torch.Tensor,
    act: str,
    *,
    scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [T, d] = act(x[:, :d], x[:, d:]); with `scales` [T] float32, out is fp8 e4m3 and out * scales the value;
    with scales [d / 128, T] there is one for each 128 columns.
    """
    tokens, width = out.shape
    if x.shape != (tokens, 2 * width):
        raise ValueError(f"{act} of {list(x.shape)} into {list(out.shape)}")
    grouped = scales is not None and scales.ndim == 2
    whole = scales is not None and not grouped  # the scale needs the row's largest value
    block = triton.next_power_of_2(width) if whole else max(128, min(1024, triton.next_power_of_2(width)))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _gated_rows[(tokens, 1 if whole else triton.cdiv(width, block))](
        x, out, x if scales is None else scales, width, x.stride(0), out.stride(0), scales.stride(0) if scales is not None and grouped else 0,
        BLOCK=block, QUANT=2 if grouped else int(whole), KIND=KINDS[act], PDL=pdl,
        num_warps=max(1, min(16, block // 512)) if whole else 4, **launch,
    )  # fmt: skip
