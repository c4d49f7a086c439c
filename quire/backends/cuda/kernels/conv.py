"""A causal convolution over each column that goes on from a state, for any mix of prompt chunks and decode rows.

The state is the TAPS - 1 rows seen last; where it lies, and after which tokens it is kept, the page table of its group says
(`conv` in backends/ops.py). A step of one row a sequence is one kernel, which reads and writes its states. Otherwise rows are
computed side by side, and a second kernel writes the states once nobody reads the old ones any more. A row is the same sum in the
same order in both. A page number outside the pool stands for a state that is not there.
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

_SPAN = 32  # pages of a sequence that are looked at together


@dataclass(frozen=True, slots=True)
class Place:
    """The states of one layer, and which of them a step's sequences have."""

    pool: torch.Tensor  # float32 [pages, state]: what an op keeps of a layer's begins at column `at`
    at: int
    table: torch.Tensor  # [B, P]
    q_start: torch.Tensor  # [B + 1]
    pos: torch.Tensor  # [T]
    kv_len: torch.Tensor  # [B]; rows from this position on only pad the batch
    page_size: int

    @property
    def numbers(self) -> torch.Tensor:
        """Where the op's own numbers of the first page begin."""
        return self.pool[:, self.at :]


@triton.jit
def state_before(table_row, first, pages, PAGE: tl.constexpr):
    """The page of the state before position `first`, and whether there is one."""
    page = tl.load(table_row + (first - 1) // PAGE, mask=first > 0, other=-1)
    return page.to(tl.int64), (page >= 0) & (page < pages)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@Launcher
@triton.jit(
    do_not_specialize=["pages", "stride_table"],
    do_not_specialize_on_alignment=["table", "q_start", "pos"],
)
def _one_row(
    x, weight, pool, out, table, q_start, pos, pages, n, stride_x, stride_o, stride_page, stride_table,
    TAPS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = lane < n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(q_start + b).to(tl.int64)
    if tl.load(q_start + b + 1) == row:
        return
    at = tl.load(pos + row)
    old, known = state_before(table + b * stride_table, at, pages, PAGE)
    held = tl.where(known, n, 0)
    into = tl.load(table + b * stride_table + at // PAGE).to(tl.int64)
    kept = lane < tl.where((into >= 0) & (into < pages), n, 0)
    newest = tl.load(x + row * stride_x + lane, mask=keep, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TAPS - 1):
        seen = tl.load(pool + old * stride_page + j * n + lane, mask=lane < held, other=0.0)
        acc += tl.load(weight + j * n + lane, mask=keep, other=0.0).to(tl.float32) * seen
        if j > 0:
            tl.debug_barrier()  # what is overwritten is the row that other threads may have read last
            tl.store(pool + into * stride_page + (j - 1) * n + lane, seen, mask=kept)
    acc += tl.load(weight + (TAPS - 1) * n + lane, mask=keep, other=0.0).to(tl.float32) * newest
    tl.debug_barrier()
    tl.store(pool + into * stride_page + (TAPS - 2) * n + lane, newest, mask=kept)
    tl.store(out + row * stride_o + lane, silu(acc).to(out.dtype.element_ty), mask=keep)


@Launcher
@triton.jit(
    do_not_specialize=["rows", "pages", "stride_table"],
    do_not_specialize_on_alignment=["table", "q_start", "pos", "owner"],
)
def _many_rows(
    x, weight, pool, out, table, q_start, pos, owner, rows, pages, n, stride_x, stride_o, stride_page, stride_table,
    TAPS: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    there = row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.load(owner + row, mask=there, other=0).to(tl.int64)
    start = tl.load(q_start + b)
    first = tl.load(pos + start, mask=there, other=0)
    page = tl.load(table + b * stride_table + (first - 1) // PAGE, mask=there & (first > 0), other=-1).to(tl.int64)
    known = there & (page >= 0) & (page < pages)
    keep = there[:, None] & (lane < n)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(TAPS):
        source = row - (TAPS - 1) + j
        new = source >= start
        seen = tl.load(x + source[:, None] * stride_x + lane, mask=keep & new[:, None], other=0.0).to(tl.float32)
        if j < TAPS - 1:
            before = page * stride_page + (source - start + TAPS - 1) * n
            seen += tl.load(pool + before[:, None] + lane, mask=keep & (known & (source < start))[:, None], other=0.0)
        acc += tl.load(weight + j * n + lane, mask=lane < n, other=0.0).to(tl.float32) * seen
    tl.store(out + row[:, None] * stride_o + lane, silu(acc).to(out.dtype.element_ty), mask=keep)


@Launcher
@triton.jit(
    do_not_specialize=["pages", "stride_table"],
    do_not_specialize_on_alignment=["table", "q_start", "pos", "kv_len"],
)
def _keep(
    x, pool, table, q_start, pos, kv_len, pages, n, stride_x, stride_page, stride_table,
    TAPS: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The states that sequence b leaves behind, the last first: one of them may replace the one that it began from."""
    b = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = lane < n
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(q_start + b).to(tl.int64)
    count = tl.load(q_start + b + 1) - start
    if count == 0:
        return
    first = tl.load(pos + start)
    end = tl.minimum(tl.load(kv_len + b), first + count)
    row = table + b * stride_table
    old, known = state_before(row, first, pages, PAGE)
    held = tl.where(known, n, 0)
    low = first // PAGE
    high = (end - 1) // PAGE
    for part in range((high - low) // SPAN + 1):
        top = high - part * SPAN
        index = top - tl.arange(0, SPAN)
        page = tl.load(row + index, mask=index >= low, other=-1)
        if tl.max(tl.where((page >= 0) & (page < pages), 1, 0), 0) > 0:
            for i in range(tl.minimum(SPAN, top - low + 1)):
                into = tl.load(row + top - i).to(tl.int64)
                if (into >= 0) & (into < pages):
                    done = tl.minimum((top - i + 1) * PAGE, end) - first
                    for j in tl.static_range(TAPS - 1):
                        source = done - (TAPS - 1) + j
                        new = lane < tl.where(source >= 0, n, 0)
                        seen = tl.load(x + (start + source) * stride_x + lane, mask=new, other=0.0).to(tl.float32)
                        before = old * stride_page + (source + TAPS - 1) * n
                        seen += tl.load(pool + before + lane, mask=lane < tl.where(source < 0, held, 0), other=0.0)
                        tl.debug_barrier()
                        tl.store(pool + into * stride_page + j * n + lane, seen, mask=keep)


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    place: Place,
    *,
    owner: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out [T, n] = silu of the convolution of x [T, n] with weight [TAPS * n]; states go on, and are kept.

    `owner` [T] is the sequence of each row; without it no sequence has more than one.
    """
    tokens, n = x.shape
    taps = weight.shape[0] // n
    if (
        out.shape != x.shape
        or weight.shape[0] != taps * n
        or taps < 2
        or place.at + (taps - 1) * n > place.pool.shape[1]
    ):
        raise ValueError(f"a convolution of {list(x.shape)} with a weight {list(weight.shape)} into {list(out.shape)}")
    if tokens == 0:
        return
    pool, table = place.numbers, place.table
    pages, sequences = pool.shape[0], table.shape[0]
    sizes: dict[str, object] = {"TAPS": taps, "PAGE": place.page_size, "PDL": pdl}
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    block = min(256, triton.next_power_of_2(n))
    columns = triton.cdiv(n, block)
    if owner is None:
        _one_row[(sequences, columns)](
            x, weight, pool, out, table, place.q_start, place.pos, pages, n, x.stride(0), out.stride(0), pool.stride(0),
            table.stride(0), **sizes, BLOCK=block, num_warps=2, **launch,
        )  # fmt: skip
        return
    _many_rows[(triton.cdiv(tokens, 16), triton.cdiv(n, 128))](
        x, weight, pool, out, table, place.q_start, place.pos, owner, tokens, pages, n, x.stride(0), out.stride(0),
        pool.stride(0), table.stride(0), **sizes, ROWS=16, BLOCK=128, num_warps=4, **launch,
    )  # fmt: skip
    _keep[(sequences, columns)](
        x, pool, table, place.q_start, place.pos, place.kv_len, pages, n, x.stride(0), pool.stride(0), table.stride(0),
        **sizes, SPAN=_SPAN, BLOCK=block, num_warps=2, **launch,
    )  # fmt: skip
