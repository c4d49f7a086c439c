"""The gated delta rule for many rows of a sequence at once: as products of C rows, not row by row.

With G_i the sum of the logarithms that a state fades by up to row i, and S the state before the first row of a chunk, the
recurrence of delta.py is

    (1 + A) U = beta (V - e^G K S),       A_ij = beta_i e^(G_i - G_j) k_i k_j  for j < i, else 0
    out_i     = e^G_i S^T q_i + sum over j <= i of e^(G_i - G_j) (q_i k_j) u_j
    S_i       = e^G_i S + sum over j <= i of e^(G_i - G_j) k_j u_j^T           for any row i: a state is kept after any row

`_prepare` does, for all chunks side by side, what needs no state: (1 + A)^-1 times beta V and times beta e^G K, and the factors
of u_j. `_through` then walks along a sequence with a state in registers. Chunks are C rows of the batch, whoever they belong to: rows
of two sequences have nothing to do with one another in A, so no list of chunks is needed, and the grid knows rows alone.

1 + A is inverted by halves: of two neighbouring blocks whose inverses are known, D, that of both is D - D A D. No power of A is
taken, which would grow where keys repeat. Differences of G are summed from what lies between, not subtracted: after a row that
forgets nearly everything G is large.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.conv import Place, state_before
from quire.backends.cuda.kernels.delta import Heads, Inputs, fade_of, sigmoid
from quire.backends.cuda.kernels.launch import Launcher

COLUMNS = 32  # of a state, in one program
WARPS = 4, 4  # of _prepare, and of _through


def chunk_of(heads: Heads) -> int:
    """C: what fits a processor's own memory beside a state."""
    return 64 if heads.key_dim <= 128 else 32


@triton.jit
def _unit(x):
    """Rows of length one, nearly."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]


@Launcher
@triton.jit(
    do_not_specialize=["rows", "few"],
    do_not_specialize_on_alignment=["q_start", "owner"],
)
def _prepare(
    qkv, a, b, decay, bias, fades, weights, updates, mixed, q_start, owner, rows, few, scale, heads,
    stride_x, stride_a, stride_b,
    KEYS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * C + tl.arange(0, C)
    head = tl.program_id(1)
    lane = tl.arange(0, C)
    key = tl.arange(0, DK_PAD)[None, :]
    there = row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(owner + row, mask=there, other=-1).to(tl.int64)
    count = tl.load(q_start + seq + 1, mask=there, other=0) - tl.load(q_start + seq, mask=there, other=0)
    if tl.max(count, 0) <= few:  # delta.py's
        return
    known = there[:, None] & (key < DK)
    source = qkv + row[:, None] * stride_x + (head // SHARE) * DK + key
    k = _unit(tl.load(source + KEYS, mask=known, other=0.0).to(tl.float32))
    faster = tl.load(decay + head).to(tl.float32)
    shift = tl.load(bias + head).to(tl.float32)
    fade = fade_of(tl.load(a + row * stride_a + head, mask=there, other=0.0).to(tl.float32), faster, shift)
    fade = tl.where(there, fade, 0.0)
    beta = sigmoid(tl.load(b + row * stride_b + head, mask=there, other=0.0).to(tl.float32))
    tl.store(fades + row * heads + head, fade, mask=there)
    # Rows are in the order of sequences: of one sequence are those with its number.
    own = tl.load(owner + tl.program_id(0) * C + lane, mask=tl.program_id(0) * C + lane < rows, other=-1).to(tl.int64)
    same = seq[:, None] == own[None, :]
    upto = same & (lane[None, :] <= lane[:, None])
    before = same & (lane[None, :] < lane[:, None])
    among = tl.where(upto, fade[None, :], 0.0)
    total = tl.sum(among, 1)
    gap = tl.dot(among, tl.where(lane[:, None] > lane[None, :], 1.0, 0.0), input_precision="tf32x3")
    faded = tl.where(upto, tl.exp(tl.where(upto, gap, 0.0)), 0.0)
    close = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    inner = tl.where(before, beta[:, None] * faded * close, 0.0)
    inverse = tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)
    for level in range(LEVELS):  # not unrolled: that would take long to compile
        low = lane >> level
        across = (low % 2 == 1)[:, None] & (low[None, :] == low[:, None] - 1)
        step = tl.dot(tl.where(across, inner, 0.0), inverse, input_precision="tf32x3")
        inverse -= tl.dot(inverse, step, input_precision="tf32x3")
    spot = row[:, None] * heads + head
    weight = tl.dot(inverse, k * (beta * tl.exp(total))[:, None], input_precision=PRECISION)
    tl.store(weights + spot * DK + key, weight, mask=known)
    for piece in tl.static_range((DV + BLOCK - 1) // BLOCK):
        value = piece * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = there[:, None] & (value < DV)
        v = tl.load(qkv + row[:, None] * stride_x + 2 * KEYS + head * DV + value, mask=inside, other=0.0)
        update = tl.dot(inverse, v.to(tl.float32) * beta[:, None], input_precision=PRECISION)
        tl.store(updates + spot * DV + value, update, mask=inside)
    q = _unit(tl.load(source, mask=known, other=0.0).to(tl.float32)) * scale
    near = faded * tl.dot(q, tl.trans(k), input_precision=PRECISION)
    tl.store(mixed + spot * C + lane[None, :], near, mask=there[:, None])


@triton.jit
def _state_after(state, k, u, fade, place, end, lane, PRECISION: tl.constexpr):
    """The state after the rows of a chunk whose `place` is before `end`."""
    inside = place < end
    own = tl.where(inside, fade, 0.0)
    later = tl.where(lane[None, :] > lane[:, None], own[None, :], 0.0)
    still = tl.where(inside, tl.exp(tl.sum(later, 1)), 0.0)
    added = tl.dot(tl.trans(k * still[:, None]), u, input_precision=PRECISION)
    return state * tl.exp(tl.sum(own, 0)) + added


@Launcher
@triton.jit(
    do_not_specialize=["few", "pages", "stride_table"],
    do_not_specialize_on_alignment=["table", "q_start", "pos", "kv_len"],
)
def _through(
    qkv, fades, weights, updates, mixed, pool, out, table, q_start, pos, kv_len, few, pages, scale, heads,
    stride_x, stride_o, stride_page, stride_table,
    KEYS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, C: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, C)
    key = tl.arange(0, DK_PAD)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(q_start + seq).to(tl.int64)
    stop = tl.load(q_start + seq + 1).to(tl.int64)
    if stop - start <= few:
        return
    first = tl.load(pos + start)
    last = tl.minimum(tl.load(kv_len + seq), first + (stop - start))  # positions from here on only pad the batch
    row_of_table = table + seq * stride_table
    old, known = state_before(row_of_table, first, pages, PAGE)
    where = head * DK * DV + key[:, None] * DV + value[None, :]
    keep = (key < DK)[:, None] & (value < DV)[None, :]
    there = (key < tl.where(known, DK, 0))[:, None] & (value < DV)[None, :]
    state = tl.load(pool + old * stride_page + where, mask=there, other=0.0)
    tl.debug_barrier()  # the state that is kept may replace it
    for chunk in range(start // C, (stop - 1) // C + 1):
        row = chunk * C + lane
        place = first + (row - start)
        own = (row >= start) & (place < last)
        spot = row[:, None] * heads + head
        known_keys = own[:, None] & (key < DK)[None, :]
        known_values = own[:, None] & (value < DV)[None, :]
        source = qkv + row[:, None] * stride_x + (head // SHARE) * DK + key[None, :]
        fade = tl.load(fades + row * heads + head, mask=own, other=0.0)
        weight = tl.load(weights + spot * DK + key[None, :], mask=known_keys, other=0.0)
        update = tl.load(updates + spot * DV + value[None, :], mask=known_values, other=0.0)
        u = update - tl.dot(weight, state, input_precision=PRECISION)
        among = tl.where(lane[None, :] <= lane[:, None], fade[None, :], 0.0)
        q = _unit(tl.load(source, mask=known_keys, other=0.0).to(tl.float32)) * scale
        y = tl.dot(q * tl.exp(tl.sum(among, 1))[:, None], state, input_precision=PRECISION)
        near = tl.load(mixed + spot * C + lane[None, :], mask=own[:, None], other=0.0)
        y += tl.dot(near, u, input_precision=PRECISION)
        result = out + row[:, None] * stride_o + head * DV + value[None, :]
        here = ((row >= start) & (row < stop))[:, None] & (value < DV)[None, :]
        tl.store(result, y.to(out.dtype.element_ty), mask=here)
        k = _unit(tl.load(source + KEYS, mask=known_keys, other=0.0).to(tl.float32))
        low = tl.maximum(first + (chunk * C - start), first)
        high = tl.minimum(first + (chunk * C - start) + C, last)
        page_first = low // PAGE
        index = page_first + tl.arange(0, SPAN)
        ends = tl.minimum((index + 1) * PAGE, last)
        mine = (ends > low) & (ends <= high) & (index * PAGE < last)
        found = tl.load(row_of_table + index, mask=mine, other=-1)
        if tl.max(tl.where((found >= 0) & (found < pages), 1, 0), 0) > 0:
            for i in range(SPAN):
                until = tl.minimum((page_first + i + 1) * PAGE, last)
                filled = (until > low) & (until <= high) & ((page_first + i) * PAGE < last)
                page = tl.load(row_of_table + page_first + i, mask=filled, other=-1).to(tl.int64)
                if (page >= 0) & (page < pages):
                    kept = _state_after(state, k, u, fade, place, until, lane, PRECISION)
                    tl.store(pool + page * stride_page + where, kept, mask=keep)
        state = _state_after(state, k, u, fade, place, high, lane, PRECISION)


def delta_rule_of_many(
    inputs: Inputs,
    out: torch.Tensor,
    place: Place,
    heads: Heads,
    *,
    owner: torch.Tensor,
    few: int,
    pdl: bool = False,
) -> None:
    """out [T, H Dv] of every sequence with more than `few` rows; rows of others are left alone. owner [T]: the sequence of each row."""
    heads.check(inputs, out, place)
    qkv, chunk, device = inputs.qkv, chunk_of(heads), out.device
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    block = max(16, min(COLUMNS, triton.next_power_of_2(heads.dim)))
    fades, weights, updates, mixed = (
        torch.empty(tokens, heads.heads, n, dtype=torch.float32, device=device)
        for n in (1, heads.key_dim, heads.dim, chunk)
    )
    sizes: dict[str, object] = {
        "KEYS": heads.keys, "SHARE": heads.heads // heads.key_heads, "DK": heads.key_dim,
        "DK_PAD": max(16, triton.next_power_of_2(heads.key_dim)), "DV": heads.dim, "BLOCK": block, "C": chunk, "PDL": pdl,
        # A state is float32, and so is what is folded into it: numbers of 11 bits are as fine as half floats are.
        "PRECISION": "tf32x3" if qkv.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    launch: dict[str, object] = {"num_stages": 1}
    if pdl:
        launch["launch_pdl"] = True
    scale = heads.key_dim**-0.5
    _prepare[(triton.cdiv(tokens, chunk), heads.heads)](
        qkv, inputs.a, inputs.b, inputs.decay, inputs.bias, fades, weights, updates, mixed, place.q_start, owner, tokens, few,
        scale, heads.heads, qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0), **sizes,
        LEVELS=chunk.bit_length() - 1, num_warps=WARPS[0], **launch,
    )  # fmt: skip
    pool, table = place.numbers, place.table
    _through[(table.shape[0], heads.heads, triton.cdiv(heads.dim, block))](
        qkv, fades, weights, updates, mixed, pool, out, table, place.q_start, place.pos, place.kv_len, few, pool.shape[0],
        scale, heads.heads, qkv.stride(0), out.stride(0), pool.stride(0), table.stride(0), **sizes, PAGE=place.page_size,
        SPAN=triton.next_power_of_2(chunk // place.page_size + 1), num_warps=WARPS[1], **launch,
    )  # fmt: skip
