"""Blocks whose codes are looked up in a codebook (the IQ formats), turned into plain codes when they are read.

Kernels know no codebooks: what they see is an Affine tensor with one code in a byte, whose numbers are exactly those of the file.
`Expanded` stands in for its bytes. It knows their shape and size, can be cut along its first axis, and becomes an array only where
one is asked for (`np.asarray`, `reshape`), some rows or a tensor at a time: nothing is kept, and the model is never there twice.

    expanded block   d: f32    one scale per group: i8 or u8    one code per number: u8

d is a float32 because most formats divide their float16 by 4 or 8, which a small float16 cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from quire.layouts import Affine, Bytes, Codec, Ints, Plane, Scale

Expand: TypeAlias = Callable[[Bytes], Bytes]  # blocks [n, bytes in the file] -> [n, bytes of the codec]
_BLOCKS = 1024  # expanded at a time: temporaries that stay in the cache


class Expanded:
    """An array of blocks that are expanded when they are read: [..., blocks of a row * bytes of a block]."""

    def __init__(self, source: Bytes, nbytes: int, codec: Codec, expand: Expand):
        self._source = source  # [..., bytes of a row in the file]
        self._nbytes = nbytes  # of a block in the file
        self._codec = codec
        self._expand = expand
        self.shape = (*source.shape[:-1], source.shape[-1] // nbytes * codec.nbytes)
        self.ndim = source.ndim
        self.size = self.nbytes = source.size // nbytes * codec.nbytes

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self._source.size

    @property
    def packed(self) -> tuple[Bytes, ...]:
        """The rows as the file has them, before they are expanded: one array, or several that lie apart in it."""
        return getattr(self._source, "parts", None) or (self._source,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: int | slice) -> Expanded:
        """A part of the array, some rows or one matrix of a stack, which is not expanded yet."""
        if self.ndim == 1:
            raise IndexError("one row of blocks cannot be cut")
        return Expanded(self._source[at], self._nbytes, self._codec, self._expand)

    def reshape(self, *shape: int) -> Bytes:
        return self._array().reshape(*shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("blocks of a codebook are made when they are read: there is no array to share")
        whole = self._array()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _array(self) -> Bytes:
        blocks = self._source.reshape(-1, self._nbytes)
        out = np.empty((len(blocks), self._codec.nbytes), np.uint8)
        with np.errstate(invalid="ignore"):  # scales that are not numbers stay what they are
            for i in range(0, len(blocks), _BLOCKS):
                out[i : i + _BLOCKS] = self._expand(blocks[i : i + _BLOCKS])
        return out.reshape(self.shape)


def codec_of(name: str, *, group: int, bits: int, offset: int, signed_scales: bool = False) -> Codec:
    """The codec of expanded blocks of 256."""
    groups = 256 // group
    flip, low = (0x80, 128) if signed_scales else (0, 0)
    return Codec(
        name=name,
        block=256,
        nbytes=4 + groups + 256,
        group=group,
        bits=bits,
        codes=Ints((_bytes(4 + groups, 256, bits),), offset=offset),
        scale=Scale(0, Ints((Plane.packed(4, groups, run=groups, bits=8, flip=flip),), offset=low), wide=True)
        if signed_scales
        else Scale(0, Ints((_bytes(4, groups, 5),)), wide=True),
    )


def _bytes(at: int, count: int, bits: int) -> Plane:
    """One number in each byte, of which it uses some bits."""
    byte = np.arange(at, at + count, dtype=np.uint16)
    return Plane(byte, np.zeros(count, np.uint8), (1 << bits) - 1)


def read(data: Bytes, shape: tuple[int, ...], nbytes: int, codec: Codec, expand: Expand) -> Affine:
    """A tensor whose blocks take `nbytes` in the file, as the layout that the codec describes."""
    source = data.reshape(*shape[:-1], shape[-1] // codec.block * nbytes)
    return Affine(cast(Bytes, Expanded(source, nbytes, codec, expand)), codec)


def assemble(d: npt.NDArray[np.float32], scales: Bytes, codes: Bytes) -> Bytes:
    """d [n] or [n, 1], scales [n, groups], codes [n, 256] as expanded blocks."""
    n, groups = scales.shape
    out = np.empty((n, 4 + groups + 256), np.uint8)
    out[:, :4] = np.ascontiguousarray(d, "<f4").reshape(n, 1).view(np.uint8)
    out[:, 4 : 4 + groups] = scales
    out[:, 4 + groups :] = codes
    return out


def half(blocks: Bytes, at: int, over: int = 1) -> npt.NDArray[np.float32]:
    """The float16 at a byte of each block, divided by a power of two, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32) * np.float32(1 / over)


def words(blocks: Bytes, first: int, end: int, kind: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Bytes first to end of each block as little-endian integers [n, count]."""
    return np.ascontiguousarray(blocks[:, first:end]).view(kind)


def nibbles(data: Bytes) -> Bytes:
    """[n, count] -> [n, 2 count]: low nibble, high nibble, of one byte after another."""
    return np.stack((data & np.uint8(15), data >> np.uint8(4)), axis=-1).reshape(len(data), -1)


def eights(grid: Bytes) -> npt.NDArray[np.uint64]:
    """A codebook's entries of 8 numbers, each as one word."""
    return np.ascontiguousarray(grid).view(np.uint64).reshape(-1)


def fours(grid: Bytes) -> npt.NDArray[np.uint32]:
    """A codebook's entries of 4 numbers, each as one word."""
    return np.ascontiguousarray(grid).view(np.uint32).reshape(-1)


# Eight sign bits -> a word with all bits of each negative number's byte set.
MASKS: npt.NDArray[np.uint64] = eights(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * np.uint8(255)
)
# Seven sign bits are written; the eighth makes their number even.
EVEN = np.array([i | (i.bit_count() & 1) << 7 for i in range(128)], np.uint8)


def apply_signs(magnitudes: npt.NDArray[np.uint64], signs: npt.NDArray[np.integer[Any]], offset: int) -> Bytes:
    """offset + m or offset - m for eight numbers in a word; [n, words] -> codes [n, 8 words].

    Eight bytes at once: no byte borrows from its neighbour, as no magnitude is more than the offset.
    """
    negative = magnitudes & MASKS[signs]
    codes = magnitudes + np.uint64(offset * 0x0101010101010101) - (negative << np.uint64(1))
    return codes.view(np.uint8).reshape(len(codes), -1)
