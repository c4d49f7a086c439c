"""Matrices put together from several tensors, in blocks of 32 columns, at the time they are read.

    integers, one zero for all      scale: f16 or f32, codes            w = scale * (code - zero)
    integers, a zero for each group scale: f32, -scale * zero: f32, codes
    e4m3 numbers                    scale: f32, 32 bytes
    columns with groups in any order  plain numbers: no run of columns has a scale of its own

Codes of 4 bits lie in pairs: code 2 i in the low half of byte i, code 2 i + 1 in its high one. `Rows` stands in for the bytes: it
knows their shape, can be cut along rows, and becomes an array only where one is asked for, so a model is never there twice.

-scale * zero is exact in float32 for scales of 16 bits, and so is the sum, so w is exactly scale * (code - zero).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire.formats.hub import Wrong
from quire.layouts import Affine, Bytes, Codec, Dense, Float8, Floats, Ints, Plane, Scale

BLOCK = 32
_SOME = 256  # rows whose numbers are computed at a time
Codes = Callable[[int, int], Bytes]  # first row, end -> [rows, bytes]
Scales = Callable[[int, int], Floats]  # first row, end -> [rows, groups]
Zeros = Callable[[int, int], npt.NDArray[np.integer]]  # first row, end -> [rows, groups]


class Rows:
    """An array of rows, of blocks (bytes) or of plain numbers, that are made when they are read."""

    def __init__(
        self,
        make: Callable[[int, int], npt.NDArray[Any]],
        rows: range,
        columns: int,
        tile: tuple[int, int] | None = None,
        dtype: str = "u1",
    ):
        self._make = make  # first row, end -> [rows, columns]
        self.tile = tile  # rows and columns that share a scale, counted from the first ones
        self._rows = rows
        self.shape = (len(rows), columns)
        self.ndim = 2
        self.dtype = np.dtype(dtype)
        self.size = len(rows) * columns
        self.nbytes = self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: slice) -> Rows:
        rows, tile = self._rows[at], None
        if self.tile is not None and rows:
            height = math.gcd(self.tile[0], rows[0] - self._rows[0]) if rows.step == 1 else 1
            tile = height, self.tile[1]
        return Rows(self._make, rows, self.shape[1], tile, self.dtype.str)

    def reshape(self, *shape: int) -> npt.NDArray[Any]:
        return self._array().reshape(*shape)

    def astype(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return self._array().astype(dtype, copy=False)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("blocks are put together when they are read: there is no array to share")
        whole = self._array()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _array(self) -> npt.NDArray[Any]:
        r = self._rows
        if not r:
            return np.zeros(self.shape, self.dtype)
        first, end = min(r[0], r[-1]), max(r[0], r[-1]) + 1
        made = self._make(first, end)
        return made if r.step == 1 else made[r.start - first :: r.step]


@cache  # a backend knows codecs by identity
def codec_of(name: str, bits: int, zero: int | None, wide: bool) -> Codec:
    """The codec of blocks with that zero in all of them; None: with one in each."""
    at = (8 if zero is None else 4) if wide else 2
    codes = Plane.packed(at, BLOCK, run=BLOCK, bits=8) if bits == 8 else _pairs(at)
    return Codec(
        name=name,
        block=BLOCK,
        nbytes=at + BLOCK * bits // 8,
        group=BLOCK,
        bits=bits,
        codes=Ints((codes,), offset=zero or 0),
        scale=Scale(0, wide=wide),
        bias=Scale(4, wide=True) if zero is None else None,
    )


def _pairs(at: int) -> Plane:
    i = np.arange(BLOCK)
    return Plane((at + i // 2).astype(np.uint16), (i % 2 * 4).astype(np.uint8), 15)


def affine(
    name: str, bits: int, shape: tuple[int, int], codes: Codes, scales: Scales, zeros: Zeros | int, group: int
) -> Affine:
    """A matrix of codes packed along columns, with scales and zeros for `group` of them. Nothing of it is kept but the codec."""
    n, k = shape
    zero = zeros if isinstance(zeros, int) else _one(zeros(0, n))
    wide = zero is None or not _short(scales(0, n))
    codec = codec_of(name, bits, zero, wide)
    of = np.arange(k // BLOCK) * BLOCK // group  # block -> group

    def make(first: int, end: int) -> Bytes:
        out = np.empty((end - first, k // BLOCK, codec.nbytes), np.uint8)
        own = scales(first, end)
        _put(out, 0, own.astype("<f4" if wide else "<f2"), of)
        if codec.bias is not None and not isinstance(zeros, int):
            _put(out, codec.bias.at, (-own * zeros(first, end).astype(np.float32)).astype("<f4"), of)
        at = codec.nbytes - BLOCK * bits // 8
        out[..., at:] = codes(first, end).reshape(end - first, k // BLOCK, -1)
        return out.reshape(end - first, -1)

    return Affine(cast(Bytes, Rows(make, range(n), k // BLOCK * codec.nbytes, (1, group))), codec)


def scattered(
    bits: int,
    shape: tuple[int, int],
    codes: Codes,
    scales: Scales,
    zeros: Zeros | int,
    order: npt.NDArray[np.integer],
) -> Dense:
    """A matrix whose columns are of groups in any order: `order` says of which. In float16 where its scales are, rounded once,
    as the kernels for such files have it; else in float32, exact."""
    n, k = shape
    whole = scales(0, n)
    short = _short(whole) and float(np.abs(whole).max(initial=0.0)) * (1 << bits) < 65504
    dtype = "<f2" if short else "<f4"

    def make(first: int, end: int) -> npt.NDArray[Any]:
        out = np.empty((end - first, k), dtype)
        for at in range(first, end, _SOME):
            to = min(at + _SOME, end)
            zero = zeros if isinstance(zeros, int) else zeros(at, to)[:, order]
            numbers = unpacked(codes(at, to), bits).astype(np.int16) - zero
            out[at - first : to - first] = numbers * scales(at, to)[:, order]
        return out

    return Dense(cast(npt.NDArray[Any], Rows(make, range(n), k, dtype=dtype)), "f16" if short else "f32")


def unpacked(data: Bytes, bits: int) -> Bytes:
    """Bytes [n, count] as one code in each: the lowest bits first."""
    if bits == 8:
        return data
    return np.stack((data & np.uint8(15), data >> np.uint8(4)), axis=-1).reshape(data.shape[0], -1)


def float8(numbers: Bytes, scales: Scales, tile: tuple[int, int]) -> Float8:
    """e4m3 numbers [n, k], and a scale of each row for every so many columns; `tile`: rows and columns that share one."""
    (n, k), columns = numbers.shape, tile[1]
    of = np.arange(k // BLOCK) * BLOCK // columns

    def make(first: int, end: int) -> Bytes:
        out = np.empty((end - first, k // BLOCK, Float8.NBYTES), np.uint8)
        _put(out, 0, scales(first, end).astype("<f4"), of)
        out[..., 4:] = numbers[first:end].reshape(end - first, k // BLOCK, BLOCK)
        return out.reshape(end - first, -1)

    return Float8(cast(Bytes, Rows(make, range(n), k // BLOCK * Float8.NBYTES, tile)), columns >= k)


def _put(out: Bytes, at: int, values: npt.NDArray[Any], of: npt.NDArray[np.integer]) -> None:
    """values [rows, groups] into every block of their group."""
    size = values.dtype.itemsize
    spread = np.ascontiguousarray(values[:, of])  # [rows, blocks]
    out[..., at : at + size] = spread.view(np.uint8).reshape(*spread.shape, size)


def _one(zeros: npt.NDArray[np.integer]) -> int | None:
    """The zero of all groups, where they have the same."""
    first = int(zeros.flat[0])
    return first if bool((zeros == first).all()) else None


def _short(scales: Floats) -> bool:
    """Whether float16 holds every number."""
    with np.errstate(over="ignore"):
        return np.array_equal(scales.astype(np.float16).astype(np.float32), scales)


def groups_of(part: str, k: int, size: int) -> tuple[int, int]:
    """Columns that share a scale, and how many such groups there are. size -1: all columns."""
    if k % BLOCK or k == 0:
        raise Wrong(part, f"is of a matrix with {k} columns: they must be whole blocks of {BLOCK}", supported=False)
    if size == -1:
        return k, 1
    if size % BLOCK:
        raise Wrong(part, f"has groups of {size} columns: multiples of {BLOCK} are read", supported=False)
    return size, -(-k // size)


def in_order(part: str, order: npt.NDArray[np.integer], group: int, groups: int) -> bool:
    """Whether columns lie in the order of their groups. Raises where one is of a group that is not there."""
    outside = np.flatnonzero((order < 0) | (order >= groups))
    if outside.size:
        at = int(outside[0])
        raise Wrong(part, f"puts column {at} in group {int(order[at])}: there are {groups} groups")
    return bool((order == np.arange(order.size) // group).all())


def finite(part: str, scales: Floats) -> Floats:
    """Scales, all of them numbers."""
    bad = np.flatnonzero(~np.isfinite(scales))
    if bad.size:
        raise Wrong(part, f"has {bad.size} scales that are no numbers, the first at {int(bad[0])}")
    return scales
