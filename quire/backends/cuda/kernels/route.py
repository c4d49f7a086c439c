"""Routing: the experts of each row, and the pairs of (row, choice) in the order of experts, in two launches and without the
host.

`route` is one program a row: scores, groups, and the highest in turn, of two equal ones the lower number. Experts are
written in ascending order, with what each counts. `place` is one program an expert: it counts the pairs of those before
it, and writes down where its own are, in their order. Both give the same result whatever runs beside them.
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
from quire.layouts import Routing

_CHUNK, _MORE = 1024, 8192  # pairs that are looked at at once: of few, and of many


@Launcher
@triton.jit
def _route(
    logits, bias, experts, shares, scale, stride_l, GROUPS: tl.constexpr, RUN: tl.constexpr, GROUPS_PAD: tl.constexpr,
    RUN_PAD: tl.constexpr, TOP: tl.constexpr, TOP_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, PAIR: tl.constexpr,
    RENORMALIZE: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    run = tl.arange(0, GROUPS_PAD)
    lane = tl.arange(0, RUN_PAD)[None, :]
    expert = run[:, None] * RUN + lane
    real = (run < GROUPS)[:, None] & (lane < RUN)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits + row * stride_l + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = tl.where(real, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    else:
        weight = tl.exp(x - tl.max(tl.max(x, 1), 0))
        score = weight / tl.sum(tl.sum(weight, 1), 0)
    ranked = score
    if BIAS:
        ranked += tl.load(bias + expert, mask=real, other=0.0)
    ranked = tl.where((ranked == ranked) & real, ranked, float("-inf"))  # what is no number is chosen last
    free = real
    if GROUPS > 1:
        worth = tl.max(ranked, 1)
        if PAIR:
            first = tl.min(tl.where(ranked == worth[:, None], lane, RUN_PAD), 1)
            worth += tl.max(tl.where(lane == first[:, None], float("-inf"), ranked), 1)
        kept = run < 0
        for _ in tl.static_range(TOP_GROUPS):
            may = (run < GROUPS) & (kept == 0)
            best = tl.max(tl.where(may, worth, float("-inf")), 0)
            kept = kept | (run == tl.min(tl.where(may & (worth == best), run, GROUPS_PAD), 0))
        free = free & kept[:, None]
    chosen = expert < 0
    for _ in tl.static_range(TOP):
        may = free & (chosen == 0)
        value = tl.where(may, ranked, float("-inf"))
        best = tl.max(tl.max(value, 1), 0)
        at = tl.min(tl.min(tl.where(may & (value == best), expert, GROUPS_PAD * RUN_PAD), 1), 0)
        chosen = chosen | ((expert == at) & real)
    share = tl.where(chosen, score, 0.0)
    if RENORMALIZE:
        share = share / (tl.sum(tl.sum(share, 1), 0) + 1e-20)
    share = share * scale
    flat = tl.reshape(chosen.to(tl.int32), [GROUPS_PAD * RUN_PAD])
    order = row * TOP + tl.cumsum(flat, 0) - 1
    tl.store(experts + order, tl.reshape(expert, [GROUPS_PAD * RUN_PAD]), mask=flat != 0)
    tl.store(shares + order, tl.reshape(share, [GROUPS_PAD * RUN_PAD]), mask=flat != 0)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    experts: torch.Tensor,
    shares: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Fill experts int32 [T, top], ascending in each row, and shares float32 [T, top] from logits [T, E]."""
    rows, count = logits.shape
    run = count // routing.groups
    if experts.shape != (rows, routing.top) or count % routing.groups or logits.stride(1) != 1:
        raise ValueError(f"routing of logits {list(logits.shape)} into {list(experts.shape)}")
    pads = triton.next_power_of_2(routing.groups), triton.next_power_of_2(run)
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _route[(rows,)](
        logits, logits if bias is None else bias, experts, shares, routing.scale, logits.stride(0),
        GROUPS=routing.groups, RUN=run, GROUPS_PAD=pads[0], RUN_PAD=pads[1], TOP=routing.top,
        TOP_GROUPS=routing.top_groups, SIGMOID=routing.sigmoid, PAIR=routing.pair and run > 1,
        RENORMALIZE=routing.renormalize, BIAS=bias is not None, PDL=pdl, num_warps=1, **launch,
    )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _place(experts, order, starts, pairs, CHUNK: tl.constexpr, PDL: tl.constexpr):
    own = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    below = tl.zeros([CHUNK], tl.int32)
    for first in range(0, pairs, CHUNK):
        below += (tl.load(experts + first + lane, mask=first + lane < pairs, other=2147483647) < own).to(tl.int32)
    at = tl.sum(below, 0)
    tl.store(starts + own, at)
    if own == tl.num_programs(0) - 1:
        tl.store(starts + own + 1, pairs)
    for first in range(0, pairs, CHUNK):
        hit = tl.load(experts + first + lane, mask=first + lane < pairs, other=2147483647) == own
        rank = tl.cumsum(hit.to(tl.int32), 0)
        tl.store(order + at + rank - 1, first + lane, mask=hit)
        at += tl.max(rank, 0)


def place(experts: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, *, pdl: bool = False) -> None:
    """Pairs by expert: order int32 [P] names them, those of expert e at starts[e] .. starts[e + 1]; starts int32 [E + 1]."""
    pairs = experts.numel()
    many = pairs > 8 * _CHUNK
    chunk = _MORE if many else min(_CHUNK, max(32, triton.next_power_of_2(pairs)))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _place[(starts.shape[0] - 1,)](
        experts, order, starts, pairs, CHUNK=chunk, PDL=pdl, num_warps=8 if many else 4, **launch
    )
