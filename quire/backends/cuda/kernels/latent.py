"""Attention over latent keys: one key a token for all heads, and its first columns are the token's value (DeepSeek's MLA).

A tile's rows are heads of one token, or of a few tokens where there are few heads; a block of keys is loaded once and used
twice, for the scores and for the values. Keys are wide (576 columns), so a tile holds them as two pieces: the latent part
and the rest, which is only for scores. A context is cut into parts as attention.py does it: evenly where the batch would
not fill the device, or at fixed positions in the invariant mode, where every launch has the same tile.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.combine import Workspace, combine, combine_in_order, merge
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.programs import LOG2E, SEQUENCES, Tile, average, cut, find_block, leave_part, nothing
from quire.backends.torch.quantized import LARGEST


@triton.jit
def _blocks(
    acc, peak, total, q, q_rest, where, keys, scales, table_row, first, end, scale, stride_page, stride_slot,
    D: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the cached tokens first .. end. MASKED: some row may not see some of them."""
    dims = tl.arange(0, LATENT_PAD)
    for start in range(first, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        inside = token < end  # a slot past the end may hold anything, and 0 * NaN is NaN
        if MASKED:
            page = tl.load(table_row + token // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table_row + token // PAGE).to(tl.int64)
        row = keys + page * stride_page + (token % PAGE) * stride_slot
        if MASKED:
            k = tl.load(row[:, None] + dims[None, :], mask=inside[:, None] & (dims < LATENT)[None, :], other=0.0)
        elif LATENT_PAD > LATENT:
            k = tl.load(row[:, None] + dims[None, :], mask=(dims < LATENT)[None, :], other=0.0)
        else:
            k = tl.load(row[:, None] + dims[None, :])
        k = k.to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST_PAD > 0:
            rest = LATENT + tl.arange(0, REST_PAD)
            if MASKED:
                more = tl.load(row[:, None] + rest[None, :], mask=inside[:, None] & (rest < D)[None, :], other=0.0)
            else:
                more = tl.load(row[:, None] + rest[None, :], mask=(rest < D)[None, :], other=0.0)
            score = tl.dot(q_rest, tl.trans(more.to(q.dtype)), score, input_precision="ieee")
        if SCALED > 0.0:
            if MASKED:
                own = tl.load(scales + page * PAGE + token % PAGE, mask=inside, other=0.0)
            else:
                own = tl.load(scales + page * PAGE + token % PAGE)
            score = score * own[None, :]
        if MASKED:
            score = tl.where(inside[None, :] & (token[None, :] <= where[:, None]), score, float("-inf"))
        new = tl.maximum(peak, tl.max(score, 1) * scale)
        base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
        weight = tl.exp2(score * scale - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 1)
        if SCALED > 0.0:  # by the largest value there, not the scale: that would leave the range of half floats
            weight = weight * (own * SCALED)[None, :]
        acc = tl.dot(weight.to(q.dtype), k, acc * fade[:, None], input_precision="ieee")
        peak = new
    return acc, peak, total


@triton.jit
def _walk(
    acc, peak, total, q, q_rest, where, lowest, keys, scales, table_row, begin, end, scale, stride_page, stride_slot,
    D: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """`_blocks` over begin .. end. Whole blocks that every row sees need no mask; the rest does."""
    free = begin + tl.maximum(tl.minimum(end, lowest + 1) - begin, 0) // BLOCK_N * BLOCK_N
    acc, peak, total = _blocks(
        acc, peak, total, q, q_rest, where, keys, scales, table_row, begin, free, scale, stride_page, stride_slot,
        D, LATENT, LATENT_PAD, REST_PAD, PAGE, BLOCK_N, SCALED, False,
    )  # fmt: skip
    return _blocks(
        acc, peak, total, q, q_rest, where, keys, scales, table_row, free, end, scale, stride_page, stride_slot,
        D, LATENT, LATENT_PAD, REST_PAD, PAGE, BLOCK_N, SCALED, True,
    )  # fmt: skip


@triton.jit
def _parts(
    q, q_rest, where, lowest, keys, scales, table_row, begin, end, scale, stride_page, stride_slot, M: tl.constexpr,
    D: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, REST_PAD: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Weighted values, peaks and sums of weights over begin .. end; with SPLIT part by part, merged in order."""
    acc, peak, total = nothing(M, LATENT_PAD)
    if SPLIT > 0:
        for start in range(begin, end, SPLIT):
            part_acc, part_peak, part_total = nothing(M, LATENT_PAD)
            part_acc, part_peak, part_total = _walk(
                part_acc, part_peak, part_total, q, q_rest, where, lowest, keys, scales, table_row, start,
                tl.minimum(end, start + SPLIT), scale, stride_page, stride_slot, D, LATENT, LATENT_PAD, REST_PAD, PAGE,
                BLOCK_N, SCALED,
            )  # fmt: skip
            acc, peak, total = merge(acc, peak, total, part_acc, part_peak, part_total)
    else:
        acc, peak, total = _walk(
            acc, peak, total, q, q_rest, where, lowest, keys, scales, table_row, begin, end, scale, stride_page,
            stride_slot, D, LATENT, LATENT_PAD, REST_PAD, PAGE, BLOCK_N, SCALED,
        )  # fmt: skip
    return acc, peak, total


@Launcher
@triton.jit(
    do_not_specialize=["sequences", "splits", "parts", "stride_table"],
    do_not_specialize_on_alignment=["table", "q_start", "kv_len", "pos"],
)
def _latent(
    q, keys, scales, out, part, lse, sums, table, q_start, kv_len, pos, sequences, scale, splits, parts,
    stride_qt, stride_qh, stride_page, stride_slot, stride_ot, stride_oh, stride_table,
    H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, SEQ_PAD: tl.constexpr,
    UNIFORM: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, PARTIAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(2)
    seq, block = find_block(q_start, sequences, BLOCK_Q, SEQ_PAD, UNIFORM)
    row_first = tl.load(q_start + seq)
    rows = tl.load(q_start + seq + 1) - row_first
    if block * BLOCK_Q >= rows:
        return
    M: tl.constexpr = BLOCK_Q * HEADS
    lane = tl.arange(0, M)
    local = block * BLOCK_Q + lane // HEADS
    head = tl.program_id(1) * HEADS + lane % HEADS
    real = (local < rows) & (head < H)
    row = row_first + local
    where = tl.load(pos + row, mask=local < rows, other=-1)
    lowest = tl.min(tl.where(local < rows, where, 2147483647), 0)
    end = tl.minimum(tl.load(kv_len + seq), tl.max(where, 0) + 1)
    begin, end = cut(0, end, split, splits, BLOCK_N, SPLIT, PARTIAL)
    if PARTIAL:
        place = (row.to(tl.int64) * H + head) * parts + split
        if begin >= end:
            tl.store(lse + place, tl.full([M], float("-inf"), tl.float32), mask=real)
            return
    dims = tl.arange(0, LATENT_PAD)
    keep = real[:, None] & (dims < LATENT)[None, :]
    source = q + row.to(tl.int64) * stride_qt + head * stride_qh
    query = tl.load(source[:, None] + dims[None, :], mask=keep, other=0.0)
    rest = query
    if REST_PAD > 0:
        more = LATENT + tl.arange(0, REST_PAD)
        rest = tl.load(source[:, None] + more[None, :], mask=real[:, None] & (more < D)[None, :], other=0.0)
    if SCALED > 0.0:
        query = query.to(tl.float16)  # e4m3 becomes fp16 in one instruction, bf16 in many
        rest = rest.to(tl.float16)
    acc, peak, total = _parts(
        query, rest, where, lowest, keys, scales, table + seq.to(tl.int64) * stride_table, begin, end, scale * LOG2E,
        stride_page, stride_slot, M, D, LATENT, LATENT_PAD, REST_PAD, PAGE, BLOCK_N, SCALED, SPLIT,
    )  # fmt: skip
    if PARTIAL:
        leave_part(part, lse, sums, place, acc, peak, total, real, keep, dims, LATENT, SCALED, SPLIT)
    else:
        target = out + row.to(tl.int64) * stride_ot + head * stride_oh
        tl.store(target[:, None] + dims[None, :], average(acc, total, SCALED).to(out.dtype.element_ty), mask=keep)


# Rows are 16 for the decode of few heads, and in the invariant mode, whose programs hold two sums; else 64. What a block
# of keys and the queries take must fit the processor's own memory: 64 x 576 x 2 bytes twice, beside 64 x 576 x 2.
FEW, MANY = Tile(16, 64, 4, 2), Tile(64, 32, 8, 2)
WIDE = Tile(16, 32, 4, 1)  # float32


def tile_of(dtype: torch.dtype, heads: int, max_q: int) -> Tile:
    """The tile for rows of that type; the most rows of a sequence."""
    return WIDE if dtype == torch.float32 else FEW if triton.next_power_of_2(heads) * max_q <= FEW.rows else MANY


def latent_splits(rows: int, heads: int, max_kv: int, processors: int = 132) -> int:
    """The number of parts of a context that fill the device: two programs a processor, none under 128 tokens."""
    programs = -(-rows * heads // MANY.rows) if heads > FEW.rows else rows
    return max(1, min(2 * processors // programs, max_kv // 128, 64))


def latent_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    out: torch.Tensor,
    *,
    q_start: torch.Tensor,
    kv_len: torch.Tensor,
    table: torch.Tensor,
    pos: torch.Tensor,
    scale: float,
    max_q: int,
    splits: int = 1,
    split_len: int = 0,
    space: Workspace | None = None,
    k_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """q [T, H, D] over the cache [pages, page, 1, D] into out [T, H, latent]; a sequence has up to max_q rows.

    `splits` with a `space` of as many parts cuts contexts evenly; with `split_len` at its multiples, where `splits`
    must cover the longest context, or without a space one program walks them all: the same bits.
    """
    (tokens, heads, dim), latent, page = q.shape, out.shape[2], keys.shape[1]
    if keys.shape[2:] != (1, dim) or keys.stride(3) != 1 or q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"latent attention of {list(q.shape)} over keys {list(keys.shape)}")
    if (keys.dtype in LARGEST) != (k_scale is not None):
        raise ValueError(f"keys of {keys.dtype} {'need' if k_scale is None else 'take no'} scales")
    if space is None and splits != 1 and not split_len:
        raise ValueError("a split context needs a workspace")
    tile = tile_of(q.dtype, 1, 1) if split_len else tile_of(q.dtype, heads, max_q)
    if split_len % tile.block_n:
        raise ValueError("parts at fixed positions are whole blocks of keys")
    held = min(tile.rows, triton.next_power_of_2(heads))  # heads of a tile
    block_q, sequences = tile.rows // held, kv_len.shape[0]
    blocks = None if max_q <= block_q else tokens // block_q + sequences
    rest, none = dim - latent, q
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    grid = (sequences if blocks is None else blocks, triton.cdiv(heads, held), 1 if space is None else splits)
    _latent[grid](
        q, keys, none if k_scale is None else k_scale, out, none if space is None else space.part,
        none if space is None else space.lse, none if space is None or space.sums is None else space.sums, table,
        q_start, kv_len, pos, sequences, scale, 1 if space is None else splits, 1 if space is None else space.parts,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), out.stride(0), out.stride(1), table.stride(0),
        H=heads, HEADS=held, D=dim, LATENT=latent, LATENT_PAD=max(16, triton.next_power_of_2(latent)),
        REST_PAD=max(16, triton.next_power_of_2(rest)) if rest else 0, PAGE=page, BLOCK_Q=block_q, BLOCK_N=tile.block_n,
        SEQ_PAD=max(SEQUENCES, triton.next_power_of_2(sequences)), UNIFORM=blocks is None,
        SCALED=0.0 if k_scale is None else LARGEST[keys.dtype], SPLIT=split_len, PARTIAL=space is not None, PDL=pdl,
        num_warps=tile.warps, num_stages=tile.stages, **launch,
    )  # fmt: skip
    if space is None:
        return
    if split_len:
        combine_in_order(space, out, pos=pos, split_len=split_len, pdl=pdl)
    else:
        combine(space.part, space.lse, out, parts=splits, pdl=pdl)
