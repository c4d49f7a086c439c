"""cap * tanh(x / cap), for logits: one pass instead of three."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.attention import tanh
from quire.backends.cuda.kernels.launch import Launcher


@Launcher
@triton.jit
def _softcap(x, out, cap, width, stride_x, stride_o, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * stride_x + lane, mask=lane < width, other=0.0).to(tl.float32)
    tl.store(out + row * stride_o + lane, (tanh(value / cap) * cap).to(out.dtype.element_ty), mask=lane < width)


def softcap(x: torch.Tensor, out: torch.Tensor, cap: float, *, pdl: bool = False) -> None:
    """out [T, d] = cap * tanh(x / cap); out may be x."""
    rows, width = x.shape
    if rows == 0:
        return
    block = min(1024, triton.next_power_of_2(width))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _softcap[(triton.cdiv(width, block), rows)](
        x, out, cap, width, x.stride(0), out.stride(0), BLOCK=block, PDL=pdl, num_warps=4, **launch
    )
