"""Rows of `benchmarks.gpu_kernels` for fp8 weights with scales for tiles: checked and timed at the shapes of an 8B model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_sweep import PROJECTIONS, tiled_calls
from benchmarks.gpu_timing import Row, graph_seconds, off
from quire.backends.cuda.kernels.skinny import Shape
from quire.backends.cuda.kernels.tiled import quantize_groups, tiled_product
from quire.backends.cuda.kernels.tuning import TILED_MANY, tiled_many, tiled_shape
from quire.backends.cuda.tiles import GroupedRows, library_product, library_takes
from quire.backends.torch.quantized import WIDTH, Tiled


def tiled() -> Iterator[Row]:
    """fp8 with scales for tiles of 128 by 128. Few rows of bf16: bytes; more, in fp8: operations, and the launch that makes such rows.

    cuBLASLt at the same shapes, where it takes such scales, and every configuration of our own, to see whether the choice is right.
    """
    names = [name for name in PROJECTIONS if not name.startswith("head")]
    for m in (1, 16):
        for name in names:
            n, k, glu, _, _ = PROJECTIONS[name]
            shape = tiled_shape(n, gated=glu)
            calls, work = tiled_calls(name, shape, m, 0, small=False)
            yield Row(f"fp8 tiles m={m} {name}", tiled_error(n, k, m, shape, 0, glu), graph_seconds(calls), work)
            del calls
    for m in (64, 256, 2048):
        k = 4096
        x = torch.randn(m, k, device="cuda").bfloat16()
        made = GroupedRows.empty(m, k, x.device)
        seconds = graph_seconds([lambda x=x, r=made: quantize_groups(x, r.codes, r.scale)] * 16)
        yield Row(f"rows to fp8 in groups {m} x {k}", None, seconds, x.nbytes + made.codes.nbytes)
        for name in names:
            n, k, glu, _, _ = PROJECTIONS[name]
            n = 2 * n if glu else n
            for high, shape in TILED_MANY:
                mark = " <" if (shape, high) == tiled_many(n, m) else ""
                calls, work = tiled_calls(name, shape, m, high, small=False)
                label = f"fp8 tiles, fp8 rows m={m} {name} {high}x{shape.block_n}{mark}"
                many = m > 64  # else the weights' bytes are the floor
                error, seconds = tiled_error(n, k, m, shape, high, False), graph_seconds(calls)
                yield Row(label, error, seconds, work if many else n * k, many, many)
                del calls
            yield from tiled_library(m, n, k, name)


def tiled_error(n: int, k: int, m: int, shape: Shape, high: int, glu: bool) -> float:
    """A product of the full depth (k) and up to 4,096 channels, against float64."""
    n = min(n, 4096)
    w, x = Tiled.empty(2 * n if glu else n, k, WIDTH, torch.device("cuda")), torch.randn(m, k, device="cuda").bfloat16()
    w.fill(torch.randn(w.shape, device="cuda") * k**-0.5)
    y, options = torch.full((m, n), float("nan"), device="cuda").bfloat16(), dict[str, Any]()
    exact = x.double()
    if high:
        made = GroupedRows.of(x)
        x, exact, options = made.codes, made.plain(torch.float32).double(), {"x_scale": made.scale, "rows": high}
    if shape.splits > 1:
        options["part"] = torch.empty(shape.splits, m, n, device="cuda")
    tiled_product(x, w, y, shape, act="swiglu" if glu else "", **options)
    want = exact @ w.dequantize().double().T
    if glu:
        gate, up = want.chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
    return off(y, want)


def tiled_library(m: int, n: int, k: int, name: str) -> Iterator[Row]:
    """The same product through cuBLASLt, in versions that take scales for 128 columns and for 128 by 128."""
    w, x = Tiled.empty(n, k, WIDTH, torch.device("cuda")), torch.randn(m, k, device="cuda").bfloat16()
    w.fill(torch.randn(n, k, device="cuda") * k**-0.5)
    made, y = GroupedRows.of(x), torch.empty(m, n, device="cuda").bfloat16()

    if not library_takes(y.dtype, y.device):
        print("cuBLASLt takes no such scales here", flush=True)
        return
    call = partial(library_product, made, w, y)
    call()
    want = made.plain(torch.float32) @ w.dequantize().T
    yield Row(f"cuBLASLt tiles m={m} {name}", off(y, want), graph_seconds([call] * 8), 2.0 * m * n * k, True, True)
