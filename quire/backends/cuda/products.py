"""Products of rows with each kind of weight; the number of rows decides which kernel does them.

             one to 16 rows            17 to 64                  more
  half       skinny                    skinny                    cuBLAS (by who calls)
  fp8        skinny, fp8 rows where    skinny, fp8 rows          cuBLASLt, fp8 rows
             a norm makes them; one
             row as it is
  int8       skinny                    skinny                    integer product, int8 rows
  fp8 tiles  tiled                     tiled, fp8 rows           cuBLASLt where it can, else tiled, fp8 rows
  int4       four-bit kernel           four-bit kernel           written out in half floats, cuBLAS
  … in words unpacked in registers     unpacked in registers     the same, from WORDS_ROWS on written out, cuBLAS

fp8 and int8 rows have a scale each, from their own largest number; for tiles (tiles.py) they have one for each 128 columns.
Weights are read as they lie; the sums are float32.
What float32 rows are multiplied with is dequantized by the torch backend: nothing here is for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.backends.cuda import tiles
from quire.backends.cuda.kernels import fp8
from quire.backends.cuda.kernels.expand import expand
from quire.backends.cuda.kernels.gates import gated_rows
from quire.backends.cuda.kernels.int4 import int4_product
from quire.backends.cuda.kernels.int8 import int8_product
from quire.backends.cuda.kernels.skinny import Shape, skinny
from quire.backends.cuda.kernels.tuning import (
    FEW,
    ROWS,
    TILED_ROWS,
    WIDE,
    WORDS_ROWS,
    int4_shape,
    skinny_shape,
    words_shape,
)
from quire.backends.cuda.kernels.words_product import words_product
from quire.backends.cuda.tiles import GroupedRows
from quire.backends.torch.quantized import E4M3, Int4, Scaled, Tiled, Weight
from quire.backends.torch.words import HIGH, IntWords, MxWords

_SCRATCH = 1 << 27  # numbers of a matrix that are written out at a time


@dataclass(slots=True)
class Unnormed:
    """A row whose norm is left to the product that reads it."""

    x: torch.Tensor
    gain: torch.Tensor
    eps: float


@dataclass(slots=True)
class Rows:
    """Rows in fp8: codes * scale."""

    codes: torch.Tensor  # [T, d] e4m3
    scale: torch.Tensor  # [T] float32

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> Rows:
        codes = torch.empty(shape[0], shape[1], dtype=E4M3, device=device)
        return cls(codes, torch.empty(shape[0], dtype=torch.float32, device=device))


@dataclass(frozen=True, slots=True)
class Place:
    """The device and the buffers that products use."""

    device: torch.device
    dtype: torch.dtype  # of rows: float16 or bfloat16
    processors: int
    chain: bool  # kernels may start while the one before them ends

    def shape(self, chosen: Shape) -> Shape:
        """A configuration as it may be launched here."""
        return chosen if self.chain or not chosen.pdl else replace(chosen, pdl=False, lines=0)

    def space(self, splits: int, rows: int, n: int) -> torch.Tensor | None:
        """The buffer where a split product leaves its parts."""
        return torch.empty(splits, rows, n, dtype=torch.float32, device=self.device) if splits > 1 else None


def count(x: torch.Tensor | Unnormed | Rows | GroupedRows) -> int:
    """The number of rows."""
    inner = x.x if isinstance(x, Unnormed) else x if isinstance(x, torch.Tensor) else x.codes
    return inner.shape[0]


def norms_along(weight: Weight) -> bool:
    """Whether a product of one row with it takes the norm on its way: it costs less there than in a launch of its own, except
    where one-byte weights are so many that the tensor cores, which need normed rows, make up for that."""
    return isinstance(weight, torch.Tensor) or (isinstance(weight, Scaled) and weight.shape[0] <= WIDE)


def wants_fp8(weights: Sequence[Weight]) -> bool:
    """Whether products with these (and there are some) would rather have fp8 rows."""
    return bool(weights) and all(isinstance(w, Scaled) and w.codes.dtype == E4M3 for w in weights)


def wants_groups(weights: Sequence[Weight], rows: int) -> bool:
    """Whether products of so many rows with these (and there are some) would rather have fp8 rows with scales for groups."""
    return bool(weights) and rows > TILED_ROWS and all(isinstance(w, Tiled) for w in weights)


def few_rows(
    at: Place,
    x: torch.Tensor | Unnormed | Rows,
    weight: torch.Tensor | Scaled,
    bias: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    act: str = "",
    loose: bool = False,
) -> torch.Tensor:
    """A skinny product, into `out` if given; with `loose` perhaps as parts, to be added by who reads them."""
    w, w_scale = (weight.codes, weight.scale) if isinstance(weight, Scaled) else (weight, None)
    norm, eps, x_scale = None, 0.0, None
    if isinstance(x, Unnormed):
        source, norm, eps = x.x, x.gain, x.eps
    elif isinstance(x, Rows):
        source, x_scale = x.codes, x.scale
    else:
        source = x
    rows, n = source.shape[0], w.shape[0] // (2 if act else 1)
    fused = rows == 1 and x_scale is None
    chosen = skinny_shape(
        n, source.shape[1], rows, w.dtype, gated=bool(act), fused=fused, eight=x_scale is not None,
        processors=at.processors,
    )  # fmt: skip
    shape = at.shape(chosen)
    part = at.space(shape.splits, rows, n)
    leave = loose and part is not None and bias is None and residual is None and out is None
    y = torch.empty(rows, n, dtype=at.dtype, device=at.device) if out is None else out
    skinny(
        source, w, y, shape, w_scale=w_scale, x_scale=x_scale, bias=bias, residual=residual, norm=norm, eps=eps,
        act=act, part=part, add_parts=not leave,
    )  # fmt: skip
    return part if leave and part is not None else y


class QuantizedProducts:
    """Products with Scaled, Tiled, Int4 and IntWords weights. Rows in fp8 are given only where `wants_fp8` or `wants_groups` said so."""

    def __init__(self, at: Place):
        self._at = at

    def linear(
        self,
        x: torch.Tensor | Unnormed | Rows | GroupedRows,
        weight: Scaled | Tiled | Int4 | IntWords | MxWords,
        bias: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        loose: bool = False,
    ) -> torch.Tensor:
        """x @ weight.T (+ bias), into `out` if given; with `loose` perhaps as parts."""
        assert not isinstance(weight, MxWords)  # experts alone are
        if isinstance(weight, Tiled):
            assert isinstance(x, torch.Tensor | GroupedRows)  # see norms_along and wants_fp8
            return tiles.linear(self._at, x, weight, bias, out=out, loose=loose)
        assert not isinstance(x, GroupedRows)
        rows = count(x)
        if isinstance(weight, IntWords) and rows < WORDS_ROWS:
            return self._words(self._plain(x), weight, bias, out=out, loose=loose)
        if rows > ROWS:
            y = out
            if y is None:
                y = torch.empty(rows, weight.shape[0], dtype=self._at.dtype, device=self._at.device)
            self._many(x, weight, bias, y)
            return y
        if isinstance(weight, Int4):
            return self._int4(self._plain(x), weight, bias, out=out, loose=loose)
        assert not isinstance(weight, IntWords)
        return few_rows(self._at, self._suited(x, weight), weight, bias, out=out, loose=loose)

    def gated(
        self,
        x: torch.Tensor | Unnormed | Rows | GroupedRows,
        weight: Scaled | Tiled | Int4 | IntWords | MxWords,
        soon: Sequence[Weight],
        act: str,
    ) -> torch.Tensor | Rows | GroupedRows:
        """The activation (of gates.KINDS) of the two halves of each row, in fp8 where that is what reads it and the rows are many."""
        assert not isinstance(weight, MxWords)
        rows, n = count(x), weight.shape[0] // 2
        if isinstance(weight, Tiled):
            if isinstance(x, torch.Tensor) and rows <= TILED_ROWS:
                return tiles.linear(self._at, x, weight, None, act=act)
        elif isinstance(weight, IntWords) and rows < WORDS_ROWS:
            assert not isinstance(x, GroupedRows)
            return self._words(self._plain(x), weight, None, act=act)
        elif rows <= ROWS:
            assert not isinstance(x, GroupedRows) and not isinstance(weight, IntWords)
            out = torch.empty(rows, n, dtype=self._at.dtype, device=self._at.device)
            if isinstance(weight, Int4):
                return self._int4(self._plain(x), weight, None, out=out, act=act)
            return few_rows(self._at, self._suited(x, weight), weight, None, out=out, act=act)
        return self.gate(self.linear(x, weight, None), soon, act)

    def gate(self, both: torch.Tensor, soon: Sequence[Weight], act: str) -> torch.Tensor | Rows | GroupedRows:
        """The activation of what a product gave."""
        rows, n = both.shape[0], both.shape[1] // 2
        if wants_groups(soon, rows):
            groups = GroupedRows.empty(rows, n, both.device)
            gated_rows(both, groups.codes, act, scales=groups.scale, pdl=self._at.chain)
            return groups
        if wants_fp8(soon) and rows > FEW:
            made = Rows.empty((rows, n), both.device)
            gated_rows(both, made.codes, act, scales=made.scale, pdl=self._at.chain)
            return made
        out = both.new_empty(rows, n)
        gated_rows(both, out, act)
        return out

    def _suited(self, x: torch.Tensor | Unnormed | Rows, weight: Scaled) -> torch.Tensor | Unnormed | Rows:
        """Rows as a skinny product wants them: fp8 beside fp8 weights, where there are enough to pay for the rounding."""
        if isinstance(x, Unnormed):
            return x
        if weight.codes.dtype != E4M3:
            return self._plain(x)
        return self._eight(x) if count(x) > FEW else x

    def _eight(self, x: torch.Tensor | Unnormed | Rows) -> Rows:
        if isinstance(x, Rows):
            return x
        assert not isinstance(x, Unnormed)
        made = Rows.empty(x.shape, x.device)
        fp8.quantize_rows(x, made.codes, made.scale, pdl=self._at.chain)
        return made

    def _int4(
        self,
        x: torch.Tensor,
        weight: Int4,
        bias: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        act: str = "",
        loose: bool = False,
    ) -> torch.Tensor:
        rows, n = x.shape[0], weight.shape[0] // (2 if act else 1)
        shape = self._at.shape(int4_shape(n, weight.shape[1], gated=bool(act)))
        part = self._at.space(shape.splits, rows, n)
        leave = loose and part is not None and bias is None and out is None
        y = torch.empty(rows, n, dtype=self._at.dtype, device=self._at.device) if out is None else out
        int4_product(
            x, weight.packed, weight.scale, weight.zero, y, shape, group=weight.group, bias=bias, act=act,
            part=part, add_parts=not leave,
        )  # fmt: skip
        return part if leave and part is not None else y

    def _words(
        self,
        x: torch.Tensor,
        weight: IntWords,
        bias: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        act: str = "",
        loose: bool = False,
    ) -> torch.Tensor:
        rows, n = x.shape[0], weight.shape[0] // (2 if act else 1)
        chosen, high = words_shape(n, weight.shape[1], rows, gated=bool(act), processors=self._at.processors)
        shape = self._at.shape(chosen)
        part = self._at.space(shape.splits, rows, n)
        leave = loose and part is not None and bias is None and out is None
        y = torch.empty(rows, n, dtype=self._at.dtype, device=self._at.device) if out is None else out
        words_product(x, weight, y, shape, rows=high, bias=bias, act=act, part=part, add_parts=not leave)
        return part if leave and part is not None else y

    def _many(
        self,
        x: torch.Tensor | Unnormed | Rows,
        weight: Scaled | Int4 | IntWords,
        bias: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """More rows than the kernels of our own are for."""
        n, k = weight.shape
        if isinstance(weight, Scaled) and weight.codes.dtype == E4M3 and n % 16 == 0 and k % 16 == 0:
            made = self._eight(x)
            kind = y.dtype if fp8.gives(y.dtype, y.device) else torch.bfloat16
            into = y if y.is_contiguous() and kind == y.dtype else torch.empty(y.shape, dtype=kind, device=y.device)
            fp8.scaled_product(made.codes, made.scale, weight.codes, weight.scale, into)
            if bias is not None:
                into += bias
            if into is not y:
                y.copy_(into)
        elif isinstance(weight, Scaled) and weight.codes.dtype == torch.int8 and n % 8 == 0 and k % 8 == 0:
            int8_product(self._plain(x), weight.codes, weight.scale, y, bias=bias)
        else:
            self._written_out(self._plain(x), weight, bias, y)

    def _written_out(
        self, x: torch.Tensor, weight: Scaled | Int4 | IntWords, bias: torch.Tensor | None, y: torch.Tensor
    ) -> None:
        n, k = weight.shape
        step = max(HIGH, _SCRATCH // k // HIGH * HIGH)
        wide = y.dtype == torch.float32 and y.device.type == "cuda"
        for first in range(0, n, step):
            part = weight.rows(first, min(first + step, n))
            scratch = torch.empty(part.shape, dtype=x.dtype, device=x.device)
            expand(part, scratch)
            own = y[:, first : first + step]
            if own.dtype == x.dtype:
                torch.mm(x, scratch.t(), out=own)
            else:
                own.copy_(torch.mm(x, scratch.t(), out_dtype=torch.float32) if wide else torch.mm(x, scratch.t()))
        if bias is not None:
            y += bias

    def _plain(self, x: torch.Tensor | Unnormed | Rows) -> torch.Tensor:
        """Rows as they were, or nearly: a matrix that no library takes may still have been given fp8 rows."""
        assert not isinstance(x, Unnormed)  # see norms_along
        return (x.codes.float() * x.scale[:, None]).to(self._at.dtype) if isinstance(x, Rows) else x
