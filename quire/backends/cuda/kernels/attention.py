"""Ragged paged attention: any mix of prompt chunks, decode and verification rows, over one cache of pages.

One kernel. A program owns a tile of query rows that share a key head (BLOCK_Q tokens times the heads of the group, so
that a key is read once for all of them), and a part of the context. Row t sees the cached tokens 0 .. pos[t] of its
sequence, or the last `window` of them. Tiles are small for decode and large for prompts; a mixed batch launches both,
and each leaves the other's sequences alone.

A context is cut into `splits` parts where the batch alone would not fill the device; `combine` merges them in order.
Parts are cut evenly from the true length (a grid fixed by bounds serves any length), or, with `split_len`, at fixed
absolute positions: then a row's sums are taken in an order that no batch mate, chunk or length of a graph can change.
Such parts are walked one after another by one program, or by one program each and merged by `combine_in_order`, with the
same operations in the same order: `merge`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.combine import Workspace, combine, combine_in_order, merge, with_sink
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.programs import LOG2E, SEQUENCES, Tile, average, cut, find_block, leave_part, nothing
from quire.backends.torch.quantized import LARGEST


@triton.jit
def tanh(x):
    """tanh by one exponential: exact at both ends, 1e-7 absolute between."""
    return 1.0 - 2.0 / (tl.exp2(x * 2.0 * LOG2E) + 1.0)


@triton.jit
def _blocks(
    acc, peak, total, q, where, k_base, v_base, ks_base, vs_base, table_row, first, end, scale, softcap, window, floor,
    stride_page, stride_slot, stride_scale, SCALED: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Online softmax over the cached tokens first .. end. MASKED: some row may not see some of them.

    With WINDOW no row sees what lies before `floor`, and the pages of that may be gone: it is not looked at.
    """
    dims = tl.arange(0, D_PAD)
    for start in range(first, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        if MASKED:  # a slot past the end may hold anything, and 0 * NaN is NaN
            inside = token < end
            if WINDOW:
                inside = inside & (token >= floor)
            page = tl.load(table_row + token // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table_row + token // PAGE).to(tl.int64)
        slot = page * stride_page + (token % PAGE) * stride_slot
        if MASKED:
            k = tl.load(k_base + slot[None, :] + dims[:, None], mask=inside[None, :] & (dims < D)[:, None], other=0.0)
            v = tl.load(v_base + slot[:, None] + dims[None, :], mask=inside[:, None] & (dims < D)[None, :], other=0.0)
        elif D_PAD > D:
            k = tl.load(k_base + slot[None, :] + dims[:, None], mask=(dims < D)[:, None], other=0.0)
            v = tl.load(v_base + slot[:, None] + dims[None, :], mask=(dims < D)[None, :], other=0.0)
        else:
            k = tl.load(k_base + slot[None, :] + dims[:, None])
            v = tl.load(v_base + slot[:, None] + dims[None, :])
        score = tl.dot(q, k.to(q.dtype), input_precision="ieee")  # what is stored as float32 is multiplied as such
        if SCALED > 0.0:  # the scales of a page and head follow one another
            beside = page * stride_scale + token % PAGE
            if MASKED:
                k_scale = tl.load(ks_base + beside, mask=inside, other=0.0)
                v_scale = tl.load(vs_base + beside, mask=inside, other=0.0)
            else:
                k_scale = tl.load(ks_base + beside)
                v_scale = tl.load(vs_base + beside)
            score = score * k_scale[None, :]
        if SOFTCAP:
            score = tanh(score * scale / softcap) * softcap
        if MASKED:
            seen = inside[None, :] & (token[None, :] <= where[:, None])
            if WINDOW:
                seen = seen & (token[None, :] > where[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        factor = LOG2E if SOFTCAP else scale  # one multiply-add takes a score to its exponent
        new = tl.maximum(peak, tl.max(score, 1) * factor)
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        weight = tl.exp2(score * factor - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 1)
        acc = acc * fade[:, None]
        if SCALED > 0.0:  # by the largest value there, not the scale: that would leave the range of half floats
            weight = weight * (v_scale * SCALED)[None, :]
        acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
        peak = new
    return acc, peak, total


@triton.jit
def _walk(
    acc, peak, total, q, where, lowest, k_base, v_base, ks_base, vs_base, table_row, begin, end, scale, softcap, window,
    stride_page, stride_slot, stride_scale, SCALED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """`_blocks` over begin .. end. Whole blocks that every row sees need no mask; the rest does."""
    free = begin
    floor = lowest - window + 1
    if not WINDOW:
        free = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
        acc, peak, total = _blocks(
            acc, peak, total, q, where, k_base, v_base, ks_base, vs_base, table_row, begin, free, scale, softcap,
            window, floor, stride_page, stride_slot, stride_scale, SCALED, D, D_PAD, PAGE, BLOCK_N, False, False,
            SOFTCAP,
        )  # fmt: skip
    return _blocks(
        acc, peak, total, q, where, k_base, v_base, ks_base, vs_base, table_row, free, end, scale, softcap, window,
        floor, stride_page, stride_slot, stride_scale, SCALED, D, D_PAD, PAGE, BLOCK_N, True, WINDOW, SOFTCAP,
    )  # fmt: skip


@triton.jit
def _span(
    pos, kv_len, kv_begin, seq, row, known, window, M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, BEGIN: tl.constexpr,
):  # fmt: skip
    """The last token that each of the rows sees, the least of those, and the tokens begin .. end that some row sees."""
    length = tl.load(kv_len + seq)
    if CAUSAL:
        where = tl.load(pos + row, mask=known, other=-1)
        lowest = tl.min(tl.where(known, where, 2147483647), 0)
        end = tl.minimum(length, tl.max(where, 0) + 1)
    else:
        where = tl.full([M], 2147483647, tl.int32)
        lowest = length
        end = length
    begin = 0
    if BEGIN:
        begin = tl.load(kv_begin + seq)
    if WINDOW:
        begin = tl.maximum(begin, lowest - window + 1)
        begin = begin // BLOCK_N * BLOCK_N  # the same cuts whatever the first row of the tile
        if BEGIN:
            begin = tl.maximum(begin, tl.load(kv_begin + seq))
    return where, lowest, begin, end


@triton.jit
def _parts(
    q, where, lowest, k_base, v_base, ks_base, vs_base, table_row, begin, end, scale, softcap, window,
    stride_page, stride_slot, stride_scale, SCALED: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Weighted values, peaks and sums of weights over begin .. end; with SPLIT part by part, merged in order."""
    acc, peak, total = nothing(M, D_PAD)
    if SPLIT > 0:
        for start in range(begin // SPLIT * SPLIT, end, SPLIT):
            part_acc, part_peak, part_total = nothing(M, D_PAD)
            part_acc, part_peak, part_total = _walk(
                part_acc, part_peak, part_total, q, where, lowest, k_base, v_base, ks_base, vs_base, table_row,
                tl.maximum(begin, start), tl.minimum(end, start + SPLIT), scale, softcap, window, stride_page,
                stride_slot, stride_scale, SCALED, D, D_PAD, PAGE, BLOCK_N, WINDOW, SOFTCAP,
            )  # fmt: skip
            acc, peak, total = merge(acc, peak, total, part_acc, part_peak, part_total)
    else:
        acc, peak, total = _walk(
            acc, peak, total, q, where, lowest, k_base, v_base, ks_base, vs_base, table_row, begin, end, scale,
            softcap, window, stride_page, stride_slot, stride_scale, SCALED, D, D_PAD, PAGE, BLOCK_N, WINDOW, SOFTCAP,
        )  # fmt: skip
    return acc, peak, total


# Counts, bounds and where small arrays lie: one compiled kernel serves whatever they are.
@Launcher
@triton.jit(
    do_not_specialize=[
        "sequences", "min_rows", "max_rows", "window", "splits", "parts", "part_first", "stride_table"
    ],
    do_not_specialize_on_alignment=["table", "q_start", "kv_len", "kv_begin", "pos"],
)  # fmt: skip
def _attend(
    q, k_cache, v_cache, out, part, lse, sums, table, q_start, kv_len, kv_begin, pos, sinks, k_scale, v_scale,
    sequences, min_rows, max_rows, kv_heads, scale, softcap, window, splits, parts, part_first,
    stride_qt, stride_qh, stride_page, stride_slot, stride_head, stride_ot, stride_oh, stride_table,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, SEQ_PAD: tl.constexpr, UNIFORM: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, BEGIN: tl.constexpr, SCALED: tl.constexpr,
    SPLIT: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    split = tl.program_id(2)
    seq, block = find_block(q_start, sequences, BLOCK_Q, SEQ_PAD, UNIFORM)
    row_first = tl.load(q_start + seq)
    rows = tl.load(q_start + seq + 1) - row_first
    if (block * BLOCK_Q >= rows) | (rows <= min_rows) | (rows > max_rows):
        return
    M: tl.constexpr = BLOCK_Q * GROUP_PAD
    lane = tl.arange(0, M)
    local = block * BLOCK_Q + lane // GROUP_PAD
    member = lane % GROUP_PAD
    real = (local < rows) & (member < GROUP)
    row = row_first + local
    q_head = head * GROUP + member
    where, lowest, begin, end = _span(
        pos, kv_len, kv_begin, seq, row, local < rows, window, M, BLOCK_N, CAUSAL, WINDOW, BEGIN
    )
    begin, end = cut(begin, end, split, splits, BLOCK_N, SPLIT, PARTIAL)
    if PARTIAL:
        place = (row.to(tl.int64) * kv_heads * GROUP + q_head) * parts + part_first + split
        if begin >= end:
            tl.store(lse + place, tl.full([M], float("-inf"), tl.float32), mask=real)
            return
    dims = tl.arange(0, D_PAD)
    keep = real[:, None] & (dims < D)[None, :]
    source = q + row.to(tl.int64)[:, None] * stride_qt + q_head[:, None] * stride_qh
    query = tl.load(source + dims[None, :], mask=keep, other=0.0)
    if SCALED > 0.0:
        query = query.to(tl.float16)  # e4m3 becomes fp16 in one instruction, bf16 in many
    if not SOFTCAP:
        scale = scale * LOG2E
    acc, peak, total = _parts(
        query, where, lowest, k_cache + head * stride_head, v_cache + head * stride_head, k_scale + head * PAGE,
        v_scale + head * PAGE, table + seq.to(tl.int64) * stride_table, begin, end, scale, softcap, window, stride_page,
        stride_slot, kv_heads * PAGE, SCALED, M, D, D_PAD, PAGE, BLOCK_N, WINDOW, SOFTCAP, SPLIT,
    )  # fmt: skip
    if PARTIAL:
        leave_part(part, lse, sums, place, acc, peak, total, real, keep, dims, D, SCALED, SPLIT)
    else:
        if SINKS:
            sink = tl.load(sinks + q_head, mask=member < GROUP, other=0.0).to(tl.float32) * LOG2E
            acc, peak, total = with_sink(acc, peak, total, sink)
        target = out + row.to(tl.int64)[:, None] * stride_ot + q_head[:, None] * stride_oh
        tl.store(target + dims[None, :], average(acc, total, SCALED).to(out.dtype.element_ty), mask=keep)


PROMPT = Tile(128, 64, 4, 3)
PROMPT_WIDE = Tile(64, 64, 4, 2)  # head sizes over 128: the tile must fit in shared memory
# Where parts are cut at fixed positions: for few rows and for many. The instructions must be the same ones (64 rows of a
# warpgroup each, blocks of 64 keys), so that both give the same bits; tests/gpu/test_deterministic.py compares them.
INVARIANT, INVARIANT_TALL = Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)
INVARIANT_WIDE = Tile(64, 64, 4, 2)  # head sizes over 128


VERIFIED = 64  # rows of such a tile at most
specialize = True  # whether prompts may go through `prompt.py`; benchmarks set it
_SHORT = 1024  # tokens that a row sees from which that is faster for small heads, whose tiles are over soon


def workspace(
    tokens: int, heads: int, head_dim: int, parts: int, device: torch.device | str, *, sums: bool = False
) -> Workspace:
    """Space for that many parts; with `sums` for those that start at fixed positions."""

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.float32, device=device)

    total = numbers(tokens, heads, parts) if sums else None
    return Workspace(numbers(tokens, heads, parts, head_dim), numbers(tokens, heads, parts), total)


def decode_tile(programs: int, group: int) -> Tile:
    """The tile for sequences of few rows: narrow where there are many programs, wide where each one is waited for."""
    rows = max(16, triton.next_power_of_2(group))
    return (
        Tile(rows, 32, 1, 4) if programs >= 1024 else Tile(rows, 64, 2, 3) if programs >= 256 else Tile(rows, 64, 4, 2)
    )


def verify_tile(rows: int) -> Tile:
    """The tile for sequences whose last few tokens are verified together: all rows of one, times the heads of a group."""
    return Tile(max(16, triton.next_power_of_2(rows)), 64, 4, 2)


def choose_splits(sequences: int, kv_heads: int, max_kv: int, processors: int = 132) -> int:
    """The number of parts of a context that fill the device: about four programs a processor, none shorter than a block of 64."""
    wanted = (4 * processors) // max(1, sequences * kv_heads)
    return max(1, min(wanted, max_kv // 64, 64))


def rows_as_pages(q_start: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step as a cache with pages of one token: how many each sequence has [B], and which [B, longest]."""
    first = q_start[:-1]
    return q_start[1:] - first, first[:, None] + torch.arange(longest, dtype=torch.int32, device=first.device)


def encode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    q_start: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    pdl: bool = False,
) -> None:
    """softmax(q k^T * scale) v, where the rows of a sequence see one another. q and out [T, H, D], k and v [T, Hk, D].

    `lengths` and `table` are of `rows_as_pages`. The tile is one whatever the batch, so that a sequence's bits are its own.
    """
    tile = PROMPT if q.shape[2] <= 128 else PROMPT_WIDE
    block_q = max(1, tile.rows // triton.next_power_of_2(q.shape[1] // k.shape[1]))
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    attend(
        q, k[:, None], v[:, None], out, q_start=q_start, kv_len=lengths, table=table, pos=None, scale=scale, tile=tile,
        blocks=q.shape[0] // block_q + lengths.shape[0], pdl=pdl,
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    table: torch.Tensor,
    pos: torch.Tensor | None,
    scale: float,
    tile: Tile,
    blocks: int | None = None,
    min_rows: int = 0,
    max_rows: int = 2**31 - 1,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_begin: torch.Tensor | None = None,
    splits: int = 1,
    split_len: int = 0,
    space: Workspace | None = None,
    part_first: int = 0,
    pdl: bool = False,
) -> None:
    """Launch the kernel once, over the sequences with min_rows < rows <= max_rows.

    `blocks` bounds the tiles of query rows; None means one tile for each sequence (max_rows must then fit the tile).
    Caches of codes have scales [pages, Hk, page], one for each token and head. Without `pos` no row is hidden from any
    (the shared prefix). With `space`, results go there as parts part_first .. part_first + splits, and `out` is not
    touched. `split_len` is the invariant mode; its `space` has sums.
    """
    heads, dim = q.shape[1], q.shape[2]
    page, kv_heads = k_cache.shape[1], k_cache.shape[2]
    sequences = kv_len.shape[0]
    group = heads // kv_heads
    group_pad = triton.next_power_of_2(group)
    block_q = max(1, tile.rows // group_pad)
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("attention needs caches of equal strides, and contiguous heads")
    wanted = (k_cache.shape[0], kv_heads, page) if k_cache.dtype in LARGEST else None
    if wanted != (None if k_scale is None else tuple(k_scale.shape)):
        raise ValueError(f"a cache {list(k_cache.shape)} of {k_cache.dtype} needs scales {wanted}")
    if blocks is None and max_rows > block_q:
        raise ValueError(f"a tile of {block_q} tokens cannot hold sequences of up to {max_rows} rows")
    if space is None and splits != 1:
        raise ValueError("a split context needs a workspace")
    if split_len % tile.block_n or (split_len > 0 and (k_scale is not None or kv_begin is not None)):
        raise ValueError("parts at fixed positions are whole blocks of keys, and take no fp8 cache or shared prefix")
    if split_len > 0 and space is not None and space.sums is None:
        raise ValueError("parts at fixed positions need a workspace with sums")
    none = q  # a pointer that is never read
    sums = none if space is None or space.sums is None else space.sums
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    grid = (sequences if blocks is None else blocks, kv_heads, splits)
    _attend[grid](
        q, k_cache, v_cache, out,
        none if space is None else space.part, none if space is None else space.lse, sums,
        table, q_start, kv_len, none if kv_begin is None else kv_begin, none if pos is None else pos,
        none if sinks is None else sinks, none if k_scale is None else k_scale, none if v_scale is None else v_scale,
        sequences, min_rows, max_rows, kv_heads, scale, softcap, window, splits,
        1 if space is None else space.parts, part_first,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2), out.stride(0), out.stride(1),
        table.stride(0),
        GROUP=group, GROUP_PAD=group_pad, D=dim, D_PAD=max(16, triton.next_power_of_2(dim)), PAGE=page,
        BLOCK_Q=block_q, BLOCK_N=tile.block_n, SEQ_PAD=max(SEQUENCES, triton.next_power_of_2(sequences)), UNIFORM=blocks is None,
        CAUSAL=pos is not None, WINDOW=window > 0, SOFTCAP=softcap > 0.0, SINKS=sinks is not None,
        BEGIN=kv_begin is not None, SCALED=0.0 if k_scale is None else LARGEST[k_cache.dtype], PARTIAL=space is not None,
        SPLIT=split_len, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, **launch,
    )  # fmt: skip


@cache
def prompts() -> ModuleType | None:
    """The kernel for prompts on Hopper; None where this Triton's Gluon, which is not settled yet, lacks what it is written with."""
    try:
        from quire.backends.cuda.kernels import prompt
    except (ImportError, AttributeError):
        return None
    return prompt


def _specialized(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> ModuleType | None:
    """The kernel of `prompts`, if it takes these on this GPU."""
    if not specialize or q.device.type != "cuda" or (found := prompts()) is None:
        return None
    return found if found.takes(q, k_cache, v_cache) else None


def _now(key: Any, make: Callable[[], Any]) -> Any:
    return make()


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    table: torch.Tensor,
    pos: torch.Tensor,
    scale: float,
    max_q: int,
    min_q: int = 1,
    reach: int = 2**31 - 1,
    splits: int = 1,
    split_len: int = 0,
    space: Workspace | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    once: Callable[[Any, Callable[[], Any]], Any] | None = None,
    pdl: bool = False,
) -> None:
    """softmax(q k^T * scale) v for every row of a ragged batch. q and out [T, H, D].

    `max_q` and `min_q` bound the rows of one sequence, `reach` its tokens. `splits` (with a `space` of that many parts) cuts the contexts of
    sequences with few rows. `split_len` > 0 is the invariant mode: parts start at its multiples; with a `space` (that
    has sums) they are `splits` programs, which must cover the longest context, and without it one program walks them
    all. A row's bits are the same either way, and in any batch. `once` is a batch's, which keeps what all layers use.
    """
    heads, dim = q.shape[1], q.shape[2]
    group_pad = triton.next_power_of_2(heads // k_cache.shape[2])
    shared = {
        "q_start": q_start, "kv_len": kv_len, "table": table, "pos": pos, "scale": scale, "window": window,
        "softcap": softcap, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    sequences, tokens = kv_len.shape[0], q.shape[0]
    if split_len > 0:
        tile = INVARIANT_WIDE if dim > 128 else INVARIANT if max_q * group_pad <= INVARIANT.rows else INVARIANT_TALL
        if group_pad > tile.rows:
            raise ValueError(f"{group_pad} query heads of one key head do not fit a tile of {tile.rows} rows")
        block_q = tile.rows // group_pad
        blocks = None if max_q <= block_q else tokens // block_q + sequences
        attend(
            q, k_cache, v_cache, out, tile=tile, blocks=blocks, max_rows=max_q, split_len=split_len,
            splits=1 if space is None else splits, space=space, pdl=pdl, **shared,
        )  # fmt: skip
        if space is not None:
            combine_in_order(space, out, pos=pos, split_len=split_len, sinks=sinks, pdl=pdl)
        return
    tile = decode_tile(max(256, sequences * k_cache.shape[2] * splits), group_pad)  # one kernel less to compile
    few = tile.rows // group_pad
    if min_q <= few:
        attend(
            q, k_cache, v_cache, out, tile=tile, max_rows=min(few, max_q), splits=splits, space=space,
            **shared,
        )  # fmt: skip
    if space is not None and min_q <= few:
        combine(space.part, space.lse, out, sinks=sinks, q_start=q_start, max_q=min(few, max_q), parts=splits)
    seen = min(reach, window) if window else reach
    plain = softcap != 0.0 or k_scale is not None or (dim < 128 and seen < _SHORT)
    if max_q > few and not plain and (own := _specialized(q, k_cache, v_cache)) is not None:
        told = {"group": heads // k_cache.shape[2], "min_rows": few}
        tiles = (once or _now)(("tiles", *told.values()), lambda: own.tile_list(q_start, kv_len, pos, **told))
        own.attend_prompts(q, k_cache, v_cache, out, tiles=tiles, table=table, scale=scale, window=window, sinks=sinks)
    elif max_q > few:
        tile = PROMPT if dim <= 128 else PROMPT_WIDE
        block_q = max(1, tile.rows // group_pad)
        attend(
            q, k_cache, v_cache, out, tile=tile, blocks=tokens // block_q + sequences, min_rows=few,
            **shared,
        )  # fmt: skip
