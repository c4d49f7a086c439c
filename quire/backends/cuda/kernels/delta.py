"""The gated delta rule row by row: a program carries some columns of one head's state along one sequence.

    S *= exp(decay * softplus(a + bias));  S += k (sigmoid(b) (v - S^T k))^T;  out = S^T q / sqrt(Dk)

A column of S needs nothing of the others, so that a head is cut into programs. A step reads the state before its first row and
keeps one after each page that it fills, where the page table has room for it (`conv` in backends/ops.py). One compiled
kernel serves a decode row and a prompt of any length, so a row's bits do not depend on its batch or chunk. delta_chunk.py
is faster for many rows, and sums in another order.
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
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.torch.states import Heads, Inputs

EVERY = 1 << 30  # rows: no sequence has more
COLUMNS = 64  # of a state, in one program: measured for 1 to 256 rows
WARPS = 4


def check(heads: Heads, inputs: Inputs, out: torch.Tensor, place: Place) -> None:
    """Raises where these are not what such heads are given."""
    tokens, h = inputs.qkv.shape[0], heads
    wanted = (tokens, 2 * h.keys + h.heads * h.dim), (tokens, h.heads), (tokens, h.heads)
    given = inputs.qkv.shape, inputs.a.shape, inputs.b.shape
    size = h.heads * h.key_dim * h.dim
    if given != wanted or out.shape != (tokens, h.heads * h.dim) or place.at + size > place.pool.shape[1]:
        raise ValueError(f"the delta rule of {heads} over {[list(x) for x in given]} into {list(out.shape)}")


@triton.jit
def fade_of(a, decay, bias):
    """The logarithm of what a state fades by."""
    x = a + bias
    return decay * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@Launcher
@triton.jit(
    do_not_specialize=["most", "pages", "stride_table"],
    do_not_specialize_on_alignment=["table", "q_start", "pos", "kv_len"],
)
def _along(
    qkv, a, b, decay, bias, pool, out, table, q_start, pos, kv_len, most, pages, scale,
    stride_x, stride_a, stride_b, stride_o, stride_page, stride_table,
    KEYS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DK_PAD: tl.constexpr, DV: tl.constexpr,
    BLOCK: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, DK_PAD)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    start = tl.load(q_start + seq).to(tl.int64)
    count = tl.load(q_start + seq + 1) - start
    if (count == 0) | (count > most):
        return
    first = tl.load(pos + start)
    end = tl.minimum(tl.load(kv_len + seq), first + count)
    row_of_table = table + seq * stride_table
    old, known = state_before(row_of_table, first, pages, PAGE)
    where = head * DK * DV + key[:, None] * DV + value[None, :]
    keep = (key < DK)[:, None] & (value < DV)[None, :]
    there = (key < tl.where(known, DK, 0))[:, None] & (value < DV)[None, :]
    state = tl.load(pool + old * stride_page + where, mask=there, other=0.0)
    tl.debug_barrier()  # the state that is kept may replace it
    faster = tl.load(decay + head).to(tl.float32)
    shift = tl.load(bias + head).to(tl.float32)
    from_q = qkv + (head // SHARE) * DK + key
    from_v = qkv + 2 * KEYS + head * DV + value
    for i in range(end - first):
        row = start + i
        q = tl.load(from_q + row * stride_x, mask=key < DK, other=0.0).to(tl.float32)
        k = tl.load(from_q + KEYS + row * stride_x, mask=key < DK, other=0.0).to(tl.float32)
        v = tl.load(from_v + row * stride_x, mask=value < DV, other=0.0).to(tl.float32)
        fade = tl.exp(fade_of(tl.load(a + row * stride_a + head).to(tl.float32), faster, shift))
        beta = sigmoid(tl.load(b + row * stride_b + head).to(tl.float32))
        q = q * (scale / tl.sqrt(tl.sum(q * q, 0) + 1e-6))
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, 0) + 1e-6))
        state = state * fade
        change = beta * (v - tl.sum(state * k[:, None], 0))
        state += k[:, None] * change[None, :]
        y = tl.sum(state * q[:, None], 0)
        tl.store(out + row * stride_o + head * DV + value, y.to(out.dtype.element_ty), mask=value < DV)
        at = first + i + 1
        if (at % PAGE == 0) | (at == end):
            page = tl.load(row_of_table + (at - 1) // PAGE).to(tl.int64)
            if (page >= 0) & (page < pages):
                tl.store(pool + page * stride_page + where, state, mask=keep)
    for i in range(end - first, count):  # rows that only pad the batch: some number
        nothing = tl.zeros([BLOCK], tl.float32).to(out.dtype.element_ty)
        tl.store(out + (start + i) * stride_o + head * DV + value, nothing, mask=value < DV)


def delta_rule(
    inputs: Inputs, out: torch.Tensor, place: Place, heads: Heads, *, most: int = EVERY, pdl: bool = False
) -> None:
    """out [T, H Dv] of every sequence with up to `most` rows; rows of longer ones are left alone."""
    check(heads, inputs, out, place)
    if inputs.qkv.shape[0] == 0:
        return
    pool, table = place.numbers, place.table
    block = min(COLUMNS, triton.next_power_of_2(heads.dim))
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _along[(table.shape[0], heads.heads, triton.cdiv(heads.dim, block))](
        inputs.qkv, inputs.a, inputs.b, inputs.decay, inputs.bias, pool, out, table, place.q_start, place.pos,
        place.kv_len, most, pool.shape[0], heads.key_dim**-0.5, inputs.qkv.stride(0), inputs.a.stride(0),
        inputs.b.stride(0), out.stride(0), pool.stride(0), table.stride(0), KEYS=heads.keys,
        SHARE=heads.heads // heads.key_heads, DK=heads.key_dim, DK_PAD=triton.next_power_of_2(heads.key_dim),
        DV=heads.dim, BLOCK=block, PAGE=place.page_size, PDL=pdl, num_warps=WARPS, **launch,
    )  # fmt: skip
