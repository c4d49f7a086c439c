"""Finding the few tokens that matter in a row of scores over the vocabulary, in three passes and without a sort.

  peaks    each chunk's best score, its place, and its probability mass relative to that
  bins     how many tokens lie how far below the row's best, in steps of a quarter of a nat
  compact  the tokens of the bins that can matter, in the order of their ids

Counts decide which bins matter, so the choice is exact whatever the rounding: what `compact` leaves out could not have
been kept by top_k, top_p or min_p. Rows and chunks run side by side; nothing is added in an order that could change.
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

CHUNK = tl.constexpr(8192)
BINS = tl.constexpr(128)
STEPS = tl.constexpr(4.0)  # bins in a nat
CAP = tl.constexpr(4096)  # more candidates than this are read from the row itself


@triton.jit
def chunk_scores(scores, row, vocab, stride):
    """The scores of this program's chunk, -inf past the end, and their ids."""
    ids = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(scores + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    return value, ids


@triton.jit
def row_peak(peaks, row, chunks, CHUNKS_PAD: tl.constexpr):
    """The row's best score from those of its chunks."""
    lane = tl.arange(0, CHUNKS_PAD)
    return tl.max(tl.load(peaks + row * chunks + lane, mask=lane < chunks, other=float("-inf")), 0)


@triton.jit
def distance_bin(value, peak, temperature):
    """The distance of a score to the peak, in bins. Monotone, so equal scores share a bin."""
    far = (peak - value) / temperature * STEPS
    return tl.minimum(far, BINS - 1.0).to(tl.int32)


@Launcher
@triton.jit(do_not_specialize=["stride_t"], do_not_specialize_on_alignment=["scores", "temperatures"])
def _peaks(
    scores, temperatures, peaks, places, masses, vocab, chunks, stride, stride_t, MASS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    value, ids = chunk_scores(scores, row, vocab, stride)
    broken = tl.sum(((value != value) | (value == float("inf"))).to(tl.int32), 0) > 0
    peak = tl.max(tl.where(value != value, float("-inf"), value), 0)
    place = tl.min(tl.where(value == peak, ids, 2147483647), 0)
    at = row * chunks + tl.program_id(1)
    tl.store(peaks + at, tl.where(broken, float("inf"), peak))
    tl.store(places + at, place)
    if MASS:
        temperature = tl.load(temperatures + row * stride_t).to(tl.float32)
        temperature = tl.where(temperature > 0.0, temperature, 1.0)
        weight = tl.exp((value - tl.where(peak == float("-inf"), 0.0, peak)) / temperature)
        # Of thousands: in float32 the sum would move the borders between chunks.
        tl.store(masses + at, tl.sum(weight.to(tl.float64), 0))


@Launcher
@triton.jit(
    do_not_specialize=["stride_t", "stride_w"],
    do_not_specialize_on_alignment=["scores", "temperatures", "wanted"],
)  # fmt: skip
def _bins(
    scores, temperatures, wanted, peaks, counts, vocab, chunks, stride, stride_t, stride_w, CHUNKS_PAD: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(wanted + row * stride_w) == 0:
        return
    value, ids = chunk_scores(scores, row, vocab, stride)
    peak = row_peak(peaks, row, chunks, CHUNKS_PAD)
    temperature = tl.load(temperatures + row * stride_t).to(tl.float32)
    place = distance_bin(value, peak, temperature)
    seen = (ids < vocab) & (value > float("-inf"))
    count = tl.histogram(tl.where(seen, place, 0), BINS, mask=seen)
    lane = tl.arange(0, BINS)
    tl.store(counts + (row * chunks + tl.program_id(1)) * BINS + lane, count)


@Launcher
@triton.jit(
    do_not_specialize=["stride_t", "stride_w"],
    do_not_specialize_on_alignment=["scores", "temperatures", "wanted", "top_ks", "top_ps", "min_ps"],
)  # fmt: skip
def _compact(
    scores, temperatures, wanted, top_ks, top_ps, min_ps, peaks, counts, sizes, cand_ids, cand_scores, vocab, chunks,
    stride, stride_t, stride_w, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(wanted + row * stride_w) == 0:
        return
    chunk = tl.program_id(1)
    lane = tl.arange(0, CHUNKS_PAD)
    bin = tl.arange(0, BINS)
    count = tl.load(
        counts + (row * chunks + lane)[:, None] * BINS + bin[None, :], mask=(lane < chunks)[:, None], other=0
    )  # [chunks, BINS]
    held = tl.sum(count, 0)
    so_far = tl.cumsum(held, 0)
    k = tl.load(top_ks + row * stride_t).to(tl.int32)
    p = tl.load(top_ps + row * stride_t)
    minimum = tl.load(min_ps + row * stride_t).to(tl.float32)
    edge = tl.exp(-bin.to(tl.float32) / STEPS)  # the most that a token of the bin can weigh
    if k > 0:
        needed = so_far - held < k
    elif p < 1.0:  # a bin is needed while what starts with it may weigh more than may be left out
        needed = tl.cumsum(held * edge, 0, reverse=True) > (1.0 - p).to(tl.float32) * tl.sum(held * edge, 0) * 0.7788
    else:
        needed = edge * 1.0001 >= minimum
    cut = tl.maximum(tl.sum(needed.to(tl.int32), 0) - 1, 0)
    size = tl.sum(tl.where(bin <= cut, held, 0), 0)
    if chunk == 0:
        tl.store(sizes + row, size)
    if size > CAP:
        return
    inside = tl.where((bin <= cut)[None, :] & (lane < chunk)[:, None], count, 0)
    first = tl.sum(tl.sum(inside, 1), 0)
    value, ids = chunk_scores(scores, row, vocab, stride)
    peak = row_peak(peaks, row, chunks, CHUNKS_PAD)
    temperature = tl.load(temperatures + row * stride_t).to(tl.float32)
    keep = (ids < vocab) & (value > float("-inf")) & (distance_bin(value, peak, temperature) <= cut)
    place = row * CAP + first + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(cand_ids + place, ids, mask=keep)
    tl.store(cand_scores + place, value.to(cand_scores.dtype.element_ty), mask=keep)


@dataclass(frozen=True, slots=True)
class Found:
    """Scratch memory for up to `rows` rows, and what the passes leave in it."""

    peaks: torch.Tensor  # [rows, chunks] float32; +inf where a score is NaN or +inf
    places: torch.Tensor  # [rows, chunks] int32
    masses: torch.Tensor  # [rows, chunks] float64
    counts: torch.Tensor  # [rows, chunks, BINS] int32
    sizes: torch.Tensor  # [rows] int32: candidates, which are listed if they are at most CAP
    ids: torch.Tensor  # [rows, CAP] int32
    scores: torch.Tensor  # [rows, CAP], as the scores are

    @property
    def chunks(self) -> int:
        return self.peaks.shape[1]


def scratch(rows: int, vocab: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> Found:
    chunks = triton.cdiv(vocab, CHUNK.value)

    def space(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device)

    return Found(
        peaks=space(rows, chunks, dtype=torch.float32),
        places=space(rows, chunks),
        masses=space(rows, chunks, dtype=torch.float64),
        counts=space(rows, chunks, BINS.value),
        sizes=space(rows),
        ids=space(rows, CAP.value),
        scores=space(rows, CAP.value, dtype=dtype),
    )


def find_peaks(scores: torch.Tensor, temperatures: torch.Tensor, found: Found) -> None:
    """Fill peaks, places and masses. `temperatures` [n], any stride; 0 counts as 1 here."""
    rows, vocab = scores.shape
    _peaks[(rows, found.chunks)](
        scores, temperatures, found.peaks, found.places, found.masses, vocab, found.chunks, scores.stride(0),
        temperatures.stride(0), MASS=True, num_warps=8,
    )  # fmt: skip


def find_best(scores: torch.Tensor, peaks: torch.Tensor, places: torch.Tensor) -> None:
    """Fill peaks float32 and places int32 [rows, chunks], and nothing else."""
    rows, vocab = scores.shape
    chunks = peaks.shape[1]
    _peaks[(rows, chunks)](
        scores, peaks, peaks, places, peaks, vocab, chunks, scores.stride(0), 0, MASS=False, num_warps=8
    )


def find_candidates(
    scores: torch.Tensor,
    temperatures: torch.Tensor,
    wanted: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    found: Found,
) -> None:
    """Fill sizes, and ids and scores where they fit, for the rows `wanted` (int32) names. Peaks must be there.

    The parameter tensors [n] share one stride: they may be columns of one table, or one number for all.
    """
    rows, vocab = scores.shape
    pad = triton.next_power_of_2(found.chunks)
    step = temperatures.stride(0)
    if any(t.stride(0) != step for t in (top_ks, top_ps, min_ps)):
        raise ValueError("sampling parameters must share one stride")
    grid = (rows, found.chunks)
    _bins[grid](
        scores, temperatures, wanted, found.peaks, found.counts, vocab, found.chunks, scores.stride(0), step,
        wanted.stride(0), CHUNKS_PAD=pad, num_warps=8,
    )  # fmt: skip
    _compact[grid](
        scores, temperatures, wanted, top_ks, top_ps, min_ps, found.peaks, found.counts, found.sizes, found.ids,
        found.scores, vocab, found.chunks, scores.stride(0), step, wanted.stride(0), CHUNKS_PAD=pad, num_warps=8,
    )  # fmt: skip
