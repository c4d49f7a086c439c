"""Products with fp8 weights whose scales are for tiles (as checkpoints have them), by the number of rows.

    up to TILED_ROWS   rows as they are, weights made fp16 on the way: nothing is rounded but the result, no launch is
                       spent on rows, and the weights' bytes are the whole cost
    more               rows in fp8 with a scale for each 128 columns: twice the arithmetic, which is what takes time here
    more than ROWS     the same through cuBLASLt, where it takes such scales

Knows rows and weights; who calls chooses when.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from quire.backends.cuda.kernels import fp8
from quire.backends.cuda.kernels.skinny import Shape
from quire.backends.cuda.kernels.tiled import quantize_groups, tiled_product
from quire.backends.cuda.kernels.tuning import ROWS, TILED_ROWS, tiled_many, tiled_shape
from quire.backends.torch.quantized import E4M3, WIDTH, Tiled

_EVEN = 4  # cuBLASLt wants rows in multiples of this: there is room for them
_ACROSS = 4  # and tiles across in multiples of this


class Place(Protocol):
    """The device and the buffers that products use (products.py)."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def processors(self) -> int: ...
    @property
    def chain(self) -> bool: ...
    def shape(self, chosen: Shape) -> Shape: ...
    def space(self, splits: int, rows: int, n: int) -> torch.Tensor | None: ...


@dataclass(slots=True)
class GroupedRows:
    """Rows in fp8: codes times the scale of their 128 columns."""

    codes: torch.Tensor  # [T, d] e4m3
    scale: torch.Tensor  # [d / 128, T] float32
    whole: tuple[
        torch.Tensor, torch.Tensor
    ]  # both with the rows behind them that make their number even; those mean nothing

    @classmethod
    def empty(cls, rows: int, d: int, device: torch.device) -> GroupedRows:
        room = -(-rows // _EVEN) * _EVEN
        scale = torch.empty(-(-d // WIDTH), room, dtype=torch.float32, device=device)
        codes = torch.empty(room, d, dtype=E4M3, device=device)
        return cls(codes[:rows], scale[:, :rows], (codes, scale))

    @classmethod
    def of(cls, x: torch.Tensor, *, pdl: bool = False) -> GroupedRows:
        made = cls.empty(x.shape[0], x.shape[1], x.device)
        quantize_groups(x, made.codes, made.scale, pdl=pdl)
        return made

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """The rows as they were before they were rounded to fp8, or nearly."""
        wide = self.scale.t().repeat_interleave(WIDTH, 1)[:, : self.codes.shape[1]]
        return (self.codes.float() * wide).to(dtype)


def linear(
    at: Place,
    x: torch.Tensor | GroupedRows,
    weight: Tiled,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    act: str = "",
    loose: bool = False,
) -> torch.Tensor:
    """x @ weight.T (+ bias), into `out` if given; with `loose` perhaps as parts. `act` (see gates.py) is for few rows."""
    source = x if isinstance(x, torch.Tensor) else x.codes
    rows, n = source.shape[0], weight.shape[0] // (2 if act else 1)
    if isinstance(x, torch.Tensor) and rows <= TILED_ROWS:
        y = torch.empty(rows, n, dtype=at.dtype, device=at.device) if out is None else out
        shape = at.shape(tiled_shape(n, gated=bool(act)))
        part = at.space(shape.splits, rows, n)
        leave = loose and part is not None and bias is None and out is None
        tiled_product(
            x, weight, y, shape, bias=bias, act=act, part=part, add_parts=not leave
        )  # fmt: skip
        return part if leave and part is not None else y
    made = x if isinstance(x, GroupedRows) else GroupedRows.of(x, pdl=at.chain)
    rounded = out is None or out.dtype == at.dtype  # logits are not
    if rounded and rows > ROWS and _fits(weight) and library_takes(at.dtype, at.device):
        return _through_library(at, made, weight, bias, out)
    y = torch.empty(rows, n, dtype=at.dtype, device=at.device) if out is None else out
    shape, high = tiled_many(n, rows, at.processors)
    tiled_product(made.codes, weight, y, at.shape(shape), rows=high, x_scale=made.scale, bias=bias)
    return y


def _through_library(
    at: Place, x: GroupedRows, weight: Tiled, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    rows, room = x.codes.shape[0], x.whole[0].shape[0]
    y = torch.empty(room, weight.shape[0], dtype=at.dtype, device=at.device)
    library_product(x, weight, y)
    if bias is not None:
        y += bias
    return y[:rows] if out is None else out.copy_(y[:rows])


def library_product(x: GroupedRows, weight: Tiled, y: torch.Tensor) -> None:
    """y = x @ weight.T, y with as many rows as x has room for."""
    codes, scale = x.whole
    fp8.tile_product(codes, scale, weight.codes, weight.scale, y)


def _fits(weight: Tiled) -> bool:
    """Whether its tiles are those that the library knows, all of them whole, and so many that it knows them for tiles."""
    n, k = weight.shape
    return weight.height == WIDTH and not weight.skip and n % WIDTH == 0 == k % (_ACROSS * WIDTH) and n > WIDTH


@cache
def library_takes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether it knows scales for tiles here: tried, for only some versions on some GPUs do."""
    if device.type != "cuda":
        return False
    side = _ACROSS * WIDTH
    weight, x = Tiled.empty(side, side, WIDTH, device), GroupedRows.empty(WIDTH, side, device)
    for each in (*weight.tensors, *x.whole):
        each.zero_()
    try:
        library_product(x, weight, torch.empty(WIDTH, side, dtype=dtype, device=device))
    except (RuntimeError, ValueError):
        return False
    return True
