"""Launch configurations by shape: small static tables, found by `benchmarks.gpu_kernels --sweep` on an H200.

A choice depends on the shape of the weights and on the class of rows (one, up to 16, up to 64), never on the rows
themselves, so that a row's sums do not depend on how many others its class has. `processors` is the device's.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.backends.cuda.kernels.skinny import Shape

ROWS = 64  # a skinny product has at most this many; more go to cuBLAS
FEW = 16  # rows that fit the smallest tile of the tensor cores
TILED_ROWS = FEW  # rows up to which those for fp8 weights with scales for tiles stay half floats
WORDS_ROWS = 640  # from here on four-bit matrices in words are better written out in half floats, for cuBLAS
WIDE = 16384  # channels of one-byte weights from which one row, too, is better off on the tensor cores


def _splits(n: int, k: int, processors: int) -> int:
    """Parts of k: as few as load the processors evenly with tiles of 64 channels."""
    tiles = -(-n // 64)
    if tiles >= 2 * processors:
        return 1
    best, waste = 1, 1e9
    for splits in (1, 2, 3, 4, 6, 8):
        programs = tiles * splits
        if programs > 3 * processors or k // splits < 1024:
            break
        lost = -(-programs // processors) * processors / programs - 1.0 + 0.02 * splits
        if lost < waste:
            best, waste = splits, lost
    return best


def _early(n: int, k: int, processors: int) -> Shape | None:
    """Few rows of half floats and a small product: all programs at once, two or three to a processor, and a quarter of the
    weights loaded while the kernel ahead ends."""
    programs, share = 4 * -(-n // 64), k // 4
    if k % 512 or share <= 256:
        return None
    if processors < programs <= 2 * processors:
        return Shape(64, 128, 4, 3, 4, swap=True, pdl=True, lines=2, early=256)
    if 2 * processors < programs <= 3 * processors:
        return Shape(64, 64, 4, 4, 4, swap=True, pdl=True, lines=2, early=256)
    return None


def skinny_shape(
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    fused: bool = False,
    eight: bool = False,
    processors: int = 132,
) -> Shape:
    """The launch configuration for y [rows, n] = x @ w[n, k].T, weights of `dtype`.

    `fused`: the norm on the way in (one row), or a result without parts: all of k in one program. `eight`: x has one
    byte too.
    """
    # Small products are over before the memory is busy: their weights are asked for while the kernel before them ends.
    small = n < 12288 and k <= 8192 and not gated
    if rows == 1 and dtype.itemsize == 2 and fused:
        if not small:
            return Shape(4, 1024, 4, 1, dot=False, pdl=True)
        if n > 4096 and k % 2048 == 0:
            return Shape(4, 2048, 8, 1, dot=False, pdl=True, ahead=True)
        if n > 4096:
            return Shape(8, 512, 4, 1, dot=False, pdl=True, lines=2)
        return Shape(4, 1024, 2, 1, dot=False, pdl=True, ahead=True)
    if rows == 1 and dtype.itemsize == 1 and fused:
        if gated or n > WIDE:
            return Shape(16, 256, 4, 1, dot=False, pdl=True)
        if n > 4096:
            return Shape(8, 512, 4, 1, dot=False, pdl=True, lines=1)
        return Shape(8 if small else 4, 1024, 4, 1, dot=False, pdl=True, ahead=small)
    whole = gated or fused
    if dtype.itemsize == 1 and not eight and rows > FEW:  # rows and weights must fit the processor's own memory
        return Shape(64, 128, 4, 3, 1 if whole or n > 4096 else 2, pdl=True)
    if dtype.itemsize == 1 and not eight:  # converted on the way: narrow steps, many programs
        if whole or n > 32768:
            return Shape(64, 256, 4, 3, pdl=True)
        return Shape(64, 128, 4, 5, 8, pdl=True) if n <= 4096 else Shape(64, 256, 4, 4, 4, pdl=True)
    step = 128 if dtype.itemsize == 2 else 256
    if rows > FEW:
        if n > 32768:
            return Shape(64, step // 2, 4, 7, swap=True, pdl=True)
        splits = 1 if whole or n > 66 * 64 else 2
        return Shape(64, step, 4, 5 if splits == 2 else 4, splits, swap=True, pdl=True)
    early = _early(n, k, processors) if small and not whole and dtype.itemsize == 2 else None
    if early is not None:
        return early
    splits = 1 if whole else _splits(n, k, processors)
    stages = {1: 3 if eight and gated else 4, 2: 6, 4: 3}.get(splits, 4)
    lines = 4 if splits == 2 and small else 2 if gated or small else 0
    return Shape(64, step, 4, stages, splits, swap=True, pdl=True, lines=0 if eight else lines)


def int4_shape(n: int, k: int, *, gated: bool = False) -> Shape:
    """For 4-bit weights: the unpacking is what takes time, so there are as many programs as fit."""
    if gated or n > 32768:
        return Shape(64, 0, 4, 3, swap=True, pdl=True)
    return Shape(64, 0, 4, 4, 8, swap=True, pdl=True) if n <= 4096 else Shape(64, 0, 4, 3, 4, swap=True, pdl=True)


def words_shape(n: int, k: int, rows: int, *, gated: bool = False, processors: int = 132) -> tuple[Shape, int]:
    """For four-bit weights in words: a launch configuration, and rows of a program."""
    if rows <= 8:
        shape, high = Shape(64, 0, 4, 5, pdl=True, lines=2), 8
    elif rows <= FEW:
        shape, high = Shape(64, 0, 4, 5, pdl=True, lines=2), 16
    elif rows <= ROWS:
        shape, high = Shape(128, 0, 8, 3, pdl=True), 64
    elif rows <= 256:
        shape, high = Shape(128, 0, 8, 3, pdl=True), 128
    else:
        shape, high = Shape(128, 0, 4, 3, pdl=True), 128
    if gated:
        return shape, high
    programs, tiles = -(-n // shape.block_n) * -(-rows // high), k // 128
    most = 8 if rows <= ROWS else 2  # parts are written and read again
    splits = next((s for s in (1, 2, 4) if programs * s >= 4 * processors), most)
    return replace(shape, splits=min(splits, most, max(1, tiles // 4))), high


def tiled_shape(n: int, *, gated: bool = False) -> Shape:
    """For fp8 weights with scales for tiles, and up to 16 rows of half floats: a step is 128 columns, so there are more of them."""
    if gated or n > 32768:
        return Shape(64, 0, 4, 5, pdl=True)
    return Shape(64, 0, 4, 5, 8 if n <= 4096 else 4, pdl=True)


# The first that gives every processor a tile, or the last: rows of a program, and its shape.
TILED_MANY = (
    (64, Shape(128, 0, 4, 4, pdl=True)),
    (64, Shape(64, 0, 4, 5, pdl=True)),
)


def tiled_many(n: int, rows: int, processors: int = 132) -> tuple[Shape, int]:
    """The launch configuration for the same weights and more rows, in fp8."""
    for high, shape in TILED_MANY:
        if -(-rows // high) * -(-n // shape.block_n) >= processors:
            return shape, high
    return TILED_MANY[-1][1], TILED_MANY[-1][0]
