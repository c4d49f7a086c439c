"""Products with four-bit integers that lie in tiles of words, for any number of rows: w = scale[group] * code + zero[group].

The weights of a tile become bfloat16 in registers, once for all rows of a program (unpack.py): the bytes that are read are those of
the codes. Weights are the left operand: few rows then fill the tensor cores, too.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.gates import KINDS, gate
from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.cuda.kernels.skinny import Shape, _epilogue, _sum_parts, store_part
from quire.backends.cuda.kernels.unpack import INT_TIMES, INTERPRETED, int_tile
from quire.backends.torch.words import IntWords


@triton.jit
def _ask(rows, LINES: tl.constexpr):
    """Ask the L2 for the first LINES tiles of 64 bytes a row."""
    if not INTERPRETED:
        lines = rows[:, None] + tl.arange(0, LINES)[None, :] * 1024
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines.to(tl.int64)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@Launcher
@triton.jit(do_not_specialize=["m"])
def _words_product(
    x, words, scale, y, residual, bias, part, m, n, k, tiles, stride_x, stride_y, stride_r,
    BLOCK_M: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = HIGH // 2 if GATE else HIGH
    GROUPS: tl.constexpr = 128 // GROUP
    high = tl.arange(0, HIGH)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * CHANNELS + high % CHANNELS
    row = tl.where(col < n, col, 0) + high // CHANNELS * n
    first = (row // 64).to(tl.int64) * tiles * 64
    share = tl.cdiv(tiles, SPLITS)
    begin = tl.program_id(2) * share
    end = tl.minimum(tiles, begin + share)
    w_row = words + (first + row % 64) * 16
    s_row = scale + first * GROUPS + row % 64
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if LINES:
            _ask(w_row + begin * 1024, LINES)
        tl.extra.cuda.gdc_wait()
    word = tl.arange(0, 16)
    inner = tl.arange(0, 128)
    here = (rows < m)[:, None]
    x_row = x + rows.to(tl.int64)[:, None] * stride_x + inner[None, :]
    acc = tl.zeros([HIGH, BLOCK_M], tl.float32)
    for tile in range(begin, end):
        four = tl.load(w_row[:, None] + tile * 1024 + word[None, :])
        values = tl.load(x_row + tile * 128, mask=here, other=0.0)
        weights = int_tile(four, s_row + tile * GROUPS * 64, GROUP, HIGH, x.dtype.element_ty)
        acc = tl.dot(weights, tl.trans(values), acc)
    acc = tl.trans(acc) * INT_TIMES
    if GATE:
        acc, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, CHANNELS]), 0, 2, 1))
        acc = gate(acc, up, GATE)
    columns = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    keep = here & (columns < n)[None, :]
    if SPLITS > 1:
        store_part(part + (tl.program_id(2) * m + rows[:, None]) * n + columns[None, :], acc, keep)
    else:
        _epilogue(acc, y, residual, bias, rows[:, None], columns[None, :], keep, n, stride_y, stride_r, BIAS, RESIDUAL)


def words_product(
    x: torch.Tensor,
    w: IntWords,
    y: torch.Tensor,
    shape: Shape,
    *,
    rows: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    act: str = "",
    part: torch.Tensor | None = None,
    add_parts: bool = True,
) -> None:
    """y [m, n] = x [m, k] @ w.T, `rows` of x in a program.

    With an `act` (see gates.py) the weights have 2n rows, gates first. The shape's block_n is rows of w; its block_k is
    not looked at: a step is a tile.
    """
    m, k = x.shape
    n = y.shape[1]
    if w.shape != (2 * n if act else n, k) or y.shape[0] != m or x.stride(1) != 1:
        raise ValueError(f"rows {list(x.shape)} and words {list(w.shape)} into {list(y.shape)}")
    if shape.splits > 1 and (act or part is None):
        raise ValueError("a split sum needs the partial sums' space, and takes no activation")
    single = shape.splits == 1
    ends = {"BIAS": bias is not None, "RESIDUAL": residual is not None}
    res, b = x if residual is None else residual, x if bias is None else bias
    launch: dict[str, object] = {"num_warps": shape.warps, "num_stages": shape.stages}
    if shape.pdl:
        launch["launch_pdl"] = True
    channels = shape.block_n // 2 if act else shape.block_n
    _words_product[(triton.cdiv(n, channels), triton.cdiv(m, rows), shape.splits)](
        x, w.words, w.scale, y, res, b, y if part is None else part, m, n, k, w.words.shape[1], x.stride(0), y.stride(0),
        res.stride(0), BLOCK_M=rows, HIGH=shape.block_n, GROUP=w.group, SPLITS=shape.splits,
        GATE=KINDS[act], PDL=shape.pdl, LINES=shape.lines,
        **(ends if single else {"BIAS": False, "RESIDUAL": False}), **launch,
    )  # fmt: skip
    if not single and add_parts:
        _sum_parts[(triton.cdiv(n, 512), m)](
            part, y, res, b, m, n, y.stride(0), res.stride(0), BLOCK_N=512, SPLITS=shape.splits, num_warps=4, **ends
        )
