"""The work of one program of an attention kernel, and where it leaves its result: the same for paged and latent keys.

A program has a block of one sequence's rows, and a part of its context. Parts are cut evenly from the true length, or with
SPLIT at its multiples.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
SEQUENCES = 1024  # that many are searched through at once: fewer would be one more kernel to compile


@dataclass(frozen=True, slots=True)
class Tile:
    """A launch configuration. `rows` is the M tile: query tokens times the heads of a group."""

    rows: int
    block_n: int
    warps: int
    stages: int


@triton.jit
def find_block(q_start, sequences, BLOCK_Q: tl.constexpr, SEQ_PAD: tl.constexpr, UNIFORM: tl.constexpr):
    """The program's sequence, and which block of BLOCK_Q of its rows. UNIFORM: no sequence has more than one."""
    if UNIFORM:
        seq = tl.program_id(0)
        block = 0
    else:  # sequence s starts at block q_start[s] // BLOCK_Q + s; later blocks see more, so they go first
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        lane = tl.arange(0, SEQ_PAD)
        starts = tl.load(q_start + lane, mask=lane < sequences, other=0) // BLOCK_Q + lane
        seq = tl.sum(((starts <= index) & (lane < sequences)).to(tl.int32), 0) - 1
        block = index - tl.load(q_start + seq) // BLOCK_Q - seq
    return seq, block


@triton.jit
def cut(begin, end, split, splits, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, PARTIAL: tl.constexpr):
    """The program's part of the tokens begin .. end. With SPLIT and not PARTIAL it walks all parts itself."""
    if SPLIT > 0:
        if PARTIAL:
            begin = tl.maximum(begin, split * SPLIT)
            end = tl.minimum(end, split * SPLIT + SPLIT)
    else:
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), BLOCK_N) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(end, begin + share)
    return begin, end


@triton.jit
def nothing(M: tl.constexpr, D: tl.constexpr):
    """Weighted values, peaks and sums of weights before the first token."""
    return tl.zeros([M, D], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def average(acc, total, SCALED: tl.constexpr):
    """Weighted values over the sum of their weights, and zero where there is none."""
    factor = tl.where(total > 0.0, 1.0 / total, 0.0)
    if SCALED > 0.0:
        factor = factor / SCALED
    return acc * factor[:, None]


@triton.jit
def leave_part(
    part, lse, sums, place, acc, peak, total, real, keep, dims, D: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """A part of rows `real`, for `combine`; with SPLIT as it is: `combine_in_order` goes on where this ends."""
    values = acc if SPLIT > 0 else average(acc, total, SCALED)
    tl.store(part + place[:, None] * D + dims[None, :], values, mask=keep)
    if SPLIT > 0:
        tl.store(lse + place, peak, mask=real)
        tl.store(sums + place, total, mask=real)
    else:
        tl.store(lse + place, tl.where(total > 0.0, peak + tl.log2(total), float("-inf")), mask=real)
