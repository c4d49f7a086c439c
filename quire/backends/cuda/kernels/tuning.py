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
    n: int, k: int, rows: int, dtype: torch.dtype, *, swiglu: bool = False, fused: bool = False, processors: int = 132
) -> Shape:
    """For y [rows, n] = x @ w[n, k].T. `fused`: with the norm on the way in, or wanting no parts: all of k at once."""
    if rows == 1 and dtype.itemsize == 2:
        return (
            Shape(8, 512, 4, 1, dot=False, pdl=True)
            if fused and not swiglu and n < 16384
            else Shape(4, 1024, 4, 1, dot=False, pdl=True)
        )
    wide = 256 if dtype.itemsize == 1 else 128
    splits = 1 if swiglu or fused else _splits(n, k, 64, processors)
    return Shape(64, wide, 4, 5 if splits == 2 else 4, splits, swap=True, pdl=True)
