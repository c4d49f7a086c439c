"""The KV cache of the reference backend: numbers as the pool's dtype rounds them, and pages of them as bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quire.backends.batch import I32
from quire.backends.kv import KV
from quire.backends.pages import PageBytes, PageLayout, PageRequest
from quire.layouts import Floats

Part: TypeAlias = npt.NDArray[np.generic]  # a view of a pool: [layers, pages, the numbers of a layer's page]


class Cache:
    """K or V of every layer, rounded as the pool's dtype says."""

    def __init__(self, kv: KV):
        shape = (kv.layers, kv.pages * kv.page_size, kv.kv_heads, kv.head_dim)
        integers = {"int8": np.int8, "int16": np.int16}
        self._data = np.zeros(shape, integers.get(kv.dtype, np.float16))  # float16 holds every e4m3
        self._round = {"int8": round_to_int8, "int16": round_to_int16, "fp8": round_to_fp8}.get(kv.dtype)
        self._scale = None if self._round is None else np.zeros(shape[:-1], np.float32)

    def write(self, layer: int, slots: I32, x: Floats) -> None:
        rows = x.reshape(-1, *self._data.shape[2:])  # [T, Hk, D]
        if self._scale is None or self._round is None:
            self._data[layer, slots] = rows
        else:
            self._data[layer, slots], self._scale[layer, slots] = self._round(rows)

    def read(self, layer: int, slots: npt.NDArray[np.integer]) -> Floats:  # [S, Hk, D]
        data = self._data[layer, slots].astype(np.float32)
        return data if self._scale is None else data * self._scale[layer, slots][..., None]

    def by_page(self, size: int) -> list[Part]:
        """Views of all there is, [layers, pages, what a page of a layer has]: numbers, then scales."""
        held = [self._data] if self._scale is None else [self._data, self._scale]
        return [x.reshape(x.shape[0], x.shape[1] // size, size * math.prod(x.shape[2:])) for x in held]


def round_to_int8(x: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    codes, scale = _round_to(x, 127, 1e-36)
    return codes.astype(np.int8), scale


def round_to_int16(x: Floats) -> tuple[npt.NDArray[np.int16], Floats]:
    codes, scale = _round_to(x, 127 * 256 + 127, 1e-34)  # two signed bytes, none of them -128 in front
    return codes.astype(np.int16), scale


def _round_to(x: Floats, top: int, least: float) -> tuple[Floats, Floats]:
    """Codes and scales of the last axis. What is not finite gets a scale that is not a number; what is tiny becomes 0."""
    amax = np.abs(x).max(axis=-1).astype(np.float32)
    finite, usable = np.isfinite(amax), np.isfinite(amax) & (amax >= np.float32(least))
    with np.errstate(divide="ignore", over="ignore"):
        by = np.where(usable, np.float32(top) / amax, np.float32(0)).astype(np.float32)
    codes = np.rint(np.where(finite[..., None], x, np.float32(0)) * by[..., None])
    scale = np.where(usable, amax / np.float32(top), np.where(finite, np.float32(0), np.float32("nan")))
    return np.clip(codes, -top, top).astype(np.float32), scale.astype(np.float32)


def round_to_fp8(x: Floats) -> tuple[npt.NDArray[np.float16], Floats]:
    """Numbers that e4m3 has, ties to the even one, and scales of the last axis; what is not finite as for int8."""
    amax = np.abs(x).max(axis=-1).astype(np.float32)
    scale = np.maximum(amax, np.float32(1e-30)) / np.float32(448)
    with np.errstate(invalid="ignore", over="ignore"):
        codes = x / scale[..., None]
        exponent = np.maximum(np.frexp(codes)[1] - 1, -6)  # below 2^-6 the steps stay as they are there
        step = np.ldexp(np.float32(1), exponent - 3)  # three bits behind the first
        codes = np.rint(codes / step) * step
    return codes.astype(np.float16), np.where(np.isfinite(amax), scale, np.float32("nan")).astype(np.float32)


def layout_of(kv: KV, parts: Sequence[Part]) -> PageLayout:
    """How the bytes of a group's pages lie: of each layer, one part after another."""
    nbytes = sum(part.shape[2] * part.itemsize for part in parts)
    return PageLayout.of(kv, order="reference-rows", dtype=str(parts[0].dtype), layer_nbytes=nbytes)


def read(parts: Sequence[Part], asked: PageRequest, out: PageBytes) -> None:
    """Pages of the pool into rows of a buffer."""
    for columns, part in _columns(parts, asked, out):
        columns[:] = np.ascontiguousarray(part[asked.span, asked.pages].swapaxes(0, 1)).view(np.uint8)


def write(parts: Sequence[Part], asked: PageRequest, buffer: PageBytes) -> None:
    """Rows of a buffer into pages of the pool."""
    for columns, part in _columns(parts, asked, buffer):
        part[asked.span, asked.pages] = np.ascontiguousarray(columns).view(part.dtype).swapaxes(0, 1)


def _columns(parts: Sequence[Part], asked: PageRequest, buffer: PageBytes) -> Iterator[tuple[PageBytes, Part]]:
    """The columns of a buffer, [pages, layers, bytes], that each part of the pool takes."""
    if not buffer.size:
        return
    rows, at = buffer.reshape(asked.pages.size, asked.layers, -1), 0
    for part in parts:
        nbytes = part.shape[2] * part.itemsize
        yield rows[..., at : at + nbytes], part
        at += nbytes
