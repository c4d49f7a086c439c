"""A mixture of experts on the GPU: five launches, whose grids depend on the number of rows alone.

    route, place      who goes where, and the pairs of (row, choice) in the order of experts
    grouped, twice    gate and up with their activation, then down; a row of results for each pair
                      (weights with scales for tiles, and many rows: each after a launch that makes fp8 of its rows)
    add_shares        the pairs of a row, weighted, in the order of experts

Nothing is asked of the device, so a captured step serves any routing, and nothing is added by atomics.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.backends.cuda.kernels.grouped import TILED, add_shares, grouped, tile_of
from quire.backends.cuda.kernels.route import place, route
from quire.backends.cuda.tiles import GroupedRows
from quire.backends.torch.experts import Mixture
from quire.backends.torch.quantized import Int4, Mixed, Scaled, Tiled

_SPACE = 1 << 29  # bytes that the results of pairs may take; more rows than fit are done in turns


def fits(m: Mixture, dtype: torch.dtype) -> bool:
    """Whether there are kernels for these weights: quantized ones are multiplied with half floats only."""
    kinds = [isinstance(w, Scaled | Tiled | Int4) for w in (m.both, m.down)]
    return not any(isinstance(w, Mixed) for w in (m.both, m.down)) and (dtype != torch.float32 or not any(kinds))


def mix(x: torch.Tensor, logits: torch.Tensor, m: Mixture, *, pdl: bool = False) -> torch.Tensor:
    """x [T, d] through the experts that its logits choose."""
    rows, top = x.shape[0], m.routing.top
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    experts = torch.empty(rows, top, dtype=torch.int32, device=x.device)
    shares = torch.empty(rows, top, dtype=torch.float32, device=x.device)
    route(logits, m.routing_bias, m.routing, experts, shares, pdl=pdl)
    step = max(1, _SPACE // (top * (x.shape[1] + m.inner) * x.element_size()))
    for first in range(0, rows, step):
        own = slice(first, min(rows, first + step))
        _through(x[own], experts[own], shares[own], m, out[own], pdl)
    return out


def _through(
    x: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor, m: Mixture, out: torch.Tensor, pdl: bool
) -> None:
    both, down = m.both, m.down
    assert not isinstance(both, Mixed) and not isinstance(down, Mixed)  # see fits
    pairs, top = experts.numel(), experts.shape[1]
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    starts = torch.empty(m.count + 1, dtype=torch.int32, device=x.device)
    place(experts, order, starts, pdl=pdl)
    inner = torch.empty(pairs, m.inner, dtype=x.dtype, device=x.device)
    _grouped(x, both, inner, order, starts, pdl, top=top, gated=True, limit=m.limit, bias=m.both_bias)
    results = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
    _grouped(inner, down, results, order, starts, pdl, bias=m.down_bias)
    add_shares(results, shares, out, pdl=pdl)


def _grouped(
    x: torch.Tensor,
    w: torch.Tensor | Scaled | Tiled | Int4,
    y: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    pdl: bool,
    **options: Any,
) -> None:
    """A product of pairs, with rows in fp8 where experts have so many that the tensor cores are what takes time."""
    tile = tile_of(x.dtype, order.shape[0], starts.shape[0] - 1, isinstance(w, Tiled))
    if isinstance(w, Tiled) and tile == TILED[-1]:
        made = GroupedRows.of(x, pdl=pdl)
        x, options["x_scale"] = made.codes, made.scale
    grouped(x, w, y, order, starts, tile=tile, pdl=pdl, **options)
