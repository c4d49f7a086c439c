"""Log probabilities of chosen tokens, their ranks, and the best few of each row: of the logits as the model gave.

The order is the host's: the larger number first, of equal numbers the smaller id. Sums are float64,
in a fixed order.
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

from quire.backends.cuda.kernels.candidates import CAP, Found, chunk_scores, find_candidates, find_peaks, row_peak
from quire.backends.cuda.kernels.launch import Launcher

_BLOCK = tl.constexpr(4096)


@Launcher
@triton.jit(do_not_specialize_on_alignment=["logits", "tokens"])
def _ranks(logits, tokens, ranks, vocab, chunks, stride):
    row = tl.program_id(0)
    value, ids = chunk_scores(logits, row, vocab, stride)
    token = tl.maximum(tl.load(tokens + row), 0)
    own = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
    before = (value > own) | ((value == own) & (ids < token))
    tl.store(ranks + row * chunks + tl.program_id(1), tl.sum((before & (ids < vocab)).to(tl.int32), 0))


@Launcher
@triton.jit(
    do_not_specialize=["top", "stride_out"], do_not_specialize_on_alignment=["logits", "tokens"]
)  # fmt: skip
def _finish(
    logits, tokens, peaks, masses, ranks, sizes, cand_ids, cand_scores, out, vocab, chunks, top, stride, stride_out,
    CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNKS_PAD)
    inside = lane < chunks
    peak = row_peak(peaks, row, chunks, CHUNKS_PAD)
    best = tl.load(peaks + row * chunks + lane, mask=inside, other=float("-inf"))
    mass = tl.load(masses + row * chunks + lane, mask=inside, other=0.0)
    mass = tl.where(best == float("-inf"), 0.0, mass * tl.exp((best - peak).to(tl.float64)))
    total = peak.to(tl.float64) + tl.log(tl.sum(mass, 0))
    base = logits + row.to(tl.int64) * stride
    own = tl.load(base + tl.maximum(tl.load(tokens + row), 0)).to(tl.float64)
    rank = 1 + tl.sum(tl.load(ranks + row * chunks + lane, mask=inside, other=0), 0)
    target = out + row * stride_out
    good = (peak > float("-inf")) & (peak < float("inf"))
    bad = tl.full([], float("nan"), tl.float64)
    tl.store(target, tl.where(good, own - total, bad))
    tl.store(target + 1, rank.to(tl.float64))
    if top == 0:
        return
    size = tl.load(sizes + row)
    listed = size <= CAP
    if listed:
        source = cand_scores + row.to(tl.int64) * CAP
    else:
        source = base
        size = vocab
    last_value = tl.full([], float("inf"), tl.float32)
    last_place = tl.full([], -1, tl.int32)
    for i in range(top):  # the next after (last_value, last_place) in the order
        value = tl.full([], float("-inf"), tl.float32)
        place = tl.full([], 2147483647, tl.int32)
        for start in range(0, size, _BLOCK):
            at = start + tl.arange(0, _BLOCK)
            found = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
            after = (found < last_value) | ((found == last_value) & (at > last_place))
            found = tl.where(after & (at < size), found, float("-inf"))
            peak_here = tl.max(found, 0)
            place_here = tl.min(tl.where((found == peak_here) & after, at, 2147483647), 0)
            better = peak_here > value
            place = tl.where(better, place_here, place)
            value = tl.where(better, peak_here, value)
        last_value = value
        last_place = place
        token = place
        if listed:
            token = tl.load(cand_ids + row.to(tl.int64) * CAP + tl.minimum(place, CAP - 1))
        tl.store(target + 2 + i, token.to(tl.float64))
        tl.store(target + 2 + top + i, tl.where(good, value.to(tl.float64) - total, bad))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parameters that make "the best few" of the candidate passes: made once, the same for every row."""

    numbers: torch.Tensor  # float64 [3]: 1, how many, 0
    flag: torch.Tensor  # int32 [1]: 1


def wanted(top: int, device: torch.device | str) -> Wanted:
    numbers = torch.ones(3, dtype=torch.float64, device=device)
    numbers[1:2].fill_(float(max(top, 1)))
    numbers[2:3].fill_(0.0)
    return Wanted(numbers, torch.ones(1, dtype=torch.int32, device=device))


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, out: torch.Tensor, found: Found, constants: Wanted
) -> None:
    """out float64 [n, 2 + 2 * top]: log probability and rank of each row's token, then the `top` best's ids and values.

    `constants` is what `wanted(top)` made. A row that is not numbers gives NaN.
    """
    rows, vocab = logits.shape
    if out.shape != (rows, 2 + 2 * top) or top > CAP.value:
        raise ValueError(f"log probabilities of {rows} rows and {top} alternatives into {list(out.shape)}")
    one, few, nothing = (constants.numbers[i : i + 1].expand(rows) for i in range(3))
    find_peaks(logits, one, found)
    if top:
        find_candidates(logits, one, constants.flag.expand(rows), few, one, nothing, found)
    ranks = found.places  # taken: the best places are not looked at here
    _ranks[(rows, found.chunks)](logits, tokens, ranks, vocab, found.chunks, logits.stride(0), num_warps=8)
    _finish[(rows,)](
        logits, tokens, found.peaks, found.masses, ranks, found.sizes, found.ids, found.scores, out, vocab,
        found.chunks, top, logits.stride(0), out.stride(0), CHUNKS_PAD=triton.next_power_of_2(found.chunks),
        num_warps=8,
    )  # fmt: skip
