"""Four-bit matrices in the order in which tensor cores take them: tiles of 64 rows by 128 columns, eight codes in a word.

  MxWords   w[i, j] = value(code[i, j]) * 2 ** (exponent[i, j / 32] - 127), the values of MXFP4
  IntWords  w[i, j] = code[i, j] * scale[i, group] + zero[i, group], groups of 32, 64 or 128 columns, half scales

A tile is 64 rows of 16 words, one block of 4 KiB. Word i of a row holds the codes of columns 32 q + 2 i and 32 q + 2 i + 1 for
q = 0 .. 3, the first of each two in its low half, the second in its high half. So one mask (after a shift) cuts out of a word two
neighbouring numbers, as the two halves of a register that a tensor core multiplies, and all words of a row together give 32
columns that lie side by side. Within a half the four codes lie so that as few instructions as possible cut them out:

  IntWords  code q in bits 4 q .. 4 q + 3
  MxWords   code 0 in bits 15 (sign), 8 .. 6; code 1 in 12, 5 .. 3; code 2 in 14, 2 .. 0; code 3 in 13, 11 .. 9

With its sign in bit 15 and its three other bits in 8 .. 6, a code of MXFP4 is a bfloat16: 2 ** -126 times its value, zero and
the subnormal half included. `dequantize` is the meaning of each in float32. Nothing here knows files, devices or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

HIGH, WIDE = 64, 128  # rows and columns of a tile
WORDS = WIDE // 8  # of a row in a tile
QUARTER = 32  # columns that one shift of a tile's words gives; those of one exponent of MXFP4
BIAS = 62  # what is added to an exponent of MXFP4: as that of a bfloat16, times a code, it gives 2 ** -64 of the number
MOST = 192  # the largest exponent that stays a number so
_INT_AT = (0, 4, 8, 12)
_MX_AT = ((15, 6), (12, 3), (14, 0), (13, 9))  # sign, and the lowest of the other three bits
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # from here on the next value is nearer


def fits(n: int, k: int, block: int) -> bool:
    """Whether a matrix of n rows and k columns, with scales for `block` of them, is made of whole tiles. MXFP4's last may be cut off."""
    return n % HIGH == 0 and k % (QUARTER if block == 0 else WIDE) == 0 and block in (0, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class MxWords:
    """A matrix of MXFP4. What the last tile has more columns than the matrix is zero."""

    words: torch.Tensor  # [n / 64, tiles of columns, 64, 16] int32
    scale: (
        torch.Tensor
    )  # [n / 64, tiles of columns, 64] int32: a byte for each 32 columns, exponent + BIAS, the first lowest
    k: int

    @classmethod
    def empty(cls, n: int, k: int, device: torch.device) -> MxWords:
        shape = n // HIGH, -(-k // WIDE), HIGH
        whole = {"dtype": torch.int32, "device": device}
        return cls(torch.empty(*shape, WORDS, **whole), torch.empty(shape, **whole), k)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0] * HIGH, self.k

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.words, self.scale

    def rows(self, first: int, end: int) -> MxWords:
        """A view of some of its rows, whole tiles of them, in the same memory."""
        own = _tiles(first, end)
        return MxWords(self.words[own], self.scale[own], self.k)

    def fill(self, w: torch.Tensor) -> None:
        """Become float32 w [n, k]: each exponent is that of the block's largest number, less the two that 6 has."""
        blocks = w.view(w.shape[0], -1, QUARTER)
        peak = blocks.abs().amax(-1).clamp(min=2.0**-100)
        exponent = (torch.frexp(peak)[1] + 124).clamp(0, MOST)
        size = torch.ldexp(blocks.abs(), (127 - exponent)[..., None])
        code = torch.bucketize(size, torch.tensor(_BETWEEN, device=w.device), right=True) + 8 * (blocks < 0)
        self.keep(code.to(torch.uint8).view(w.shape), exponent.to(torch.uint8))

    def keep(self, codes: torch.Tensor, exponents: torch.Tensor) -> None:
        """Become codes [n, k] of 0 .. 15, the sign in the highest bit, with exponents uint8 [n, k / 32]. What is above MOST is infinite."""
        n, k = codes.shape
        more = -k % WIDE
        codes = torch.nn.functional.pad(codes, (0, more))
        exponents = torch.nn.functional.pad(exponents, (0, more // QUARTER))
        fields = _quarters(codes)
        halves = [(f >> 3) << sign | (f & 7) << low for f, (sign, low) in zip(fields, _MX_AT, strict=True)]
        self.words.copy_(_join(halves))
        own = (exponents.int().clamp(max=MOST + 1) + BIAS).view(n // HIGH, HIGH, -1, 4).transpose(1, 2)
        self.scale.copy_(own[..., 0] | own[..., 1] << 8 | own[..., 2] << 16 | own[..., 3] << 24)

    def dequantize(self) -> torch.Tensor:
        return self._floats(self.words, self.scale).transpose(1, 2).flatten(0, 1).flatten(1)[:, : self.k]

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number, float32."""
        at = ids // HIGH, slice(None), ids % HIGH
        return self._floats(self.words[at], self.scale[at]).flatten(1)[:, : self.k]

    def _floats(self, words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """words [..., 16] and scale [...] -> [..., 128]"""
        table = torch.tensor((*_VALUES, *(-v for v in _VALUES)), device=words.device)
        halves = _split(words)
        codes = [(h >> sign & 1) << 3 | h >> low & 7 for h, (sign, low) in zip([halves] * 4, _MX_AT, strict=True)]
        exponents = torch.stack([scale >> 8 * q & 255 for q in range(4)], -1) - BIAS - 127
        powers = torch.where(exponents > MOST - 127, float("inf"), torch.exp2(exponents.float()))
        return (table[torch.stack(codes, -2)] * powers[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class IntWords:
    """A matrix of four-bit integers, with a scale and a zero for every `group` columns of a row."""

    words: torch.Tensor  # [n / 64, k / 128, 64, 16] int32
    scale: (
        torch.Tensor
    )  # [n / 64, k / group, 64] int32: two float16, the scale in the low half, the zero in the high one
    group: int

    @classmethod
    def empty(cls, n: int, k: int, group: int, device: torch.device) -> IntWords:
        whole = {"dtype": torch.int32, "device": device}
        words = torch.empty(n // HIGH, k // WIDE, HIGH, WORDS, **whole)
        return cls(words, torch.empty(n // HIGH, k // group, HIGH, **whole), group)

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0] * HIGH, self.words.shape[1] * WIDE

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.words, self.scale

    def rows(self, first: int, end: int) -> IntWords:
        """A view of some of its rows, whole tiles of them, in the same memory."""
        own = _tiles(first, end)
        return IntWords(self.words[own], self.scale[own], self.group)

    def keep(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """Become codes [n, k] of 0 .. 15 with these scales and zeros [n, k / group], which are rounded to half floats."""
        self.words.copy_(_join([f << at for f, at in zip(_quarters(codes), _INT_AT, strict=True)]))
        pair = torch.stack((scale, zero), -1).half().view(torch.int32)[..., 0]
        self.scale.copy_(pair.view(-1, HIGH, pair.shape[1]).transpose(1, 2))

    def fill(self, w: torch.Tensor) -> None:
        """Become float32 w [n, k]: codes are the nearest to it once scale and zero have been rounded."""
        self.keep(*nearest(w, self.group))

    def dequantize(self) -> torch.Tensor:
        found = self._floats(
            self.words, self.scale.transpose(1, 2).unflatten(2, (self.words.shape[1], -1)).transpose(1, 2)
        )
        return found.transpose(1, 2).flatten(0, 1).flatten(1)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows by number, float32."""
        scale = self.scale[ids // HIGH, :, ids % HIGH].unflatten(1, (self.words.shape[1], -1))
        return self._floats(self.words[ids // HIGH, :, ids % HIGH], scale).flatten(1)

    def _floats(self, words: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """words [..., 16] and scale [..., groups of a tile] -> [..., 128]"""
        codes = torch.stack([_split(words) >> at & 15 for at in _INT_AT], -2).flatten(-2)
        pair = scale.contiguous()[..., None].view(torch.float16).float()
        grouped = codes.unflatten(-1, (-1, self.group)).float()
        return (grouped * pair[..., :1] + pair[..., 1:]).flatten(-2)


def nearest(w: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 w [n, k] as codes uint8 [n, k], and half scales and zeros [n, k / group]: the lowest number is code 0."""
    groups = w.view(w.shape[0], -1, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scale, zero = ((high - low) / 15.0).half(), low.half()
    step = scale.float()[..., None]
    codes = torch.where(step > 0, (groups - zero.float()[..., None]) / step, 0.0).round_().clamp_(0.0, 15.0)
    return codes.to(torch.uint8).view(w.shape), scale, zero


def _tiles(first: int, end: int) -> slice:
    if first % HIGH or end % HIGH:
        raise ValueError(f"rows {first} to {end} are not whole tiles of {HIGH}")
    return slice(first // HIGH, end // HIGH)


def _quarters(codes: torch.Tensor) -> list[torch.Tensor]:
    """Codes [n, k] by the quarter of their tile's columns: four of [n / 64, 64, k / 128, 16, 2], int32."""
    n, k = codes.shape
    return list(codes.int().view(n // HIGH, HIGH, k // WIDE, 4, WORDS, 2).unbind(3))


def _join(fields: list[torch.Tensor]) -> torch.Tensor:
    """The fields of halves [n / 64, 64, k / 128, 16, 2] as words in their tiles."""
    halves = fields[0] | fields[1] | fields[2] | fields[3]
    return (halves[..., 0] | halves[..., 1] << 16).transpose(1, 2)


def _split(words: torch.Tensor) -> torch.Tensor:
    """Words [..., 16] as their halves [..., 32], in the order of columns."""
    return torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), -1).flatten(-2)
