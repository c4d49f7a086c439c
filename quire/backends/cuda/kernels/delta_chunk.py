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
from quire.backends.cuda.kernels.delta import check, fade_of, sigmoid
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.torch.states import Heads, Inputs

COLUMNS = 32  # of a state, in one program
WARPS = 4, 4  # of _prepare, and of _through


def chunk_of(heads: Heads) -> int:
    """C: what fits a processor's own memory beside a state."""
    return 64 if heads.key_dim <= 128 else 32


@triton.jit
def _length(x):
    """What each row of x is divided by to be of length one, as a factor."""
    wide = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)


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
    head = tl.program_id(1)
    lane = tl.arange(0, C)
    row = tl.program_id(0) * C + lane
    key = tl.arange(0, DK_PAD)[None, :]
    there = row < rows
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.load(owner + row, mask=there, other=-1)
    count = tl.load(q_start + seq + 1, mask=there, other=0) - tl.load(q_start + seq, mask=there, other=0)
    if tl.max(count, 0) <= few:  # delta.py's
        return
    first = tl.program_id(0).to(tl.int64) * C
    known = there[:, None] & (key < DK)
    source = qkv + first * stride_x + (head // SHARE) * DK
    k = tl.load(source + KEYS + lane[:, None] * stride_x + key, mask=known, other=0.0)
    unit = _length(k)
    faster = tl.load(decay + head).to(tl.float32)
    shift = tl.load(bias + head).to(tl.float32)
    fade = fade_of(tl.load(a + row.to(tl.int64) * stride_a + head, mask=there, other=0.0).to(tl.float32), faster, shift)
    fade = tl.where(there, fade, 0.0)
    beta = sigmoid(tl.load(b + row.to(tl.int64) * stride_b + head, mask=there, other=0.0).to(tl.float32))
    tl.store(fades + row * heads + head, fade, mask=there)
    upto = (seq[:, None] == seq[None, :]) & (lane[None, :] <= lane[:, None])
    among = tl.where(upto, fade[None, :], 0.0)
    total = tl.sum(among, 1)
    gap = tl.cumsum(among, 1, reverse=True) - among  # of what lies between two rows, the later one among it
    faded = tl.where(upto, tl.exp(tl.where(upto, gap, 0.0)), 0.0)
    # Lengths are taken out of products: what is multiplied is then exactly what the rows hold.
    close = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    inner = tl.where(lane[None, :] < lane[:, None], faded * close * (beta * unit)[:, None] * unit[None, :], 0.0)
    inverse = tl.where(lane[:, None] == lane[None, :], 1.0, 0.0)
    for level in range(LEVELS):  # not unrolled: that would take long to compile
        low = lane >> level
        across = (low % 2 == 1)[:, None] & (low[None, :] == low[:, None] - 1)
        step = tl.dot(tl.where(across, inner, 0.0), inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, step, input_precision=PRECISION)
    spot = lane[:, None] * heads
    beyond = first * heads + head
    weight = tl.dot(inverse * (beta * tl.exp(total) * unit)[None, :], k.to(tl.float32), input_precision=PRECISION)
    tl.store(weights + beyond * DK + spot * DK + key, weight, mask=known)
    inverse = inverse * beta[None, :]
    for piece in tl.static_range((DV + BLOCK - 1) // BLOCK):
        value = piece * BLOCK + tl.arange(0, BLOCK)[None, :]
        inside = there[:, None] & (value < DV)
        from_v = qkv + first * stride_x + 2 * KEYS + head * DV
        v = tl.load(from_v + lane[:, None] * stride_x + value, mask=inside, other=0.0)
        update = tl.dot(inverse, v.to(tl.float32), input_precision=PRECISION)
        tl.store(updates + beyond * DV + spot * DV + value, update, mask=inside)
    q = tl.load(source + lane[:, None] * stride_x + key, mask=known, other=0.0)
    near = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    near = near * faded * (_length(q) * scale)[:, None] * unit[None, :]
    tl.store(mixed + beyond * C + spot * C + lane[None, :], near, mask=there[:, None])


@triton.jit
def _state_after(state, k, unit, u, fade, place, end, lane, PRECISION: tl.constexpr):
    """The state after the rows of a chunk whose `place` is before `end`."""
    inside = place < end
    own = tl.where(inside, fade, 0.0)
    later = tl.where(lane[None, :] > lane[:, None], own[None, :], 0.0)
    still = tl.where(inside, tl.exp(tl.sum(later, 1)) * unit, 0.0)
    added = tl.dot(tl.trans(k.to(tl.float32)), u * still[:, None], input_precision=PRECISION)
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
    count = (stop - start).to(tl.int32)
    last = tl.minimum(tl.load(kv_len + seq), first + count)  # positions from here on only pad the batch
    row_of_table = table + seq * stride_table
    old, known = state_before(row_of_table, first, pages, PAGE)
    where = head * DK * DV + key[:, None] * DV + value[None, :]
    keep = (key < DK)[:, None] & (value < DV)[None, :]
    there = (key < tl.where(known, DK, 0))[:, None] & (value < DV)[None, :]
    state = tl.load(pool + old * stride_page + where, mask=there, other=0.0)
    tl.debug_barrier()  # the state that is kept may replace it
    for chunk in range(start // C, (stop - 1) // C + 1):
        place = first + (chunk * C - start).to(tl.int32) + lane
        own = (place >= first) & (place < last)
        beyond = chunk * C * heads + head
        spot = lane[:, None] * heads
        known_keys = own[:, None] & (key < DK)[None, :]
        known_values = own[:, None] & (value < DV)[None, :]
        source = qkv + chunk * C * stride_x + (head // SHARE) * DK
        fade = tl.load(fades + beyond + lane * heads, mask=own, other=0.0)
        weight = tl.load(weights + beyond * DK + spot * DK + key[None, :], mask=known_keys, other=0.0)
        update = tl.load(updates + beyond * DV + spot * DV + value[None, :], mask=known_values, other=0.0)
        u = update - tl.dot(weight, state, input_precision=PRECISION)
        among = tl.where(lane[None, :] <= lane[:, None], fade[None, :], 0.0)
        q = tl.load(source + lane[:, None] * stride_x + key[None, :], mask=known_keys, other=0.0)
        y = tl.dot(q.to(tl.float32), state, input_precision=PRECISION)
        y = y * (_length(q) * scale * tl.exp(tl.sum(among, 1)))[:, None]
        near = tl.load(mixed + beyond * C + spot * C + lane[None, :], mask=own[:, None], other=0.0)
        y += tl.dot(near, u, input_precision=PRECISION)
        result = out + chunk * C * stride_o + head * DV + lane[:, None] * stride_o + value[None, :]
        here = ((place >= first) & (place < first + count))[:, None] & (value < DV)[None, :]
        tl.store(result, y.to(out.dtype.element_ty), mask=here)
        k = tl.load(source + KEYS + lane[:, None] * stride_x + key[None, :], mask=known_keys, other=0.0)
        unit = _length(k)
        begin = first + (chunk * C - start).to(tl.int32)
        low = tl.maximum(begin, first)
        high = tl.minimum(begin + C, last)
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
                    kept = _state_after(state, k, unit, u, fade, place, until, lane, PRECISION)
                    tl.store(pool + page * stride_page + where, kept, mask=keep)
        state = _state_after(state, k, unit, u, fade, place, high, lane, PRECISION)


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
    check(heads, inputs, out, place)
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
