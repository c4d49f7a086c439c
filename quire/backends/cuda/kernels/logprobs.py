"""Log probabilities of chosen tokens, their ranks, and the best few of each row: of the logits as the model gave.

The order is the host's: the larger number first, of equal numbers the smaller id. Sums are float32 in a fixed order
inside a chunk, float64 across chunks.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.candidates import CAP, Found, chunk_scores, find_candidates, find_peaks, row_peak

_BLOCK = tl.constexpr(4096)


@triton.jit
def _ranks(logits, tokens, ranks, vocab, chunks, stride):
    row = tl.program_id(0)
    value, ids = chunk_scores(logits, row, vocab, stride)
    token = tl.maximum(tl.load(tokens + row), 0)
    own = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
    before = (value > own) | ((value == own) & (ids < token))
    tl.store(ranks + row * chunks + tl.program_id(1), tl.sum((before & (ids < vocab)).to(tl.int32), 0))


@triton.jit
def _finish(
    logits, tokens, peaks, masses, ranks, sizes, cand_ids, cand_scores, out, vocab, chunks, top, stride, stride_out,
    CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    lane = tl.arange(0, CHUNKS_PAD)
    inside = lane < chunks
    peak = row_peak(peaks, row, chunks, CHUNKS_PAD)
    best = tl.load(peaks + row * chunks + lane, mask=inside, other=float("-inf"))
    mass = tl.load(masses + row * chunks + lane, mask=inside, other=0.0).to(tl.float64)
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


def logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, out: torch.Tensor, found: Found, wishes: torch.Tensor
) -> None:
    """out float64 [n, 2 + 2 * top]: log probability and rank of each row's token, then the `top` best's ids and values.

    wishes float64 [5, n] is scratch the call fills: the parameters that make "the best few" of the candidate passes. A
    row that is not numbers gives NaN.
    """
    rows, vocab = logits.shape
    if out.shape != (rows, 2 + 2 * top) or top > CAP.value:
        raise ValueError(f"log probabilities of {rows} rows and {top} alternatives into {list(out.shape)}")
    wishes[0].fill_(1.0)
    wishes[1].fill_(float(max(top, 1)))
    wishes[2].fill_(1.0)
    wishes[3].fill_(0.0)
    find_peaks(logits, wishes[0], found)
    wanted = wishes[4].view(torch.int32)[:rows]
    wanted.fill_(1)
    if top:
        find_candidates(logits, wishes[0], wanted, wishes[1], wishes[2], wishes[3], found)
    ranks = found.places  # taken: the best places are not looked at here
    _ranks[(rows, found.chunks)](logits, tokens, ranks, vocab, found.chunks, logits.stride(0), num_warps=8)
    _finish[(rows,)](
        logits, tokens, found.peaks, found.masses, ranks, found.sizes, found.ids, found.scores, out, vocab,
        found.chunks, top, logits.stride(0), out.stride(0), CHUNKS_PAD=triton.next_power_of_2(found.chunks),
        num_warps=8,
    )  # fmt: skip
