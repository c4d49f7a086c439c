"""Paged attention of prompts for Hopper: the tile of `attention.PROMPT` with its loads and its two halves in warps of their own.

One warp copies keys and values from their pages into a ring in shared memory (the bulk copy engine does it, page by page), and two
groups of four warps, of 64 query rows each, multiply. Each group asks for the scores of a block before it multiplies the
weights of the block ahead with its values, so that the tensor cores work while it takes exponents.

The rules of what a row sees are those of `attention.py`: row t sees the cached tokens 0 .. pos[t], or the last `window` of them. Written in
Gluon, Triton's language one level down, as plain Triton leaves no say in who waits for whom; it has no interpreter, so
the tests of this file are those of tests/gpu. Whoever cannot use it (`usable`) uses the plain kernel.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.programs import SEQUENCES

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = 128  # of a tile: query tokens times the heads of a group
HALF = gl.constexpr(64)  # rows of a group of warps; also the columns that one copy brings
BLOCK_N = 128
# Names that changed after Triton 3.6.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_as_pages = getattr(gl.shared_memory_descriptor, "_reinterpret", None) or gl.shared_memory_descriptor.reinterpret
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)  # the groups of warps


@Launcher
@triton.jit(
    do_not_specialize=["sequences", "min_rows"],
    do_not_specialize_on_alignment=["q_start", "kv_len", "pos"],
)  # fmt: skip
def _tile_list(
    tiles, q_start, kv_len, pos, sequences, min_rows, BLOCK_Q: tl.constexpr, SEQ_PAD: tl.constexpr
):  # fmt: skip
    """One program finds one tile: BLOCK_Q rows (or what is left) of a sequence with more than min_rows. Programs past the last leave nothing.

    tiles[0] is their number; tile i is the five numbers from 8 + 8 i on: sequence, first row, rows, its first row's position,
    and the tokens that are cached.
    """
    index = tl.program_id(0)
    lane = tl.arange(0, SEQ_PAD)
    own = lane < sequences
    start = tl.load(q_start + lane, mask=own, other=0)
    rows = tl.load(q_start + lane + 1, mask=own, other=0) - start
    count = tl.where(own & (rows > min_rows), tl.cdiv(rows, BLOCK_Q), 0)
    until = tl.cumsum(count, 0)
    total = tl.max(until, 0)
    if index == 0:
        tl.store(tiles, total)
    if index < total:
        seq = tl.sum((until <= index).to(tl.int32), 0)
        block = index - tl.sum(tl.where(lane == seq, until - count, 0), 0)
        first = tl.load(q_start + seq) + block * BLOCK_Q
        left = tl.load(q_start + seq + 1) - first
        into = tiles + 8 + 8 * index
        tl.store(into, seq)
        tl.store(into + 1, first)
        tl.store(into + 2, tl.minimum(left, BLOCK_Q))
        tl.store(into + 3, tl.load(pos + first))
        tl.store(into + 4, tl.load(kv_len + seq))


@gluon.jit
def _place(tiles, number, heads, total, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr, window):
    """Which tile a program takes as the `number`th, and what it sees. Programs take turns forwards and backwards, so that
    those that are given longer tiles in one round are given shorter ones in the next."""
    programs = gl.num_programs(0)
    own = gl.program_id(0)
    at = number * programs + gl.where(number % 2 == 1, programs - 1 - own, own)
    known = at < total * heads
    tile = (
        tiles + 8 + 8 * (total - 1 - gl.minimum(at, total * heads - 1) // heads)
    )  # later ones see more, so they go first
    seq = gl.load(tile)
    first = gl.load(tile + 1)
    rows = gl.load(tile + 2)
    lowest = gl.load(tile + 3)
    end = gl.minimum(gl.load(tile + 4), lowest + rows)
    floor = 0
    begin = 0
    if WINDOW:
        floor = gl.maximum(lowest - window + 1, 0)
        begin = floor // BLOCK_N * BLOCK_N
    blocks = gl.where(known, gl.cdiv(gl.maximum(end - begin, 1), BLOCK_N), 0)
    return at % heads, seq, first, rows, lowest, begin, end, floor, blocks


@gluon.jit
def _load(
    k_desc, v_desc, tiles, table, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, heads, pages, window, stride_table,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Bring block after block. Pages that no row sees are not looked at: they become zeros."""
    COUNT: gl.constexpr = BLOCK_N // PAGE
    PARTS: gl.constexpr = D // HALF
    dtype: gl.constexpr = k_desc.dtype
    k_parts = _as_pages(k_bufs, dtype, [STAGES * PARTS * COUNT, PAGE, HALF], k_desc.layout)
    v_parts = _as_pages(v_bufs, dtype, [STAGES * PARTS * COUNT, PAGE, HALF], v_desc.layout)
    total = gl.load(tiles)
    done = 0
    for number in range(gl.cdiv(total * heads, gl.num_programs(0))):
        head, seq, _, _, _, begin, end, floor, blocks = _place(tiles, number, heads, total, BLOCK_N, WINDOW, window)
        row = table + seq.to(gl.int64) * stride_table
        for i in range(blocks):
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES & 1) ^ 1
            found = ()
            for p in gl.static_range(COUNT):
                token = begin + i * BLOCK_N + p * PAGE
                seen = (token < end) & (token + PAGE > floor)
                found = found + (gl.load(row + token // PAGE, mask=seen, other=pages) * PAGE,)  # noqa: RUF005
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), BLOCK_N * D * 2)
            for p in gl.static_range(COUNT):
                for part in gl.static_range(PARTS):
                    into = k_parts.index((stage * PARTS + part) * COUNT + p)
                    at = [found[p], head * D + part * HALF]
                    _copy(k_desc, at, k_ready.index(stage), into)
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), BLOCK_N * D * 2)
            for p in gl.static_range(COUNT):
                for part in gl.static_range(PARTS):
                    into = v_parts.index((stage * PARTS + part) * COUNT + p)
                    at = [found[p], head * D + part * HALF]
                    _copy(v_desc, at, v_ready.index(stage), into)
        done += blocks


@gluon.jit
def _weigh(
    score, peak, total, where, first, end, window, scale, BLOCK_N: gl.constexpr, MASKED: gl.constexpr,
    WINDOW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The weights of a block's scores, and what they make of the rows' peaks and sums."""
    if MASKED:
        token = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        seen = (token[None, :] <= where[:, None]) & (token[None, :] < end)
        if WINDOW:
            seen = seen & (token[None, :] > where[:, None] - window)
        score = gl.where(seen, score, float("-inf"))
    new = gl.maximum(peak, gl.max(score, 1) * scale)
    base = new
    if MASKED:
        base = gl.where(new == float("-inf"), 0.0, new)
    weight = gl.exp2(score * scale - base[:, None])
    fade = gl.exp2(peak - base)
    return weight, new, total * fade + gl.sum(weight, 1), fade


@gluon.jit
def _blank_tail(
    v_bufs, stage, first, end, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Make values past the end, in its own page, zeros: a slot there may hold anything, and 0 * NaN is NaN. Both groups write the same."""
    if (end % PAGE != 0) & (end < first + BLOCK_N):
        COUNT: gl.constexpr = BLOCK_N // PAGE
        PARTS: gl.constexpr = D // HALF
        wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        parts = _as_pages(v_bufs, v_bufs.dtype, [STAGES * PARTS * COUNT, PAGE, HALF], layout)
        at = (end - first) // PAGE
        token = first + at * PAGE + gl.arange(0, PAGE, layout=gl.SliceLayout(1, wide))
        for part in gl.static_range(PARTS):
            own = parts.index((stage * PARTS + part) * COUNT + at)
            values = own.load(wide)
            own.store(gl.where((token < end)[:, None], values, gl.zeros_like(values)))
        fence_async_shared()
        _barrier()


@gluon.jit
def _blocks(
    acc, peak, total, weight, q_own, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, where, start, stop, done, begin,
    end, window, scale, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, WINDOW: gl.constexpr,
    s_layout: gl.constexpr, o_layout: gl.constexpr, p_layout: gl.constexpr,
):  # fmt: skip
    """Blocks start .. stop: their scores while the block ahead of each is multiplied with its values."""
    for i in range(start, stop):
        stage = (done + i) % STAGES
        before = (done + i - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (done + i) // STAGES & 1)
        empty = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
        score = warpgroup_mma(q_own, k_bufs.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
        mbarrier.wait(v_ready.index(before), (done + i - 1) // STAGES & 1)
        acc = warpgroup_mma(weight, v_bufs.index(before), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=(score,))
        mbarrier.arrive(k_free.index(stage), count=1)
        raw, peak, total, fade = _weigh(
            score, peak, total, where, begin + i * BLOCK_N, end, window, scale, BLOCK_N, MASKED, WINDOW, s_layout
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(before), count=1)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, o_layout))[:, None]
        weight = gl.convert_layout(raw.to(q_own.dtype), p_layout)
    return acc, peak, total, weight


@gluon.jit
def _tile(
    SIDE: gl.constexpr, q, out, sinks, q_bufs, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, done, head, row, rows,
    lowest, begin, end, blocks, window, scale, stride_qt, stride_qh, stride_ot, stride_oh,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, v_layout: gl.constexpr,
):  # fmt: skip
    """A group's 64 rows of one tile, whose first token is `row`."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    lane = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, wide))
    local = lane // GROUP_PAD
    member = lane % GROUP_PAD
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, wide))
    source = q + (row + local).to(gl.int64) * stride_qt + (head * GROUP + member) * stride_qh
    real = (local < rows) & (member < GROUP)
    q_own = q_bufs.index(SIDE)
    q_own.store(gl.load(source[:, None] + dims[None, :], mask=real[:, None], other=0.0))
    fence_async_shared()
    _barrier()

    lane = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, s_layout))
    where = lowest + lane // GROUP_PAD
    free = 1  # blocks from the second on to here need no mask
    if not WINDOW:
        free = gl.minimum(gl.maximum(gl.minimum(end, lowest + 1) // BLOCK_N, 1), blocks)

    stage = done % STAGES
    mbarrier.wait(k_ready.index(stage), done // STAGES & 1)
    empty = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
    score = warpgroup_mma(q_own, k_bufs.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(k_free.index(stage), count=1)
    peak = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, s_layout))
    raw, peak, total, fade = _weigh(
        score, peak, total, where, begin, end, window, scale, BLOCK_N, True, WINDOW, s_layout
    )
    weight = gl.convert_layout(raw.to(q_own.dtype), p_layout)
    acc = gl.zeros([HALF, D], gl.float32, o_layout)
    if not WINDOW:
        acc, peak, total, weight = _blocks(
            acc, peak, total, weight, q_own, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, where, 1, free, done,
            begin, end, window, scale, BLOCK_N, STAGES, False, False, s_layout, o_layout, p_layout,
        )  # fmt: skip
    acc, peak, total, weight = _blocks(
        acc, peak, total, weight, q_own, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, where, free, blocks, done,
        begin, end, window, scale, BLOCK_N, STAGES, True, WINDOW, s_layout, o_layout, p_layout,
    )  # fmt: skip
    last = (done + blocks - 1) % STAGES
    mbarrier.wait(v_ready.index(last), (done + blocks - 1) // STAGES & 1)
    _blank_tail(v_bufs, last, begin + (blocks - 1) * BLOCK_N, end, PAGE, BLOCK_N, D, STAGES, v_layout)
    acc = warpgroup_mma(weight, v_bufs.index(last), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(last), count=1)

    lane = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, o_layout))
    local = lane // GROUP_PAD
    member = lane % GROUP_PAD
    peak = gl.convert_layout(peak, gl.SliceLayout(1, o_layout))
    total = gl.convert_layout(total, gl.SliceLayout(1, o_layout))
    fade = gl.full([HALF], 1.0, gl.float32, gl.SliceLayout(1, o_layout))
    if SINKS:
        sink = gl.load(sinks + head * GROUP + member, mask=member < GROUP, other=0.0).to(gl.float32) * LOG2E
        new = gl.maximum(peak, sink)
        fade = gl.exp2(peak - new)
        total = total * fade + gl.exp2(sink - new)
    acc = acc * gl.where(total > 0.0, fade / total, 0.0)[:, None]
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, o_layout))
    target = out + (row + local).to(gl.int64) * stride_ot + (head * GROUP + member) * stride_oh
    real = (local < rows) & (member < GROUP)
    gl.store(target[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])


@gluon.jit
def _multiply(
    q, out, sinks, tiles, q_bufs, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, heads, window, scale, stride_qt,
    stride_qh, stride_ot, stride_oh, SIDE: gl.constexpr, GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr,
    PAGE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
    v_layout: gl.constexpr,
):  # fmt: skip
    """The work of a group of warps, tile after tile."""
    total = gl.load(tiles)
    done = 0
    for number in range(gl.cdiv(total * heads, gl.num_programs(0))):
        head, _, row, rows, lowest, begin, end, _, blocks = _place(tiles, number, heads, total, BLOCK_N, WINDOW, window)
        if blocks > 0:
            _tile(
                SIDE, q, out, sinks, q_bufs, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, done, head, row, rows,
                lowest, begin, end, blocks, window, scale, stride_qt, stride_qh, stride_ot, stride_oh, GROUP, GROUP_PAD,
                D, PAGE, BLOCK_N, STAGES, WINDOW, SINKS, v_layout,
            )  # fmt: skip
        done += blocks


# Counts, bounds and where small arrays lie: one compiled kernel serves whatever they are.
@Launcher
@gluon.jit(
    do_not_specialize=["window", "pages", "stride_table"],
    do_not_specialize_on_alignment=["table", "tiles", "sinks"],
)  # fmt: skip
def _attend_prompts(
    q, k_desc, v_desc, out, table, tiles, sinks, heads, window, pages, scale,
    stride_qt, stride_qh, stride_ot, stride_oh, stride_table,
    GROUP: gl.constexpr, GROUP_PAD: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_desc.dtype
    k_layout: gl.constexpr = k_desc.layout
    bar_layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_bufs = gl.allocate_shared_memory(dtype, [2, HALF, D], k_layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar_layout)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(stage), count=1)
        mbarrier.init(v_ready.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    factor = scale * LOG2E
    gl.warp_specialize(
        [
            (_multiply, (
                q, out, sinks, tiles, q_bufs, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, heads, window, factor,
                stride_qt, stride_qh, stride_ot, stride_oh, FIRST, GROUP, GROUP_PAD, D, PAGE, BLOCK_N, STAGES, WINDOW,
                SINKS, k_layout,
            )),
            (_multiply, (
                q, out, sinks, tiles, q_bufs, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, heads, window, factor,
                stride_qt, stride_qh, stride_ot, stride_oh, SECOND, GROUP, GROUP_PAD, D, PAGE, BLOCK_N, STAGES, WINDOW,
                SINKS, k_layout,
            )),
            (_load, (
                k_desc, v_desc, tiles, table, k_bufs, v_bufs, k_ready, k_free, v_ready, v_free, heads, pages, window,
                stride_table, PAGE, BLOCK_N, D, STAGES, WINDOW,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def takes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Whether the kernel serves these: half floats on Hopper, heads of 64 or 128, pages that tile a block."""
    page, dim = k_cache.shape[1], q.shape[2]
    group = triton.next_power_of_2(q.shape[1] // k_cache.shape[2])
    halves = q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == v_cache.dtype == q.dtype
    fits = dim in (64, 128) and page in (8, 16, 32, 64, 128) and group <= HALF.value
    apart = k_cache.is_contiguous() and v_cache.is_contiguous() and q.stride(2) == 1
    return halves and fits and apart and torch.cuda.get_device_capability(q.device)[0] == 9


def tile_list(
    q_start: torch.Tensor, kv_len: torch.Tensor, pos: torch.Tensor, *, group: int, min_rows: int
) -> torch.Tensor:
    """The tiles of the sequences with more than `min_rows` rows, for `attend_prompts`: the same for all layers with such groups of heads."""
    block_q, sequences = ROWS // triton.next_power_of_2(group), kv_len.shape[0]
    most = pos.shape[0] // block_q + sequences
    tiles = torch.empty(8 + 8 * most, dtype=torch.int32, device=pos.device)
    _tile_list[(most,)](
        tiles, q_start, kv_len, pos, sequences, min_rows, BLOCK_Q=block_q,
        SEQ_PAD=max(SEQUENCES, triton.next_power_of_2(sequences)), num_warps=4,
    )  # fmt: skip
    return tiles


def attend_prompts(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    tiles: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """softmax(q k^T * scale) v for the rows of these tiles. q and out [T, H, D], caches as `takes` has them."""
    heads, dim = q.shape[1:]
    pages, page, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    _attend_prompts[(programs,)](
        q, _columns(k_cache), _columns(v_cache), out, table, tiles, q if sinks is None else sinks, kv_heads, window,
        pages, scale, q.stride(0), q.stride(1), out.stride(0), out.stride(1), table.stride(0),
        GROUP=group, GROUP_PAD=triton.next_power_of_2(group), D=dim, PAGE=page, BLOCK_N=BLOCK_N,
        STAGES=3 if dim == 128 else 4, WINDOW=window > 0, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


def _columns(cache: torch.Tensor) -> TensorDescriptor:
    """A cache as a matrix of tokens, of which 64 numbers of a page are copied at a time."""
    pages, page, kv_heads, dim = cache.shape
    shape, strides = [pages * page, kv_heads * dim], [kv_heads * dim, 1]
    return TensorDescriptor(cache, shape, strides, [page, HALF.value], gl.NVMMASharedLayout(128, 16, 2))
