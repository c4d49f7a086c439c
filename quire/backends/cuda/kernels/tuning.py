"""Which launch configuration a shape gets: small static tables, found by `benchmarks.gpu_kernels --sweep` on an H200.

A choice depends on the shape of the weights and, for skinny products, on whether there is one row or more: never on how
many more, so that rows two to sixteen of a step are computed alike.
"""

from __future__ import annotations

import torch

from quire.backends.cuda.kernels.skinny import Shape

ROWS = 16  # a skinny product has at most this many; more go to cuBLAS


def _splits(n: int, k: int, block_n: int, processors: int) -> int:
    """Parts of k that give each processor about one program (two for small ones), evenly."""
    tiles = -(-n // block_n)
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


def skinny_shape(
    n: int,
    k: int,
    rows: int,
    dtype: torch.dtype,
    *,
    swiglu: bool = False,
    fused: bool = False,
    eight: bool = False,
    processors: int = 132,
) -> Shape:
    """For y [rows, n] = x @ w[n, k].T, weights of `dtype`.

    `fused`: the norm on the way in, or a result without parts: all of k in one program. `eight`: x is fp8 too.
    """
    if rows == 1 and dtype.itemsize == 2 and fused:
        return (
            Shape(8, 512, 4, 1, dot=False, pdl=True) if 4096 < n < 12288 else Shape(4, 1024, 4, 1, dot=False, pdl=True)
        )
    splits = 1 if swiglu or fused else _splits(n, k, 64, processors)
    stages = {1: 4, 2: 6, 3: 4, 4: 3}.get(splits, 4)
    if dtype.itemsize == 2:
        return Shape(64, 128, 4, stages, splits, swap=True, pdl=True)
    if eight:
        return Shape(64, 256, 4, min(stages, 4) if swiglu else stages, splits, swap=True, pdl=True)
    return Shape(64, 256, 4, 4, 1 if swiglu or fused else max(4, splits), pdl=True)


def int4_shape(n: int, k: int, *, swiglu: bool = False) -> Shape:
    """For 4-bit weights: the unpacking is what takes time, so there are as many programs as fit."""
    return Shape(64, 0, 4, 3 if swiglu else 4, 1 if swiglu or n > 32768 else 4)
