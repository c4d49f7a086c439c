"""Arrays of strings in a GGUF file: found without a Python loop per byte or, mostly, per string; decoded on demand.

A vocabulary is a chain: each string's 8-byte length says where the next one starts. `chain` walks it, checking every
length against the end it is given; `Strings` then holds only where the strings lie.

Text that is not valid UTF-8 (a token can be any bytes) is decoded with `surrogateescape`: nothing is lost, and
`text.encode("utf-8", "surrogateescape")` gives the bytes back.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

ESCAPE = "surrogateescape"
_WINDOW = 1 << 17  # bytes that are looked at in one go
_LENGTH = struct.Struct("<Q")


class Strings(Sequence[str]):
    """An array of strings, decoded on demand. It keeps the mapped file alive, and a decoded copy of nothing."""

    __slots__ = ("_data", "_heads")

    def __init__(self, data: npt.NDArray[np.uint8], heads: npt.NDArray[np.int64]):
        self._data = data  # [bytes of the array], each string after its 8-byte length
        self._heads = heads  # [n + 1] where each length starts, and the end

    def __len__(self) -> int:
        return self._heads.size - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        n = len(self)
        if not -n <= index < n:
            raise IndexError(f"string {index} of {n}")
        i = index % n
        return self._data[self._heads[i] + 8 : self._heads[i + 1]].tobytes().decode("utf-8", ESCAPE)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def __repr__(self) -> str:
        return f"<{len(self)} strings, {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Bytes of text, without the lengths."""
        return int(self._heads[-1] - self._heads[0]) - 8 * len(self)

    def tolist(self) -> list[str]:
        """All strings as a list."""
        # If the only zeros are those of the lengths, one zero can stand for each length: then one decode and one split
        # do the work of a loop. Lengths below 65,536 are all zeros once their two low bytes are blotted out.
        heads = self._heads[:-1]
        if int(np.diff(self._heads).max(initial=0)) < 8 + (1 << 16):
            data = self._data.copy()
            data[heads] = data[heads + 1] = 0
            keep = data != 0
            if keep.size - np.count_nonzero(keep) == 8 * heads.size:
                keep[heads] = True
                return data[keep].tobytes().decode("utf-8", ESCAPE).split("\0")[1:]
        return [text.decode("utf-8", ESCAPE) for text in self.tobytes()]

    def tobytes(self) -> list[bytes]:
        """All strings, as the bytes they are in the file."""
        data, heads = self._data.tobytes(), self._heads.tolist()
        return [data[a + 8 : b] for a, b in pairwise(heads)]


def chain(data: npt.NDArray[np.uint8], start: int, end: int, count: int) -> tuple[npt.NDArray[np.int64], int]:
    """Where each of `count` strings starts (at its length), then where the last one ends: [count + 1].

    The second result is how many of them lie before `end`; if not all, the place at that index is the first bad one's.

    Short strings make the chain visible at once: their lengths are a byte followed by seven zeros. `_run` finds such
    starts in a window, and they are right exactly as far as each one's length leads to the next. Where that breaks off
    (an empty or a long string, zeros in the text) strings are hopped one at a time.
    """
    heads = np.empty(count + 1, np.int64)
    view = data.data
    i, at, slow = 0, start, 8
    while i < count:
        run, reached = _run(data[at : min(at + _WINDOW, end)], count - i)
        if run.size and at + reached <= end:
            heads[i : i + run.size] = at + run
            i, at = i + run.size, at + reached
        # A run that broke off early may be a sign of more such starts: then hop ever longer before looking again.
        slow = 8 if reached > _WINDOW // 8 else min(slow * 2, 4096)
        for _ in range(min(slow, count - i)):
            heads[i] = at
            if end - at < 8:
                return heads, i
            length: int = _LENGTH.unpack_from(view, at)[0]
            if length > end - at - 8:
                return heads, i
            i, at = i + 1, at + 8 + length
    heads[count] = at
    return heads, count


def _run(window: npt.NDArray[np.uint8], most: int) -> tuple[npt.NDArray[np.int64], int]:
    """The longest chain of lengths 1 to 255 from the window's start, and where it leads (perhaps past the window)."""
    if window.size < 8:
        return np.empty(0, np.int64), 0
    zero = window == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]
    starts = np.flatnonzero(seven[1:] & ~zero[: seven.size - 1])[:most]  # a byte that is not zero, then seven that are
    if starts.size == 0 or starts[0] != 0:
        return np.empty(0, np.int64), 0
    leads = starts + 8 + window[starts]
    broken = np.flatnonzero(leads[:-1] != starts[1:])
    n = int(broken[0]) + 1 if broken.size else starts.size
    return starts[:n], int(leads[n - 1])
