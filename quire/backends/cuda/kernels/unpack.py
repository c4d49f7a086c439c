"""Tiles of four-bit matrices (backends/torch/words.py) as numbers in registers, laid out as a tensor core takes its left operand.

A word of eight codes becomes four registers of two bfloat16 each, by masks, shifts and one product; nothing is converted or moved.
So that no scale a file may have overflows on the way, the numbers are a power of two less than they should be, which whoever sums
with them makes up for at the end: MX_TIMES and INT_TIMES. In Triton's interpreter, which has neither bfloat16 nor inline assembly, the same bits become float32 and then the rows' own type.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))
SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000: the signs of two bfloat16
SIZES = tl.constexpr(0x01C001C0)  # the bits of both that a code of MXFP4 gives beside its sign
FIELDS = tl.constexpr(-0x7E3F7E40)  # 0x81C081C0: all of a code
NIBBLES = tl.constexpr(0x00F000F0)  # a code of an integer where it is 2 ** -129 of itself


MX_TIMES = tl.constexpr(1.0 if knobs.runtime.interpret else 2.0**64)
INT_TIMES = tl.constexpr(1.0 if knobs.runtime.interpret else 2.0**18)


@triton.jit
def _two(bits, like: tl.constexpr):
    """int32 [N, 16], two bfloat16 in each, as numbers [N, 16, 2]."""
    if INTERPRETED:
        low = (bits << 16).to(tl.float32, bitcast=True)
        high = (bits & -65536).to(tl.float32, bitcast=True)
        return tl.join(low, high).to(like)
    low = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _scaled(bits, factor, like: tl.constexpr):
    """The same, times the two bfloat16 in each of factor int32 [N]. Exact where factors are powers of two."""
    if INTERPRETED:
        numbers = _two(bits, tl.float32) * (factor << 16).to(tl.float32, bitcast=True)[:, None, None]
        return (numbers * 1.8446744073709552e19).to(like)
    wide = tl.broadcast_to(factor[:, None], bits.shape)
    product = tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [bits, wide], dtype=tl.int32, is_pure=True, pack=1
    )
    return _two(product, like)


@triton.jit
def _mx_bits(words, Q: tl.constexpr):
    """Code Q of both halves of each word, as two bfloat16 that are 2 ** -126 of its value."""
    if Q == 0:
        bits = words & FIELDS
    elif Q == 1:
        bits = (words << 3) & FIELDS
    elif Q == 2:
        bits = ((words << 1) & SIGNS) | ((words << 6) & SIZES)
    else:
        bits = ((words << 2) & SIGNS) | ((words >> 3) & SIZES)
    return bits


@triton.jit
def _mx_quarter(words, scale, Q: tl.constexpr, like: tl.constexpr):
    factor = ((scale >> (8 * Q)) & 255) * 0x00800080  # an exponent in its place, twice
    return _scaled(_mx_bits(words, Q), factor, like)


@triton.jit
def _int_bits(words, Q: tl.constexpr):
    """Code Q of both halves of each word, as two bfloat16 that are 2 ** -129 of it: subnormal up to 7, and then not, in one line."""
    if Q == 0:
        bits = (words << 4) & NIBBLES
    elif Q == 1:
        bits = words & NIBBLES
    else:
        bits = (words >> (4 * Q - 4)) & NIBBLES
    return bits


@triton.jit
def scale_and_zero(pair):
    """int32 [N] of two float16 each, as two of float32."""
    scale = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero


@triton.jit
def _twice(number):
    """float32 [N] as int32: the nearest bfloat16 in both halves."""
    return (number.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x00010001


@triton.jit
def _int_quarter(words, pair, Q: tl.constexpr, like: tl.constexpr):
    """scale * code + zero, rounded once [N, 16, 2]; the scale is rounded to bfloat16, and the zero so that 8 stays where it was."""
    scale, zero = scale_and_zero(pair)
    bits = _int_bits(words, Q)
    if INTERPRETED:
        codes = _two(bits, tl.float32) * 4.0 * 1.7014118346046923e38
        return (codes * scale[:, None, None] + zero[:, None, None]).to(like)
    near = scale.to(tl.bfloat16).to(tl.float32)
    zero = (zero + 8.0 * (scale - near)) * 3.814697265625e-06  # 2 ** -18 of it
    factor = _twice(
        near * 2.596148429267414e33
    )  # 2 ** 111 of it, which makes up for the 2 ** -129 of a code but for that
    made = tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r",
        [bits, tl.broadcast_to(factor[:, None], bits.shape), tl.broadcast_to(_twice(zero)[:, None], bits.shape)],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return _two(made, like)


@triton.jit
def int_tile(words, s_row, GROUP: tl.constexpr, N: tl.constexpr, like: tl.constexpr):
    """Words [N, 16] of integers as numbers [N, 128]; s_row [N]: where the scales and zeros of their groups are, 64 apart."""
    a = tl.load(s_row)
    b, c, d = a, a, a
    if GROUP == 64:
        c = tl.load(s_row + 64)
        d = c
    elif GROUP == 32:
        b = tl.load(s_row + 64)
        c = tl.load(s_row + 128)
        d = tl.load(s_row + 192)
    return _together(
        _int_quarter(words, a, 0, like),
        _int_quarter(words, b, 1, like),
        _int_quarter(words, c, 2, like),
        _int_quarter(words, d, 3, like),
        N,
    )


@triton.jit
def _together(a, b, c, d, N: tl.constexpr):
    """Four quarters [N, 16, 2] as a tile [N, 128]: nothing moves, each thread's registers are those it had."""
    pairs = tl.join(tl.join(a, b), tl.join(c, d))  # [N, 16, 2, low bit of the quarter, high bit]
    return tl.reshape(tl.permute(pairs, 0, 4, 3, 1, 2), [N, 128])


@triton.jit
def mx_tile(words, scale, N: tl.constexpr, like: tl.constexpr):
    """Words [N, 16] and factors [N] of MXFP4 as their numbers [N, 128]."""
    return _together(
        _mx_quarter(words, scale, 0, like),
        _mx_quarter(words, scale, 1, like),
        _mx_quarter(words, scale, 2, like),
        _mx_quarter(words, scale, 3, like),
        N,
    )
