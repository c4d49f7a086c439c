"""Weights on a device: each layout becomes one tensor of the compute dtype, loaded once and shared by every program.

To a GPU they go straight from the mapped file, in chunks that are read ahead (`feed.py`): the model is never whole in host
memory. Affine blocks travel packed and are dequantized where they arrive, by the same products and sums in float32 as
`Affine.dequantize`, so the numbers are its numbers; then they are rounded to the compute dtype. Matrices that are
multiplied together lie in one tensor, and each is a view of it. With `random`, shapes are taken from the layouts and
numbers from a fixed seed: no file is read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import numpy as np
import torch

from quire.backends.torch.feed import Feed
from quire.layouts import Codec, Dense, Ints, Layout, Scale

Packed: TypeAlias = Callable[[Layout, int, int], None]

_SPREAD = 0.02  # of random weights


class Weights:
    """Tensors by the identity of their layouts, which are kept so that an id stays its own."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *, random: bool = False):
        self.device = device
        self.dtype = dtype
        self._random = torch.Generator(device).manual_seed(0) if random else None
        self._tensors: dict[int, tuple[Layout, torch.Tensor]] = {}
        self._joined: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, joined ones counted once."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for _, t in self._tensors.values()}
        return sum(storages.values())

    def load(self, groups: Sequence[Sequence[Layout]], packed: Packed | None = None) -> None:
        """Bring every layout of every group over; a group of several becomes one matrix, unless a part of it is here."""
        unique = {id(w): w for group in groups for w in group if id(w) not in self._tensors}
        total, done = sum(w.nbytes for w in unique.values()), 0
        with self._feeding(list(unique.values())) as feed:
            for group in groups:
                new = [w for w in group if id(w) not in self._tensors]
                if len(group) > 1 and len(new) == len({id(w) for w in group}) == len(group):
                    rows, columns = sum(w.shape[0] for w in group), group[0].shape[1]
                    whole = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
                    self._joined[tuple(map(id, group))] = whole
                    parts = list(torch.split(whole, [w.shape[0] for w in group]))
                else:
                    parts = [torch.empty(w.shape, dtype=self._kind(w), device=self.device) for w in new]
                for w, into in zip(new, parts, strict=True):
                    if id(w) not in self._tensors:
                        self._fill(w, into, feed)
                        self._tensors[id(w)] = (w, into)
                        done += w.nbytes
                        if packed is not None:
                            packed(w, done, total)

    def _feeding(self, layouts: list[Layout]) -> AbstractContextManager[Feed | None]:
        """What brings layouts to a device, in this order; None where they need no bringing."""
        if self._random is not None or self.device.type == "cpu":
            return nullcontext()
        return Feed(layouts, self.device)

    def __getitem__(self, layout: Layout) -> torch.Tensor:
        return self._tensors[id(layout)][1]

    def joined(self, layouts: Sequence[Layout]) -> torch.Tensor | None:
        """The matrix that these are consecutive rows of, if they were loaded together."""
        return self[layouts[0]] if len(layouts) == 1 else self._joined.get(tuple(map(id, layouts)))

    def _kind(self, layout: Layout) -> torch.dtype:
        """Vectors (norms, biases) are small: they keep float32."""
        return torch.float32 if len(layout.shape) == 1 else self.dtype

    def _fill(self, layout: Layout, into: torch.Tensor, feed: Feed | None) -> None:
        if self._random is not None:
            into.normal_(0.0, _SPREAD, generator=self._random)
            if into.dim() == 1:
                into.add_(1.0)  # a norm near 1, as in a trained model
        elif feed is not None:
            for start, stop, rows in feed.rows(layout):
                into[start:stop] = rows if isinstance(layout, Dense) else dequantize(rows, layout.codec)
        elif isinstance(layout, Dense):
            into.copy_(_dense(layout))
        else:
            into.copy_(torch.from_numpy(layout.dequantize()))  # gathering bytes is what torch is slow at on a CPU


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
    half = blocks[..., scale.at : scale.at + 2].contiguous().view(torch.float16).to(torch.float32)  # [n, blocks, 1]
    if scale.negate:
        half = -half
    if scale.codes is None:
        return half.expand(*half.shape[:-1], groups)
    return half * _ints(scale.codes, blocks).to(torch.float32)
