"""Weights on a device: each layout becomes one tensor of the compute dtype, loaded once and shared by every program.

To a GPU they go straight from the mapped file, in chunks that are read ahead (`feed.py`): the model is never whole in host
memory. Affine blocks travel packed and are dequantized where they arrive, by the same products and sums in float32 as
`Affine.dequantize`, so the numbers are its numbers; then they are rounded to the compute dtype. Matrices that are
multiplied together lie in one tensor, and each is a view of it. With `random`, shapes are taken from the layouts and
numbers from a fixed seed: no file is read.

With `quantize`, matrices that products read become codes and scales (quantized.py), some rows at a time: the model is
never whole here in full precision. An embedding is quantized only where it is the output head too; vectors never are,
and what else is not is told of. The matrices of a mixture's experts are one stack, kept alike.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, TypeGuard

import numpy as np
import torch

from quire.backends.torch.feed import Feed, packed_rows
from quire.backends.torch.quantized import E4M3, GROUPS, WIDTH, Int4, Mixed, Part, Scaled, Tiled, Weight, tensors
from quire.backends.torch.words import QUARTER, IntWords, MxWords, fits
from quire.layouts import Affine, Codec, Dense, Float8, Ints, Layout, Scale
from quire.observe.errors import Unsupported

Packed: TypeAlias = Callable[[Layout, int, int], None]

_CHUNK = 1 << 24  # elements that are quantized at a time
_SPREAD = 0.02  # of random weights
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # what codes of e2m1 stand for, doubled
_WORDS = {
    "fp8": "fp8 (e4m3, a float32 scale for each output row)",
    "fp8-block": f"fp8 (e4m3, a float32 scale for each tile of {WIDTH} by {WIDTH})",
    "int8": "int8 (a float32 scale for each output row)",
    "int4": f"int4 (a float16 scale and zero for every {GROUPS[0]} columns, or fewer where those do not fit)",
    "keep": "the file's own four-bit codes (float16 scales and zeros), and its FP8 where a row or a tile has one scale",
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """What becomes a Tiled: e4m3 codes of which so many rows share their scales."""

    rows: int


@dataclass(frozen=True, slots=True)
class Words:
    """What becomes four-bit codes in the order of tensor cores: so many columns share a scale; 0: MXFP4."""

    group: int


Kind: TypeAlias = (
    torch.dtype | int | Tiles | Words
)  # numbers or codes of a type, the group of four-bit codes, FP8 in tiles, …


class Weights:
    """Tensors by the identity of their layouts, which are kept so that an id stays its own."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, random: bool = False, quantize: str = "none"):
        self.device = device
        self.dtype = dtype
        self.quantize = quantize
        self.float8 = True  # whether FP8 codes can be multiplied here: else a file's are not kept
        self.words = False  # whether four-bit codes can be multiplied here as tensor cores want them
        self._stacks: set[int] = set()  # ids of experts' matrices
        self._random = torch.Generator(device).manual_seed(0) if random else None
        self._tensors: dict[int, tuple[Layout, Weight]] = {}
        self._joined: dict[tuple[int, ...], Weight] = {}
        self._kept_back: dict[int, str] = {}  # matrices that might have been quantized, and what they are

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, joined ones counted once."""
        own = [t.untyped_storage() for _, weight in self._tensors.values() for t in tensors(weight)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in own}.values())

    def load(
        self,
        groups: Sequence[Sequence[Layout]],
        packed: Packed | None = None,
        products: Set[int] = frozenset(),
        kept_back: Mapping[int, str] = {},
        stacks: Set[int] = frozenset(),
    ) -> None:
        """Bring every layout of every group over; a group of several becomes one matrix, unless a part of it is here.

        `products` are the ids of those that are multiplied: they may be quantized. `kept_back` are those that are
        multiplied and may not, each with what it is. Groups of layouts in `stacks` must be of one kind.
        """
        self._kept_back |= kept_back
        self._stacks |= stacks
        for group in groups:
            if all(id(w) in stacks for w in group) and len({self._kind(w, products) for w in group}) > 1:
                products = products - {id(w) for w in group}
                self._kept_back |= {id(w): "experts not of one format" for w in group}
        unique = {id(w): w for group in groups for w in group if id(w) not in self._tensors}
        total, done = sum(w.nbytes for w in unique.values()), 0
        stored = {at for at, w in unique.items() if self._kind(w, products) == Words(0) and packed_rows(w)}
        with self._feeding(list(unique.values()), stored) as feed:
            for group in groups:
                new = [w for w in group if id(w) not in self._tensors]
                if len(group) > 1 and len(new) == len({id(w) for w in group}) == len(group):
                    whole, parts = self._join(group, products)
                    self._joined[tuple(map(id, group))] = whole
                else:
                    parts = [self._empty(self._kind(w, products), [w.shape[0]], w.shape) for w in new]
                for w, into in zip(new, parts, strict=True):
                    if id(w) not in self._tensors:
                        if isinstance(into, torch.Tensor):
                            self._fill(w, into, feed)
                        else:
                            self._quantize(w, into, feed)
                        self._tensors[id(w)] = (w, into)
                        done += w.nbytes
                        if packed is not None:
                            packed(w, done, total)

    def _feeding(self, layouts: list[Layout], packed: Set[int]) -> AbstractContextManager[Feed | None]:
        """What brings layouts to a device, in this order; None where they need no bringing."""
        if self._random is not None or self.device.type == "cpu":
            return nullcontext()
        return Feed(layouts, self.device, packed=packed)

    def __getitem__(self, layout: Layout) -> Weight:
        return self._tensors[id(layout)][1]

    def joined(self, layouts: Sequence[Layout]) -> Weight | None:
        """The matrix that these are consecutive rows of, if they were loaded together."""
        return self[layouts[0]] if len(layouts) == 1 else self._joined.get(tuple(map(id, layouts)))

    def stacked(self, layouts: Sequence[Layout]) -> Weight:
        """The matrix that these are consecutive rows of, put together now if they were not loaded so."""
        whole = self.joined(layouts)
        if whole is not None:
            return whole
        parts = [self[w] for w in layouts]
        dense = [p for p in parts if isinstance(p, torch.Tensor)]
        if len(dense) < len(parts):
            raise Unsupported(
                "experts that share a matrix, or whose matrices another product uses, cannot be quantized",
                cure="use --quantize none",
            )
        return torch.cat(dense)

    def told(self) -> list[str]:
        """What was quantized and what that saved, what is kept packed, and what was made larger: a line of each."""
        return self._told_quantized() + self._told_packed() + self._told_expanded()

    def _told_packed(self) -> list[str]:
        """A line about weights that stay packed without having been asked for: their numbers are the file's."""
        own = [(w, held) for w, held in self._tensors.values() if isinstance(held, MxWords)]
        if not own:
            return []
        size = sum(t.nbytes for _, held in own for t in tensors(held))
        plain = sum(math.prod(w.shape) for w, _ in own) * self.dtype.itemsize
        return [
            f"packed: {len(own)} matrices of MXFP4, {size / 2**20:.0f} MiB ({plain / 2**20:.0f} as {_name(self.dtype)})"
        ]

    def _told_expanded(self) -> list[str]:
        """A line about weights that take more memory than their codes do in the file."""
        found: dict[str, list[tuple[int, int]]] = {}
        for layout, held in self._tensors.values():
            if isinstance(layout, Dense) or not isinstance(held, torch.Tensor) or len(layout.shape) == 1:
                continue
            sizes = getattr(layout.data, "stored", layout.nbytes), held.nbytes
            if sizes[1] > sizes[0]:
                found.setdefault(_format(layout), []).append(sizes)
        keep = "; --quantize keep keeps four-bit integers and FP8 packed" if self.quantize == "none" else ""
        return [
            f"expanded: {len(sizes)} matrices of {label}, {sum(a for a, _ in sizes) / 2**20:.0f} MiB in their file, are "
            f"{sum(b for _, b in sizes) / 2**20:.0f} MiB here in {_name(self.dtype)}{keep}"
            for label, sizes in found.items()
        ]

    def _told_quantized(self) -> list[str]:
        if self.quantize == "none":
            return []
        name = _name(self.dtype)
        matrices = [(w, held) for w, held in self._tensors.values() if len(w.shape) > 1]
        kept = sum(not isinstance(held, torch.Tensor) for _, held in matrices)
        plain = sum(held.shape[0] * held.shape[1] for _, held in matrices) * self.dtype.itemsize
        plain += sum(tensors(held)[0].nbytes for w, held in self._tensors.values() if len(w.shape) == 1)
        others = Counter(self._named(w) for w, held in matrices if isinstance(held, torch.Tensor))
        rest = ", ".join(f"{n} {label}" for label, n in others.items())
        return [
            f"quantized: {_WORDS[self.quantize]}: {kept} of {len(matrices)} matrices, "
            f"{plain / 2**20:.0f} MiB in {name} are {self.nbytes / 2**20:.0f} MiB here"
            + (f"; in {name}: {rest}" if rest else "")
        ]

    def _named(self, layout: Layout) -> str:
        """The format of a matrix, with why it was not quantized if that is not plain from the format."""
        why = self._kept_back.get(id(layout))
        return _format(layout) if why is None else f"{_format(layout)} ({why})"

    def _kind(self, layout: Layout, products: Set[int]) -> Kind:
        """The form that a layout takes on the device. Vectors (norms, biases) are small: they keep float32."""
        if len(layout.shape) == 1:
            return torch.float32
        if id(layout) in products:
            if self.quantize in ("fp8", "int8"):
                return E4M3 if self.quantize == "fp8" else torch.int8
            if self.quantize == "fp8-block":
                return Tiles(WIDTH)
            if self.words and self.quantize in ("none", "keep") and self._stays(layout):
                return Words(0)
            if self.quantize == "int4":
                group = next((g for g in GROUPS if layout.shape[1] % (2 * g) == 0), None)
                return self.dtype if group is None else self._four_bit_kind(layout, group)
            if self.quantize == "keep" and _four_bits(layout):
                return self._four_bit_kind(layout, _group(layout))
            if self.quantize == "keep" and self.float8 and _by_row(layout):
                return E4M3
            if self.quantize == "keep" and self.float8 and _in_tiles(layout):
                return Tiles(layout.tile[0])
        return self.dtype

    def _stays(self, layout: Layout) -> bool:
        """Whether an expert's matrix is MXFP4 that is multiplied as it is: its numbers stay what they are."""
        mx = isinstance(layout, Affine) and layout.codec.e2m1
        return mx and id(layout) in self._stacks and fits(*_two(layout.shape), 0)

    def _four_bit_kind(self, layout: Layout, group: int) -> Kind:
        """How four-bit codes with so many columns to a scale lie here."""
        if self.words and id(layout) not in self._stacks and fits(*_two(layout.shape), group):
            return Words(group)
        return group

    def _empty(self, kind: Kind, heights: Sequence[int], shape: tuple[int, ...]) -> Part:
        """Space for matrices of these heights, one below the other."""
        if isinstance(kind, Words) and kind.group == 0:
            return MxWords.empty(shape[0], shape[1], self.device)
        if isinstance(kind, Words):
            return IntWords.empty(shape[0], shape[1], kind.group, self.device)
        if isinstance(kind, int):
            return Int4.empty(shape[0], shape[1], kind, self.device)
        if isinstance(kind, Tiles):  # a matrix may end within a tile: then tiles are cut until the next begins with one
            return Tiled.empty(shape[0], shape[1], math.gcd(kind.rows, *heights[:-1]), self.device)
        if kind in (E4M3, torch.int8):
            return Scaled.empty(shape[0], shape[1], kind, self.device)
        return torch.empty(shape, dtype=kind, device=self.device)

    def _join(self, group: Sequence[Layout], products: Set[int]) -> tuple[Weight, list[Part]]:
        """One matrix made of several, and for each of them its rows; neighbours of one kind share memory."""
        wholes: list[Part] = []
        parts: list[Part] = []
        for kind, run in groupby(group, lambda w: self._kind(w, products)):
            heights = [w.shape[0] for w in run]
            whole = self._empty(kind, heights, (sum(heights), group[0].shape[1]))
            wholes.append(whole)
            ends = np.cumsum(heights).tolist()
            for first, end in zip([0, *ends], ends, strict=False):
                parts.append(whole[first:end] if isinstance(whole, torch.Tensor) else whole.rows(first, end))
        return wholes[0] if len(wholes) == 1 else Mixed(tuple(wholes)), parts

    def _quantize(self, layout: Layout, into: Weight, feed: Feed | None) -> None:
        """Quantize some rows at a time: float32 rows on the device, then codes; or the file's own codes."""
        assert not isinstance(into, Mixed | torch.Tensor)  # a layout is of one kind, and who has tensors fills them
        if isinstance(into, MxWords) and isinstance(layout, Affine) and self._random is None:
            stored = bool(packed_rows(layout))
            for first, end, data in self._stored(layout, feed, packed=stored):
                into.rows(first, end).keep(*(as_stored(data, layout) if stored else microscaled(data, layout.codec)))
            return
        if self.quantize == "keep" and isinstance(into, Int4 | IntWords) and _four_bits(layout):
            apart = into.group // layout.codec.group
            for first, end, data in self._stored(layout, feed):
                codes, scale, zero = four_bits(data, layout.codec)
                into.rows(first, end).keep(codes, scale[:, ::apart], zero[:, ::apart])
            return
        if self.quantize == "keep" and isinstance(into, Scaled) and _by_row(layout):
            for first, end, data in self._stored(layout, feed):
                codes, scale = float8(data)
                into.rows(first, end).keep(codes, scale[:, 0])
            return
        if self.quantize == "keep" and isinstance(into, Tiled) and _in_tiles(layout):
            for first, end, data in self._stored(layout, feed):
                codes, scale = float8(data)
                into.rows(first, end).keep(codes, scale[:, :: WIDTH // Float8.BLOCK])
            return
        for first, end, floats in self._floats(layout, feed):
            into.rows(first, end).fill(floats)

    def _stored(
        self, layout: Affine | Float8, feed: Feed | None, *, packed: bool = False
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Rows of blocks on the device; `packed`, as the file has them."""
        if feed is not None:
            yield from feed.rows(layout)
            return
        for first, end in _steps(layout):
            data = np.hstack([a[first:end] for a in packed_rows(layout)]) if packed else layout.data[first:end]
            yield first, end, _bytes(data).to(self.device)

    def _floats(self, layout: Layout, feed: Feed | None) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Rows of a matrix in float32, on the device."""
        if feed is not None:
            for first, end, rows in feed.rows(layout):
                yield first, end, _numbers(rows, layout)
            return
        for first, end in _steps(layout):
            if self._random is not None:
                rows = torch.empty(end - first, layout.shape[1], dtype=torch.float32, device=self.device)
                yield first, end, rows.normal_(0.0, _SPREAD, generator=self._random)
            elif isinstance(layout, Dense):
                yield first, end, _dense(Dense(layout.data[first:end], layout.dtype)).float()
            else:
                yield first, end, torch.from_numpy(layout.dequantize(slice(first, end)))

    def _fill(self, layout: Layout, into: torch.Tensor, feed: Feed | None) -> None:
        if self._random is not None:
            around = float(layout.dequantize(slice(0, 1))[0]) if into.dim() == 1 else 0.0  # 1 for a norm
            into.normal_(around, _SPREAD, generator=self._random)
            if into.dim() == 1:
                into.copy_(into.to(self.dtype))  # as a trained model's file would have it
        elif feed is not None:
            for start, stop, rows in feed.rows(layout):
                into[start:stop] = rows if isinstance(layout, Dense) else _numbers(rows, layout)
        elif isinstance(layout, Dense):
            into.copy_(_dense(layout))
        else:
            into.copy_(torch.from_numpy(layout.dequantize()))  # gathering bytes is what torch is slow at on a CPU


def _steps(layout: Layout) -> Iterator[tuple[int, int]]:
    """A few rows at a time, whole tiles of them."""
    step = _CHUNK // layout.shape[-1] // WIDTH * WIDTH or max(1, _CHUNK // layout.shape[-1])
    for first in range(0, layout.shape[0], step):
        yield first, min(first + step, layout.shape[0])


def _format(layout: Layout) -> str:
    if isinstance(layout, Float8):
        return "FP8" if layout.by_row else "FP8 in tiles"
    return layout.codec.name if isinstance(layout, Affine) else layout.dtype


def _four_bits(layout: Layout) -> TypeGuard[Affine]:
    """Whether a layout's codes can be kept as they are: four bits, in whole pairs of groups."""
    return isinstance(layout, Affine) and layout.codec.bits == 4 and layout.shape[1] % (2 * layout.codec.group) == 0


def _group(layout: Affine) -> int:
    """Columns that share a scale in the file: a multiple of those that do in its blocks, where whoever puts them together says so."""
    _, columns = getattr(layout.data, "tile", None) or (1, layout.codec.group)
    return next((g for g in GROUPS if columns % g == 0 and layout.shape[1] % (2 * g) == 0), layout.codec.group)


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    return shape[0], shape[1]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_row(layout: Layout) -> TypeGuard[Float8]:
    """Whether a layout's FP8 numbers can be kept as they are, with a scale for each row."""
    return isinstance(layout, Float8) and layout.by_row


def _in_tiles(layout: Layout) -> TypeGuard[Float8]:
    """Whether they can, with a scale for each tile."""
    return isinstance(layout, Float8) and not layout.by_row and layout.tile[1] % WIDTH == 0


def _numbers(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Rows as they travelled, in float32."""
    if isinstance(layout, Affine):
        return dequantize(rows, layout.codec)
    if isinstance(layout, Dense):
        return rows.float()
    codes, scale = float8(rows)
    return (codes.float().view(*scale.shape, -1) * scale[..., None]).flatten(1)


def float8(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [n, K / 32 * 36] as e4m3 codes [n, K] and float32 scales [n, K / 32]."""
    blocks = data.reshape(data.shape[0], -1, Float8.NBYTES)
    scale = blocks[..., :4].contiguous().view(torch.float32)[..., 0]
    return blocks[..., 4:].reshape(data.shape[0], -1).view(E4M3), scale


def microscaled(data: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of a codec that is e2m1, as codes of 0 .. 15 [n, K] and the exponents of MXFP4 [n, K / 32]."""
    n = data.shape[0]
    blocks = data.reshape(n, -1, codec.nbytes)
    twice = _ints(codec.codes, blocks)
    codes = torch.bucketize(twice.abs().int(), torch.tensor(_TWICE, device=data.device)) + 8 * (twice < 0)
    factors = _scale(codec.scale, blocks, codec.groups)  # of twice a number
    return codes.to(torch.uint8).reshape(n, -1), (torch.frexp(factors)[1] + 127).to(torch.uint8).reshape(n, -1)


def as_stored(data: torch.Tensor, layout: Affine) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows of MXFP4 as their file has them: codes and exponents apart, where neighbours share a byte; or a block's exponent
    ahead of its codes, where those of its two halves do."""
    n, blocks = data.shape[0], layout.shape[1] // QUARTER
    if len(packed_rows(layout)) == 2:
        codes = data[:, : blocks * QUARTER // 2]
        return torch.stack((codes & 15, codes >> 4), -1).view(n, -1), data[:, blocks * QUARTER // 2 :]
    whole = data.view(n, blocks, -1)
    return torch.cat((whole[..., 1:] & 15, whole[..., 1:] >> 4), -1).view(n, -1), whole[..., 0]


def four_bits(data: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks [n, K / block * nbytes] as codes of 0 .. 15 [n, K], float32 scales and zeros [n, K / group]."""
    n = data.shape[0]
    blocks = data.reshape(n, -1, codec.nbytes)
    codes = (_ints(codec.codes, blocks) + codec.codes.offset).to(torch.uint8)
    scale = _scale(codec.scale, blocks, codec.groups)
    zero = scale * -float(codec.codes.offset)
    if codec.bias is not None:
        zero = zero + _scale(codec.bias, blocks, codec.groups)
    return codes.reshape(n, -1), scale.reshape(n, -1), zero.reshape(n, -1)


def _bytes(data: np.ndarray) -> torch.Tensor:
    """A view of memory that is only read; torch warns that it could be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.ascontiguousarray(data))


def _dense(layout: Dense) -> torch.Tensor:
    if layout.dtype == "bf16":
        return _bytes(np.ascontiguousarray(layout.data).view(np.int16)).view(torch.bfloat16)
    return _bytes(np.ascontiguousarray(layout.data, "<f4" if layout.dtype == "f32" else "<f2"))


def dequantize(data: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Blocks [n, K / block * nbytes] as float32 [n, K], exactly as Affine.dequantize."""
    n = data.shape[0]
    blocks = data.reshape(n, -1, codec.nbytes)
    codes = _ints(codec.codes, blocks).to(torch.float32).reshape(n, blocks.shape[1], codec.groups, codec.group)
    codes *= _scale(codec.scale, blocks, codec.groups)[..., None]
    if codec.bias is not None:
        codes += _scale(codec.bias, blocks, codec.groups)[..., None]
    return codes.reshape(n, -1)


def _ints(ints: Ints, blocks: torch.Tensor) -> torch.Tensor:
    total: torch.Tensor | None = None
    for p in ints.planes:
        at = torch.from_numpy(p.byte.astype(np.int64)).to(blocks.device)
        shift = torch.from_numpy(p.shift.astype(np.uint8)).to(blocks.device)
        bits = ((blocks.index_select(-1, at) ^ p.flip) >> shift) & p.mask
        bits = bits.to(torch.int16) << p.lift
        total = bits if total is None else total + bits
    assert total is not None  # a codec has at least one plane
    return total - ints.offset


def _scale(scale: Scale, blocks: torch.Tensor, groups: int) -> torch.Tensor:
    size, kind = (4, torch.float32) if scale.wide else (2, torch.float16)
    factor = blocks[..., scale.at : scale.at + size].contiguous().view(kind).to(torch.float32)  # [n, blocks, 1]
    if scale.negate:
        factor = -factor
    if scale.codes is None:
        return factor.expand(*factor.shape[:-1], groups)
    return factor * _ints(scale.codes, blocks).to(torch.float32)
