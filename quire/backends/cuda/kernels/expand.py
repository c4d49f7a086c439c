"""Quantized matrices written out in half floats, for products with so many rows that cuBLAS is worth the detour."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.unpack import INT_TIMES, int_tile
from quire.backends.torch.quantized import Int4, Scaled
from quire.backends.torch.words import IntWords

_HEIGHT = 32  # rows of four-bit codes that a program writes


@triton.jit
def _from_int4(
    packed, scale, zero, out, n, stride_w, stride_s, stride_o, GROUP: tl.constexpr, HEIGHT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    pair = tl.program_id(1)
    lane = tl.arange(0, GROUP)
    keep = (row < n)[:, None]
    code = tl.load(packed + row.to(tl.int64)[:, None] * stride_w + (pair * GROUP + lane)[None, :], mask=keep, other=0)
    target = out + row.to(tl.int64)[:, None] * stride_o + (pair * 2 * GROUP + lane)[None, :]
    for half in tl.static_range(2):
        first = (2 * pair + half) * stride_s + row
        s = tl.load(scale + first, mask=row < n, other=0.0).to(tl.float32)[:, None]
        z = tl.load(zero + first, mask=row < n, other=0.0).to(tl.float32)[:, None]
        value = ((code >> (4 * half)) & 15).to(tl.float32) * s + z
        tl.store(target + half * GROUP, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _from_scaled(codes, scale, out, k, stride_w, stride_o, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(codes + row * stride_w + col, mask=col < k, other=0.0).to(tl.float32) * tl.load(scale + row)
    tl.store(out + row * stride_o + col, value.to(out.dtype.element_ty), mask=col < k)


@triton.jit
def _from_words(words, scale, out, tiles, stride_o, GROUP: tl.constexpr, LIKE: tl.constexpr):
    high = tl.arange(0, 64)
    tile = tl.program_id(1)
    first = (tl.program_id(0).to(tl.int64) * tiles + tile) * 64 + high
    four = tl.load(words + first[:, None] * 16 + tl.arange(0, 16)[None, :])
    groups: tl.constexpr = 128 // GROUP
    s_row = scale + (tl.program_id(0).to(tl.int64) * tiles + tile) * 64 * groups + high
    numbers = int_tile(four, s_row, GROUP, 64, LIKE).to(tl.float32) * INT_TIMES
    row = tl.program_id(0).to(tl.int64) * 64 + high
    where = out + row[:, None] * stride_o + tile * 128 + tl.arange(0, 128)[None, :]
    tl.store(where, numbers.to(out.dtype.element_ty))


def expand(weight: Scaled | Int4 | IntWords, out: torch.Tensor) -> None:
    """out [n, k] = the matrix, rounded to out's type."""
    n, k = weight.shape
    if out.shape != (n, k):
        raise ValueError(f"a matrix {[n, k]} into {list(out.shape)}")
    if isinstance(weight, Scaled):
        _from_scaled[(n, triton.cdiv(k, 1024))](
            weight.codes, weight.scale, out, k, weight.codes.stride(0), out.stride(0), BLOCK=1024, num_warps=4
        )
        return
    if isinstance(weight, IntWords):
        like = tl.float16 if out.dtype == torch.float16 else tl.bfloat16
        _from_words[(n // 64, k // 128)](
            weight.words, weight.scale, out, k // 128, out.stride(0), GROUP=weight.group, LIKE=like, num_warps=4
        )
        return
    _from_int4[(triton.cdiv(n, _HEIGHT), k // (2 * weight.group))](
        weight.packed, weight.scale, weight.zero, out, n, weight.packed.stride(0), weight.scale.stride(0),
        out.stride(0), GROUP=weight.group, HEIGHT=_HEIGHT, num_warps=4,
    )  # fmt: skip
