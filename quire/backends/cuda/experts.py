"""A mixture of experts on the GPU: five launches, whose grids depend on the number of rows alone; of few rows four.

    route, place      who goes where, and the pairs of (row, choice) in the order of experts
    grouped, twice    gate and up with their activation, then down; a row of results for each pair
                      (fp8 weights and many rows: each after a launch that makes fp8 of its rows)
    add_shares        the pairs of a row, weighted, in the order of experts; of few rows the norm that comes next does that

Nothing is asked of the device, so a captured step serves any routing, and nothing is added by atomics.
"""

from __future__ import annotations

from typing import Any

import torch

from quire.backends.cuda.kernels import fp8
from quire.backends.cuda.kernels.grouped import FP8_FEW, TILED, add_shares, fp8_tile, grouped, tile_of
from quire.backends.cuda.kernels.grouped_words import block_of, grouped_words
from quire.backends.cuda.kernels.route import place, route
from quire.backends.cuda.kernels.tuning import FEW
from quire.backends.cuda.tiles import GroupedRows
from quire.backends.torch.experts import Mixture
from quire.backends.torch.quantized import E4M3, Int4, Mixed, Scaled, Tiled, Weight
from quire.backends.torch.words import IntWords, MxWords

_SPACE = 1 << 29  # bytes that the results of pairs may take; more rows than fit are done in turns


def fits(m: Mixture, dtype: torch.dtype) -> bool:
    """Whether there are kernels for these weights: quantized ones are multiplied with half floats only."""
    both = m.both, m.down
    packed = [isinstance(w, Scaled | Tiled | Int4 | MxWords) for w in both]
    return not any(isinstance(w, Mixed | IntWords) for w in both) and (dtype != torch.float32 or not any(packed))


def mix(
    x: torch.Tensor, logits: torch.Tensor, m: Mixture, *, exact: bool = False, loose: bool = False, pdl: bool = False
) -> torch.Tensor:
    """x [T, d] through the experts that its logits choose.

    exact: rows are never rounded on the way to fp8 weights, however many. loose: of few rows perhaps parts [P, T, d], float32, for
    whoever adds the result to something to add up.
    """
    rows, top = x.shape[0], m.routing.top
    if rows == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    experts = torch.empty(rows, top, dtype=torch.int32, device=x.device)
    shares = torch.empty(rows, top, dtype=torch.float32, device=x.device)
    route(logits, m.routing_bias, m.routing, experts, shares, pdl=pdl)
    if loose and rows <= FEW and isinstance(m.down, MxWords):
        order, starts = _places(rows * top, m.count, x.device)
        place(experts, order, starts, pdl=pdl)
        return _through(x, order, starts, shares, m, None, exact, pdl)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    step = max(1, _SPACE // (top * (x.shape[1] + m.inner) * x.element_size()))
    for first in range(0, rows, step):
        own = slice(first, min(rows, first + step))
        order, starts = _places(experts[own].numel(), m.count, x.device)
        place(experts[own], order, starts, pdl=pdl)
        _through(x[own], order, starts, shares[own], m, out[own], exact, pdl)
    return out


def _places(pairs: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffers for the order of pairs, and for where each expert's begin."""
    made = torch.empty(pairs + count + 1, dtype=torch.int32, device=device)
    return made[:pairs], made[pairs:]


def _through(
    x: torch.Tensor,
    order: torch.Tensor,
    starts: torch.Tensor,
    shares: torch.Tensor,
    m: Mixture,
    out: torch.Tensor | None,
    exact: bool,
    pdl: bool,
) -> torch.Tensor:
    """Into `out`, or parts where there is none."""
    top = shares.shape[1]
    told: dict[str, Any] = {"order": order, "starts": starts, "exact": exact, "pdl": pdl}
    inner = _grouped(x, m.both, m.inner, top=top, gated=True, limit=m.limit, bias=m.both_bias, **told)
    if out is None:
        return _grouped(inner, m.down, x.shape[1], bias=m.down_bias, choices=top, shares=shares, **told)
    results = _grouped(inner, m.down, x.shape[1], bias=m.down_bias, choices=top, **told)
    add_shares(results, shares, out, pdl=pdl)
    return out


def _grouped(
    x: torch.Tensor,
    w: Weight,
    n: int,
    *,
    order: torch.Tensor,
    starts: torch.Tensor,
    exact: bool,
    pdl: bool,
    choices: int = 0,
    **options: Any,
) -> torch.Tensor:
    """A product of pairs [P, n], or the parts of one. Rows become fp8 where experts have so many that the tensor cores are what
    takes time."""
    pairs, count, gated = order.shape[0], starts.shape[0] - 1, options.get("gated", False)
    if isinstance(w, MxWords):
        block = block_of(pairs, count, options.get("top", choices), gated)
        shape, kind = ((pairs, n), x.dtype) if block.splits == 1 else ((block.splits, pairs, n), torch.float32)
        if "shares" in options:
            shape, kind = (block.splits * choices, pairs // choices, n), torch.float32
        y = torch.empty(shape, dtype=kind, device=x.device)
        grouped_words(x, w, y, order, starts, block=block, pdl=pdl, **options)
        return y
    assert not isinstance(w, Mixed | IntWords)  # see fits
    y = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    if isinstance(w, Scaled) and w.codes.dtype == E4M3 and not exact:
        tile = fp8_tile(pairs, count, gated)
        if tile not in FP8_FEW:
            codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
            options["x_scale"] = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
            fp8.quantize_rows(x, codes, options["x_scale"], pdl=pdl)
            x = codes
    else:
        tile = tile_of(x.dtype, pairs, count, isinstance(w, Tiled))
    if isinstance(w, Tiled) and tile == TILED[-1]:
        made = GroupedRows.of(x, pdl=pdl)
        x, options["x_scale"] = made.codes, made.scale
    grouped(x, w, y, order, starts, tile=tile, pdl=pdl, **options)
    return y
