"""Merges the parts of attention results, in the order of the parts.

Knows rows, heads and parts, not where they came from: context splits and shared prefixes end here alike. `combine` goes by
log-sum-exp, all parts at once. `combine_in_order` takes one after another, with the operations that a program uses which
walks them all itself. A part with lse = -inf saw nothing; its numbers are never read.
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
from quire.backends.cuda.kernels.programs import LOG2E

_AHEAD = 8  # parts that are loaded before the first of them is merged


@dataclass(frozen=True, slots=True)
class Workspace:
    """The memory where parts of a context leave their results before they are merged."""

    part: torch.Tensor  # [tokens, heads, parts, head_dim] float32
    lse: torch.Tensor  # [tokens, heads, parts] float32, base 2; for parts at fixed positions their peak
    sums: torch.Tensor | None = None  # [tokens, heads, parts] float32: the sum of weights, for parts at fixed positions

    @property
    def parts(self) -> int:
        return self.lse.shape[2]


# Multiply-adds are explicit in these two, so that no compiler can round one place of use otherwise than another.
@triton.jit
def merge(acc, peak, total, next_acc, next_peak, next_total):
    """Weighted values [M, D], peaks [M] (base 2) and sums of weights [M] of a context, and of what follows it."""
    new = tl.maximum(peak, next_peak)
    base = tl.where(new == float("-inf"), 0.0, new)
    fade = tl.exp2(peak - base)
    share = tl.exp2(next_peak - base)
    total = tl.fma(total, fade, next_total * share)
    acc = tl.fma(acc, fade[:, None], next_acc * share[:, None])
    return acc, new, total


@triton.jit
def with_sink(acc, peak, total, sink):
    """Add an attention sink: one more key, that has weight and no value."""
    new = tl.maximum(peak, sink)
    fade = tl.exp2(peak - new)
    return acc * fade[:, None], new, tl.fma(total, fade, tl.exp2(sink - new))


@Launcher
@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=["pos"])
def _combine_in_order(
    part, peaks, sums, out, sinks, pos, parts, stride_ot, stride_oh, HEADS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr, SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, D_PAD)[None, :]
    one = tl.arange(0, 1)
    live = tl.minimum(tl.load(pos + row) // SPLIT + 1, parts)
    place = (row.to(tl.int64) * HEADS + head) * parts + one
    acc = tl.zeros([1, D_PAD], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, live, AHEAD):
        for i in tl.static_range(AHEAD):
            at = place + first + i
            next_peak = tl.load(peaks + at, mask=first + i + one < live, other=float("-inf"))
            seen = next_peak > float("-inf")
            next_total = tl.load(sums + at, mask=seen, other=0.0)
            next_acc = tl.load(part + at[:, None] * D + dims, mask=seen[:, None] & (dims < D), other=0.0)
            acc, peak, total = merge(acc, peak, total, next_acc, next_peak, next_total)
    if SINKS:
        acc, peak, total = with_sink(acc, peak, total, tl.load(sinks + head + one).to(tl.float32) * LOG2E)
    factor = tl.where(total > 0.0, 1.0 / total, 0.0)
    acc = acc * factor[:, None]
    where = out + row.to(tl.int64) * stride_ot + head * stride_oh + dims
    tl.store(where, acc.to(out.dtype.element_ty), mask=dims < D)


def combine_in_order(
    space: Workspace,
    out: torch.Tensor,
    *,
    pos: torch.Tensor,
    split_len: int,
    sinks: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Fill `out` [T, H, D] from parts that start at the multiples of split_len; row t has seen tokens 0 .. pos[t]."""
    heads, dim = out.shape[1], out.shape[2]
    assert space.sums is not None  # who cuts at fixed positions has them
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _combine_in_order[(out.shape[0], heads)](
        space.part, space.lse, space.sums, out, space.lse if sinks is None else sinks, pos, space.parts,
        out.stride(0), out.stride(1), HEADS=heads, D=dim, D_PAD=triton.next_power_of_2(dim), SPLIT=split_len,
        AHEAD=_AHEAD, SINKS=sinks is not None, PDL=pdl, num_warps=1, **launch,
    )  # fmt: skip


@Launcher
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
