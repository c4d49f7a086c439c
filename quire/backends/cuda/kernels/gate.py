"""A row times a function of another, elementwise: x * sigmoid(gate), or silu(gate) * x where the two are not one product."""

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
def _gate(
    x, gate, out, width, stride_x, stride_g, stride_o, SILU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = lane < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride_x + lane, mask=keep, other=0.0).to(tl.float32)
    by = tl.load(gate + row * stride_g + lane, mask=keep, other=0.0).to(tl.float32)
    open_by = 1.0 / (1.0 + tl.exp(-by))
    if SILU:
        open_by = by * open_by
    tl.store(out + row * stride_o + lane, (value * open_by).to(out.dtype.element_ty), mask=keep)


def gate(
    x: torch.Tensor, by: torch.Tensor, out: torch.Tensor, *, silu: bool = False, pdl: bool = False
) -> torch.Tensor:
    """out [T, d] = x * sigmoid(by), or x * silu(by); returns out."""
    tokens, width = out.shape
    if x.shape != out.shape or by.shape != out.shape:
        raise ValueError(f"{list(x.shape)} gated by {list(by.shape)} into {list(out.shape)}")
    if tokens:
        block = min(1024, triton.next_power_of_2(width))
        launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
        _gate[(tokens, triton.cdiv(width, block))](
            x, by, out, width, x.stride(0), by.stride(0), out.stride(0), SILU=silu, BLOCK=block, PDL=pdl, num_warps=4,
            **launch,
        )  # fmt: skip
    return out
