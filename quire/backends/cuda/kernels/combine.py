"""Merges the parts of attention results by their log-sum-exp, in the order of the parts.

Knows rows, heads and parts, not where they came from: context splits and shared prefixes end here alike. A part with
lse = -inf saw nothing; its numbers are never read.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["max_rows", "parts", "stride_parts"], do_not_specialize_on_alignment=["q_start"])
def _combine(
    part, lse, out, sinks, q_start, max_rows, parts, stride_parts, stride_ot, stride_oh, HEADS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, SINKS: tl.constexpr, PARTS_PAD: tl.constexpr, EVERY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if EVERY:
        row = tl.program_id(0)
    else:
        seq = tl.program_id(0)
        first = tl.load(q_start + seq)
        rows = tl.load(q_start + seq + 1) - first
        if (tl.program_id(1) >= rows) | (rows > max_rows):
            return
        row = first + tl.program_id(1)
    head = tl.program_id(2)
    lane = tl.arange(0, PARTS_PAD)
    dims = tl.arange(0, D_PAD)
    place = (row.to(tl.int64) * HEADS + head) * stride_parts
    weight = tl.load(lse + place + lane, mask=lane < parts, other=float("-inf"))
    peak = tl.max(weight, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    share = tl.exp2(weight - base)
    live = (weight > float("-inf"))[:, None] & (dims < D)[None, :]
    value = tl.load(part + (place + lane)[:, None] * D + dims[None, :], mask=live, other=0.0)
    acc = tl.sum(value * share[:, None], 0)
    total = tl.sum(share, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    acc = acc * tl.where(total > 0.0, 1.0 / total, 0.0)
    where = out + row.to(tl.int64) * stride_ot + head * stride_oh + dims
    tl.store(where, acc.to(out.dtype.element_ty), mask=dims < D)


def combine(
    part: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    *,
    parts: int,
    q_start: torch.Tensor | None = None,
    max_q: int = 0,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` [T, H, D]: every row, or with `q_start` those whose sequences have at most max_q rows."""
    heads, dim = out.shape[1], out.shape[2]
    grid = (out.shape[0], 1, heads) if q_start is None else (q_start.shape[0] - 1, max_q, heads)
    pad = next(p for p in (4, 16, triton.next_power_of_2(max(64, parts))) if parts <= p)  # few kernels to compile
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _combine[grid](
        part, lse, out, part if sinks is None else sinks, lse if q_start is None else q_start, max_q, parts,
        lse.shape[2],
        out.stride(0), out.stride(1), HEADS=heads, D=dim, D_PAD=triton.next_power_of_2(dim), SINKS=sinks is not None,
        PARTS_PAD=pad, EVERY=q_start is None, PDL=pdl,
        num_warps=max(1, min(8, pad * dim // 2048)), **launch,
    )  # fmt: skip
