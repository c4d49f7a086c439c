"""Quantized matrices on a device: codes with scales, made from float32 rows a part at a time, and read back exactly.

  Scaled  w[i, j] = code[i, j] * scale[i]: e4m3 or int8 codes, one float32 scale for each output row
  Tiled   w[i, j] = code[i, j] * scale[i / height, j / 128]: e4m3 codes, one float32 scale for each tile
  Int4    w[i, j] = code[i, j] * scale[i, group] + zero[i, group]: codes of four bits in pairs of groups, half scales
  IntWords, MxWords   four bits in the order of tensor cores: words.py
  Mixed   rows of several kinds, one after another: matrices that are multiplied together but were not kept alike

`dequantize` is the meaning of each, in float32; a faster product must be one with that. Nothing here knows files,
devices or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from quire.backends.torch.words import IntWords, MxWords, nearest

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}  # what the largest magnitude of a row becomes
GROUPS = (128, 64, 32)  # columns that share a scale of Int4, the first that fits
WIDTH = 128  # columns of a tile
TINY = 1e-30  # a row of zeros must have a scale that can divide


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix of one-byte codes, with a scale for each row."""

    codes: torch.Tensor  # [n, k] e4m3 or int8
    scale: torch.Tensor  # [n] float32

    @classmethod
    def empty(cls, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Scaled:
        return cls(torch.empty(n, k, dtype=dtype, device=device), torch.empty(n, dtype=torch.float32, device=device))

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scale

    def rows(self, first: int, end: int) -> Scaled:
        """A view of some of its rows, in the same memory."""
        return Scaled(self.codes[first:end], self.scale[first:end])

    def fill(self, w: torch.Tensor) -> None:
        """Become float32 w [n, k], as nearly as the codes can."""
        self.keep(*encode(w, self.codes.dtype))

    def keep(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Become these codes [n, k] and scales [n]."""
        self.codes.copy_(codes)
        self.scale.copy_(scale)

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.scale[:, None]

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number, float32."""
        return self.codes.view(torch.uint8)[ids].view(self.codes.dtype).float() * self.scale[ids, None]


@dataclass(frozen=True, slots=True)
class Tiled:
    """A matrix of e4m3 codes, with a scale for each tile of `height` rows and 128 columns; the last tiles may be cut off."""

    codes: torch.Tensor  # [n, k]
    scale: torch.Tensor  # [tiles of rows, tiles of columns] float32, its rows 16 bytes apart or a multiple of that
    height: int
    skip: int = 0  # rows of the first tile that are not here

    @classmethod
    def empty(cls, n: int, k: int, height: int, device: torch.device) -> Tiled:
        across = -(-k // WIDTH)
        scale = torch.empty(-(-n // height), -(-across // 4) * 4, dtype=torch.float32, device=device)
        return cls(torch.empty(n, k, dtype=E4M3, device=device), scale[:, :across], height)

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scale

    def rows(self, first: int, end: int) -> Tiled:
        """A view of some of its rows, in the same memory."""
        top, skip = divmod(first + self.skip, self.height)
        own = self.scale[top : -(-(end + self.skip) // self.height)]
        return Tiled(self.codes[first:end], own, self.height, skip)

    def fill(self, w: torch.Tensor) -> None:
        """Become float32 w [n, k], as nearly as the codes can. Tiles must begin here."""
        if self.skip:
            raise ValueError(f"a tile is filled whole, not from its row {self.skip} on")
        n, k = w.shape
        down, across = self.scale.shape
        padded = torch.nn.functional.pad(w.abs(), (0, across * WIDTH - k, 0, down * self.height - n))
        peak = padded.view(down, self.height, across, WIDTH).amax((1, 3))
        self.scale.copy_(torch.where(peak.isfinite(), peak.clamp(min=TINY) / LARGEST[E4M3], float("nan")))
        self.codes.copy_((w / self._wide(self._of_rows())).to(E4M3))

    def keep(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        """Become these codes [n, k], of which rows have these scales [n, k / 128]: those of a tile are all one."""
        self.codes.copy_(codes)
        first = torch.arange(self.scale.shape[0], device=scale.device) * self.height - self.skip
        self.scale.copy_(scale[first.clamp(min=0)])

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self._wide(self._of_rows())

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number, float32."""
        codes = self.codes.view(torch.uint8)[ids].view(E4M3).float()
        return codes * self._wide(self.scale[(ids + self.skip) // self.height])

    def _of_rows(self) -> torch.Tensor:
        rows = torch.arange(self.codes.shape[0], device=self.scale.device) + self.skip
        return self.scale[rows // self.height]

    def _wide(self, scale: torch.Tensor) -> torch.Tensor:
        return scale.repeat_interleave(WIDTH, 1)[:, : self.codes.shape[1]]


@dataclass(frozen=True, slots=True)
class Int4:
    """A matrix of four-bit codes, with a scale and a zero for every `group` columns of a row."""

    packed: torch.Tensor  # [n, k / 2] uint8, see pack
    scale: torch.Tensor  # [k / group, n] float16
    zero: torch.Tensor  # [k / group, n] float16
    group: int

    @classmethod
    def empty(cls, n: int, k: int, group: int, device: torch.device) -> Int4:
        half = {"dtype": torch.float16, "device": device}
        packed = torch.empty(n, k // 2, dtype=torch.uint8, device=device)
        return cls(packed, torch.empty(k // group, n, **half), torch.empty(k // group, n, **half), group)

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.packed, self.scale, self.zero

    def rows(self, first: int, end: int) -> Int4:
        """A view of some of its rows, in the same memory."""
        return Int4(self.packed[first:end], self.scale[:, first:end], self.zero[:, first:end], self.group)

    def fill(self, w: torch.Tensor) -> None:
        """Become float32 w [n, k]: codes are the nearest to it once scale and zero have been rounded."""
        self.keep(*nearest(w, self.group))

    def keep(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Become codes [n, k] of 0 .. 15 with these scales and zeros [n, k / group], which are rounded to half floats."""
        self.packed.copy_(pack(codes, self.group))
        self.scale.copy_(scale.t())
        self.zero.copy_(zero.t())

    def dequantize(self) -> torch.Tensor:
        return self._floats(self.packed, self.scale.t(), self.zero.t())

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number, float32."""
        return self._floats(self.packed[ids], self.scale.t()[ids], self.zero.t()[ids])

    def _floats(self, packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        codes = unpack(packed, self.group).view(packed.shape[0], -1, self.group).float()
        return (codes * scale.float()[..., None] + zero.float()[..., None]).flatten(1)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Matrices of equal width, one below the other."""

    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(p.shape[0] for p in self.parts), self.parts[0].shape[1]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for p in self.parts for t in tensors(p))

    def rows(self, first: int, end: int) -> Mixed:
        """A view of some of its rows, in the same memory."""
        found: list[Part] = []
        for p in self.parts:
            n = p.shape[0]
            a, b = max(first, 0), min(end, n)
            if a < b:
                found.append(p[a:b] if isinstance(p, torch.Tensor) else p.rows(a, b))
            first, end = first - n, end - n
        return Mixed(tuple(found))

    def dequantize(self) -> torch.Tensor:
        return torch.cat([p.float() if isinstance(p, torch.Tensor) else p.dequantize() for p in self.parts])


Part: TypeAlias = torch.Tensor | Scaled | Tiled | Int4 | IntWords | MxWords
Quantized: TypeAlias = Scaled | Tiled | Int4 | IntWords | MxWords | Mixed
Weight: TypeAlias = torch.Tensor | Quantized


def tensors(weight: Weight) -> tuple[torch.Tensor, ...]:
    """The tensors that a weight is made of."""
    return (weight,) if isinstance(weight, torch.Tensor) else weight.tensors


def encode(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `dtype` and float32 scales of the last axis: the largest magnitude becomes the largest code.

    A row with a number that is not finite gets a scale that is not a number.
    """
    x, largest = x.float(), LARGEST[dtype]
    peak = x.abs().amax(-1)
    scale = torch.where(peak.isfinite(), peak.clamp(min=TINY) / largest, float("nan"))
    if dtype == torch.int8:  # by a product: the bits of the other backends
        codes = (x * (largest / peak.clamp(min=TINY))[..., None]).round_().nan_to_num_()
    else:
        codes = x / scale[..., None]
    return codes.to(dtype), scale


def pack(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Codes uint8 [n, k] of 0 .. 15 -> bytes [n, k / 2]. k must be made of whole pairs of groups.

    The byte at column j of a pair holds code j of its first group in the low half, and of its second in the high one.
    """
    n, k = codes.shape
    if k % (2 * group):
        raise ValueError(f"{k} columns are not whole pairs of groups of {group}: pad with a group of scale 0")
    pair = codes.view(n, k // (2 * group), 2, group)
    return (pair[:, :, 0] | (pair[:, :, 1] << 4)).reshape(n, k // 2)


def unpack(packed: torch.Tensor, group: int) -> torch.Tensor:
    """The codes again."""
    n, half = packed.shape
    pair = packed.view(n, half // group, 1, group)
    return torch.cat([pair & 15, pair >> 4], 2).reshape(n, 2 * half)
