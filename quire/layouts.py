"""The canonical weight layouts: what a tensor is once its file format no longer matters.

A format file (`formats/`) describes its blocks as data; a kernel reads the description, never the format's name. So a
new format costs one file, and a new backend one reader of these classes.

  Dense   numbers as they are: float32, float16 or bfloat16
  Affine  w = scale[group] * (code - offset) + bias[group], codes and scales somewhere inside fixed-size blocks
  Float8  w = scale[block] * number, with numbers of 8 bits (e4m3) in blocks of 32

`dequantize` is exact: the product and the sum above, each rounded once to float32, in that order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_CHUNK = 1 << 17  # bytes of codes that are dequantized at a time


def _e4m3() -> Floats:
    """The numbers of e4m3 by code: 1 sign, 4 bits of exponent, 3 of fraction; no infinities, and two that are no numbers."""
    codes = np.arange(128)
    exponent, fraction = codes >> 3, codes & 7
    magnitudes = np.where(exponent == 0, np.ldexp(fraction / 8, -6), np.ldexp(1 + fraction / 8, exponent - 7))
    magnitudes[127] = np.nan
    return np.concatenate((magnitudes, -magnitudes)).astype(np.float32)


E4M3: Floats = _e4m3()


@dataclass(frozen=True)
class Plane:
    """A plane of bits of each number in a block: ((block[byte[i]] ^ flip) >> shift[i] & mask) << lift."""

    byte: npt.NDArray[np.uint16]  # [count] where in the block
    shift: npt.NDArray[np.uint8]  # [count]
    mask: int
    lift: int = 0
    flip: int = 0  # 0x80 turns a two's complement byte into an unsigned one, offset by 128

    @classmethod
    def packed(cls, at: int, count: int, run: int, bits: int, *, shift: int = 0, lift: int = 0, flip: int = 0) -> Plane:
        """`count` fields of `bits` bits from byte `at` on: `run` bytes give their lowest bits first, then their next, …

        run=4, bits=4:  byte  at     at+1   at+2   at+3   at+4 …
                        low   0      1      2      3      8
                        high  4      5      6      7      12
        """
        per = 8 // bits  # fields in a byte
        i = np.arange(count)
        byte = at + i // (run * per) * run + i % run
        shifts = shift + i // run % per * bits
        return cls(byte.astype(np.uint16), shifts.astype(np.uint8), (1 << bits) - 1, lift, flip)


@dataclass(frozen=True)
class Ints:
    """`count` unsigned integers in a block, put together from planes; the value is their sum minus offset."""

    planes: tuple[Plane, ...]
    offset: int = 0

    def unpack(self, blocks: Bytes) -> npt.NDArray[np.int16]:
        """blocks [..., nbytes] -> values [..., count], offset taken off."""
        total = np.zeros((*blocks.shape[:-1], self.planes[0].byte.size), np.int16)
        for p in self.planes:
            bits = ((np.take(blocks, p.byte, axis=-1) ^ p.flip) >> p.shift) & p.mask
            total += bits.astype(np.int16) << p.lift
        return total - np.int16(self.offset)


@dataclass(frozen=True)
class Scale:
    """Per-group factors of a block: a float16 at byte `at`, times a small integer per group when `codes` is given.

    A wide one is a float32: for factors that a float16 cannot hold. All factors of a codec are as wide as its scale.
    """

    at: int
    codes: Ints | None = None
    negate: bool = False
    wide: bool = False

    def unpack(self, blocks: Bytes, groups: int) -> Floats:
        """blocks [..., nbytes] -> float32 [..., groups]; the product is exact (11 bits times at most 8).

        A wide one's is rounded once, if it has more bits than a float16.
        """
        size, kind = (4, "<f4") if self.wide else (2, "<f2")
        factor = np.ascontiguousarray(blocks[..., self.at : self.at + size]).view(kind).astype(np.float32)  # [..., 1]
        if self.negate:
            factor = -factor
        if self.codes is None:
            return np.repeat(factor, groups, axis=-1)
        return factor * self.codes.unpack(blocks).astype(np.float32)


@dataclass(frozen=True)
class Codec:
    """How an Affine tensor's blocks store their numbers. Pure data: a backend may compile it into a repacker."""

    name: str
    block: int  # elements in a block: 32 or 256
    nbytes: int  # bytes of a block
    group: int  # elements that share a scale: 16 or 32
    bits: int  # of a code: 2, 3, 4, 5, 6 or 8
    codes: Ints
    scale: Scale
    bias: Scale | None = None
    e2m1: bool = False  # codes are 16 + twice a number of e2m1, scales powers of two: four bits could hold a code

    @property
    def groups(self) -> int:
        """Groups in a block."""
        return self.block // self.group


@dataclass(frozen=True)
class Dense:
    """A tensor of plain numbers. bfloat16 is kept as its uint16 bits."""

    data: npt.NDArray[np.generic]  # [N, K] or [K]
    dtype: str  # "f32", "f16" or "bf16"

    @classmethod
    def of(cls, data: Bytes, shape: tuple[int, ...], dtype: str) -> Dense:
        """A view of little-endian bytes, which may start at any address."""
        return cls(data.view({"f32": "<f4", "f16": "<f2", "bf16": "<u2"}[dtype]).reshape(shape), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def dequantize(self, rows: slice = slice(None)) -> Floats:
        """float32, exact."""
        part = self.data[rows]
        if self.dtype == "bf16":
            return (part.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN is data here, not an accident
            return part.astype(np.float32)


@dataclass(frozen=True)
class Affine:
    """A matrix of codes with per-group scales (and biases), in its blocks; a stack of matrices has more axes."""

    data: (
        Bytes  # [N, K / block * nbytes], often a view of the mapped file; or what becomes such an array when it is read
    )
    codec: Codec

    @classmethod
    def of(cls, data: Bytes, shape: tuple[int, ...], codec: Codec) -> Affine:
        """A view of bytes as a tensor of this shape; its last axis is made of whole blocks."""
        return cls(data.reshape(*shape[:-1], shape[-1] // codec.block * codec.nbytes), codec)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return *self.data.shape[:-1], self.data.shape[-1] // self.codec.nbytes * self.codec.block

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def parts(self, rows: slice = slice(None)) -> tuple[npt.NDArray[np.int16], Floats, Floats | None]:
        """Codes minus offset [n, K], scales [n, K/group], biases [n, K/group] or None."""
        c = self.codec
        part = self.data[rows] if self.data.ndim > 1 else self.data
        lead, n = part.shape[:-1], part.shape[-1] // c.nbytes
        blocks = part.reshape(*lead, n, c.nbytes)
        with np.errstate(invalid="ignore"):  # scales that are not numbers stay what they are
            codes = c.codes.unpack(blocks).reshape(*lead, n * c.block)
            scale = c.scale.unpack(blocks, c.groups).reshape(*lead, n * c.groups)
            bias = c.bias.unpack(blocks, c.groups).reshape(*lead, n * c.groups) if c.bias else None
        return codes, scale, bias

    def dequantize(self, rows: slice = slice(None)) -> Floats:
        """float32, exact."""
        if self.data.ndim == 1:
            return self._floats(slice(None))[rows]
        out = np.empty((len(range(*rows.indices(self.shape[0]))), *self.shape[1:]), np.float32)
        part = Affine(self.data[rows], self.codec)
        step = max(1, _CHUNK * len(self.data) // max(1, self.data.size))  # temporaries that stay in the cache
        for i in range(0, out.shape[0], step):
            out[i : i + step] = part._floats(slice(i, i + step))
        return out

    def _floats(self, rows: slice) -> Floats:
        codes, scale, bias = self.parts(rows)
        grouped = codes.reshape(*scale.shape, self.codec.group).astype(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            grouped *= scale[..., None]
            if bias is not None:
                grouped += bias[..., None]
        return grouped.reshape(codes.shape)


@dataclass(frozen=True)
class Float8:
    """A matrix of e4m3 numbers, in blocks of 32 columns with a float32 scale before them. `by_row`: a row's scales are all one."""

    data: Bytes  # [N, K / 32 * 36], or what becomes such an array when it is read
    by_row: bool

    BLOCK: ClassVar[int] = 32
    NBYTES: ClassVar[int] = 36
    TILE: ClassVar[int] = 128

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return *self.data.shape[:-1], self.data.shape[-1] // self.NBYTES * self.BLOCK

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @cached_property
    def tile(self) -> tuple[int, int]:
        """Rows (128, or a power of two below) and columns (128 or 32) that share a scale, counted from the first ones.

        What puts rows together may know; rows that were cut and copied since are looked at.
        """
        rows, columns = getattr(self.data, "tile", None) or _seen(self.parts()[1])
        return math.gcd(rows, self.TILE), self.TILE if columns % self.TILE == 0 else self.BLOCK

    def parts(self, rows: slice = slice(None)) -> tuple[Bytes, Floats]:
        """Codes [n, K] and scales [n, K / 32]."""
        part = self.data[rows]
        blocks = part.reshape(part.shape[0], -1, self.NBYTES)
        scale = np.ascontiguousarray(blocks[..., :4]).view("<f4")[..., 0]
        return blocks[..., 4:].reshape(part.shape[0], -1), scale.astype(np.float32)

    def dequantize(self, rows: slice = slice(None)) -> Floats:
        """float32, exact."""
        count = len(range(*rows.indices(self.shape[0])))
        out = np.empty((count, *self.shape[1:]), np.float32)
        whole = Float8(self.data[rows], self.by_row)
        step = max(1, _CHUNK * count // max(1, self.data.size))
        for i in range(0, count, step):
            codes, scale = whole.parts(slice(i, i + step))
            with np.errstate(invalid="ignore", over="ignore"):
                numbers = np.take(E4M3, codes).reshape(*scale.shape, self.BLOCK)
                np.multiply(numbers, scale[..., None], out=out[i : i + step].reshape(numbers.shape))
        return out


def _seen(scales: Floats) -> tuple[int, int]:
    """Rows and columns of the tiles that scales [n, K / 32] are equal in."""
    across = Float8.TILE // Float8.BLOCK
    wide = np.array_equal(scales, np.repeat(scales[:, ::across], across, axis=1)[:, : scales.shape[1]])
    begins = np.flatnonzero((scales[1:] != scales[:-1]).any(1)) + 1
    return math.gcd(*begins.tolist()) or Float8.TILE, Float8.TILE if wide else Float8.BLOCK


@dataclass(frozen=True)
class Rope:
    """Rotary embedding as a model uses it: one angle per pair of dimensions, and where the pairs lie.

    pairs=True rotates (0,1), (2,3), …; pairs=False rotates (i, i + dim/2). Scaling variants (linear, llama3, yarn)
    are already inside `frequencies` and `magnitude`.
    """

    frequencies: Floats = field(repr=False)  # [dim / 2], radians per position
    dim: int
    pairs: bool
    magnitude: float = 1.0  # cos and sin are multiplied by this (yarn)
    axes: tuple[int, ...] = ()  # [dim / 2] the axis of a token's positions that each turns by; empty: there is one


Layout: TypeAlias = Dense | Affine | Float8


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of a mixture: one matrix per expert, gate and up [f, d], down [d, f]; biases are vectors.

    A stack in a file is given as a view per expert, so that nothing is copied to describe it.
    """

    gate: tuple[Layout, ...]
    up: tuple[Layout, ...]
    down: tuple[Layout, ...]
    gate_bias: tuple[Dense, ...] = ()
    up_bias: tuple[Dense, ...] = ()
    down_bias: tuple[Dense, ...] = ()
    limit: float | None = None  # of gate and up before they are multiplied: the clamped activation of gpt-oss

    @property
    def count(self) -> int:
        return len(self.gate)

    def weights(self) -> tuple[Layout, ...]:
        """The matrices of all experts, in a fixed order."""
        return (*self.gate, *self.up, *self.down, *self.gate_bias, *self.up_bias, *self.down_bias)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a row's experts are chosen from its router logits, and what each counts.

    scores = softmax(logits) over all experts, or sigmoid(logits) of each. The `top` highest of scores (+ bias) are chosen, of
    two equal ones the lower number. With groups, the experts lie in `groups` equal runs and only those of the `top_groups`
    best runs may be chosen: a run is as good as its highest score (pair=False), or the sum of its two highest (pair=True).
    A chosen expert's weight is its score, without the bias, divided by the chosen ones' sum when `renormalize`, times scale.
    """

    top: int
    sigmoid: bool = False
    renormalize: bool = False
    scale: float = 1.0
    bias: Dense | None = None  # [E]; decides who is chosen, not how much it counts
    groups: int = 1
    top_groups: int = 1
    pair: bool = False
