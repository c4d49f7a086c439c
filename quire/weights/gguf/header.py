"""The header of a GGUF file, parsed as if an enemy had written it.

  magic version | tensor count, key count | keys and values | tensor names, shapes, types, offsets | padding | data

Every count, length, type and offset is checked against the file before it is used; whatever is wrong raises
BadModelFile with the byte where it was found. Work and memory are bounded by the file's size and by the limits below,
so a header that lies cannot make the reader allocate or loop much more than the file is long. Little endian, versions
2 and 3 (they differ in name only). This module does not know what keys mean, beyond `general.alignment`.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from quire import formats
from quire.observe.errors import BadModelFile
from quire.weights.gguf.metadata import Array, Value
from quire.weights.gguf.strings import ESCAPE, Strings, chain

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_HEADER = 1 << 30  # bytes before the tensor data
MAX_KEYS = 1 << 16
MAX_KEY = (1 << 16) - 1  # bytes, the specification's bound
MAX_TENSORS = 1 << 18
MAX_NAME = 256  # bytes of a tensor's name; the specification says 64
MAX_DIMS = 4
MAX_STRINGS = 1 << 23  # in all arrays together
MAX_NESTED = 1 << 14  # arrays inside arrays, in all
MAX_DEPTH = 4

_TRUNCATED = "the file may be cut short: fetch it again"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: ("<B", "<u1"),
    1: ("<b", "<i1"),
    2: ("<H", "<u2"),
    3: ("<h", "<i2"),
    4: ("<I", "<u4"),
    5: ("<i", "<i4"),
    6: ("<f", "<f4"),
    _BOOL: ("<B", "<u1"),
    10: ("<Q", "<u8"),
    11: ("<q", "<i8"),
    12: ("<d", "<f8"),
}
_READERS = {kind: (struct.Struct(fmt), np.dtype(dtype)) for kind, (fmt, dtype) in _SCALARS.items()}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<QQ")
_ENTRIES = {n: struct.Struct(f"<{n}QIQ") for n in range(1, MAX_DIMS + 1)}  # dimensions, type, offset
_MIN_KEY = 8 + 1 + 4 + 1  # the fewest bytes that a key with its value can take ...
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8  # ... and a tensor's entry


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place in the file. `shape` is in numpy's order, [N, K]: the file's own dimensions reversed."""

    name: str
    shape: tuple[int, ...]
    type: str  # "Q4_1"
    offset: int  # from the start of the file
    nbytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """All that is known before the first weight is read."""

    version: int
    alignment: int
    data_start: int
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]


class _Entry(NamedTuple):
    """A tensor as the header names it."""

    at: int  # where this entry is
    name: str
    shape: tuple[int, ...]  # in numpy's order
    kind: int  # GGML's number
    offset: int  # within the data


def parse(data: npt.NDArray[np.uint8], path: str) -> Header:
    """The header of the file whose bytes these are. Touches no byte of the tensor data."""
    return _Reader(data, path).header()


class _Reader:
    """A position in the file, and what may be read from there."""

    def __init__(self, data: npt.NDArray[np.uint8], path: str):
        self.data = data
        self.view = data.data
        self.path = path
        self.size = data.size
        self.end = min(data.size, MAX_HEADER)  # nothing of the header may lie beyond
        self.pos = 0
        self.strings = 0
        self.nested = 0

    def fail(self, at: int, what: str, cure: str = "") -> NoReturn:
        raise BadModelFile(f"{self.path}: byte {at}: {what}", cure=cure)

    def need(self, n: int, what: str) -> int:
        """Step over n bytes and return where they start."""
        at = self.pos
        if n > self.end - at:
            self.overrun(at, n, what)
        self.pos = at + n
        return at

    def overrun(self, at: int, n: int, what: str) -> NoReturn:
        if n > self.size - at:
            self.fail(at, f"{what} takes {n} bytes, but the file ends after {self.size - at}", _TRUNCATED)
        self.fail(at, f"{what} takes {n} bytes, which goes past the first {MAX_HEADER}, the most a header may take")

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.view, self.need(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.view, self.need(8, what))[0]

    def text(self, what: str) -> bytes:
        length = self.u64(f"the length of {what}")
        at = self.need(length, what)
        return self.view[at : at + length].tobytes()

    def name(self, what: str, most: int) -> str:
        """A key or a tensor's name: short, not empty, valid UTF-8."""
        at = self.pos
        length = self.u64(f"the length of {what}")
        if not 0 < length <= most:
            self.fail(at, f"{what} is {length} bytes long: 1 to {most} are allowed")
        raw = self.view[self.need(length, what) : self.pos].tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as e:
            self.fail(at + 8 + e.start, f"{what} ({raw[:40]!r}) is not UTF-8")

    def header(self) -> Header:
        version = self.preamble()
        at = self.need(16, "the tensor count and the key count")
        tensors, keys = _COUNTS.unpack_from(self.view, at)
        left = self.end - self.pos
        if keys > MAX_KEYS or keys * _MIN_KEY > left:
            most = min(MAX_KEYS, left // _MIN_KEY)
            self.fail(
                at + 8, f"the file claims {keys} keys: {left} bytes are left, room for at most {most}", _TRUNCATED
            )
        left -= keys * _MIN_KEY
        if tensors > MAX_TENSORS or tensors * _MIN_TENSOR > left:
            most = min(MAX_TENSORS, left // _MIN_TENSOR)
            self.fail(
                at, f"the file claims {tensors} tensors: {left} bytes are left, room for at most {most}", _TRUNCATED
            )
        values, offsets = self.keys(keys)
        alignment = self.alignment(values, offsets)
        entries = [self.entry(i) for i in range(tensors)]
        start = -(-self.pos // alignment) * alignment
        return Header(version, alignment, start, values, self.place(entries, start, alignment))

    def preamble(self) -> int:
        magic = self.view[:4].tobytes()
        if magic != MAGIC:
            self.fail(0, f"this is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.pos = 4
        version = self.u32("the version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0 and int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                self.fail(4, "the file is big endian, which is not supported", "convert it to little endian")
            self.fail(4, f"GGUF version {version} is not supported: versions 2 and 3 are", "convert the model again")
        return version

    def keys(self, count: int) -> tuple[dict[str, Value], dict[str, int]]:
        values: dict[str, Value] = {}
        offsets: dict[str, int] = {}
        for i in range(count):
            at = self.pos
            key = self.name(f"the name of key {i}", MAX_KEY)
            if key in values:
                self.fail(at, f"key {key[:80]!r} is there twice; the first is at byte {offsets[key]}")
            what = f"key {key[:80]!r}"
            kind = self.u32(f"the type of {what}")
            offsets[key] = at
            values[key] = self.value(kind, what)
        return values, offsets

    def value(self, kind: int, what: str) -> Value:
        if kind == _STRING:
            return self.text(f"the string of {what}").decode("utf-8", ESCAPE)
        if kind == _ARRAY:
            return self.array(what, 1)
        if kind not in _READERS:
            self.fail(self.pos - 4, f"{what} has value type {kind}: 0 to 12 are known")
        reader, _ = _READERS[kind]
        at = self.need(reader.size, f"the value of {what}")
        value = reader.unpack_from(self.view, at)[0]
        if kind == _BOOL:
            if value > 1:
                self.fail(at, f"{what} is a boolean with the value {value}: only 0 and 1 are allowed")
            return bool(value)
        return value

    def array(self, what: str, depth: int) -> Value:
        at = self.pos
        kind = self.u32(f"the element type of {what}")
        count = self.u64(f"the array length of {what}")
        if kind in _READERS:
            return self.numbers(kind, count, at, what)
        least = {_STRING: 8, _ARRAY: 12}.get(kind)
        if least is None:
            self.fail(at, f"{what} is an array of value type {kind}: 0 to 12 are known")
        if count * least > self.end - self.pos:
            self.fail(at + 4, f"{what} claims {count} elements, but {self.end - self.pos} bytes are left", _TRUNCATED)
        if kind == _STRING:
            self.strings += count
            if self.strings > MAX_STRINGS:
                self.fail(
                    at + 4, f"{what} brings the file to {self.strings} strings: at most {MAX_STRINGS} are allowed"
                )
            return self.string_array(count, what)
        self.nested += count
        if depth >= MAX_DEPTH or self.nested > MAX_NESTED:
            self.fail(at, f"{what} nests arrays too deep or too often: {MAX_DEPTH} deep and {MAX_NESTED} are allowed")
        return [self.array(what, depth + 1) for _ in range(count)]

    def numbers(self, kind: int, count: int, at: int, what: str) -> Array:
        dtype = _READERS[kind][1]
        if count * dtype.itemsize > self.end - self.pos:
            self.fail(at + 4, f"{what} claims {count} elements, but {self.end - self.pos} bytes are left", _TRUNCATED)
        start = self.need(count * dtype.itemsize, what)
        array = self.data[start : self.pos].view(dtype).copy()  # small, and aligned from here on
        if kind == _BOOL:
            if count and array.max() > 1:
                bad = int(np.argmax(array > 1))
                self.fail(start + bad, f"{what}: element {bad} is a boolean with the value {array[bad]}")
            array = array.view(np.bool_)
        array.flags.writeable = False
        return array

    def string_array(self, count: int, what: str) -> Strings:
        start = self.pos
        heads, whole = chain(self.data, start, self.end, count)
        at = int(heads[whole])
        if whole < count:
            length = _U64.unpack_from(self.view, at)[0] if self.end - at >= 8 else 0
            self.overrun(at, 8 + length, f"string {whole} of {what}")
        self.pos = at
        return Strings(self.data[start : self.pos], heads - start)

    def alignment(self, values: dict[str, Value], offsets: dict[str, int]) -> int:
        key = "general.alignment"
        value = values.get(key, DEFAULT_ALIGNMENT)
        at = offsets.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(at, f"key {key!r} is not an integer")
        if not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.fail(at, f"key {key!r} is {value}: it must be a power of two from 8 to {MAX_ALIGNMENT}")
        return value

    def entry(self, i: int) -> _Entry:
        at = self.pos
        name = self.name(f"the name of tensor {i}", MAX_NAME)
        what = f"tensor {name!r}"
        ndims = self.u32(f"the dimension count of {what}")
        if not 1 <= ndims <= MAX_DIMS:
            self.fail(self.pos - 4, f"{what} has {ndims} dimensions: 1 to {MAX_DIMS} are allowed")
        dims_at = self.need(8 * ndims + 12, f"the entry of {what}")
        *dims, kind, offset = _ENTRIES[ndims].unpack_from(self.view, dims_at)
        if 0 in dims:
            self.fail(dims_at + 8 * dims.index(0), f"{what} has shape {dims[::-1]}: a dimension is zero")
        return _Entry(at, name, tuple(reversed(dims)), kind, offset)

    def place(self, entries: list[_Entry], start: int, alignment: int) -> dict[str, TensorInfo]:
        """Check that each tensor lies in the file, whole, aligned and alone."""
        known = {kind: formats.by_ggml_type(kind) for kind in {entry.kind for entry in entries}}
        tensors: dict[str, TensorInfo] = {}
        offsets: dict[str, int] = {}
        for at, name, shape, kind, offset in entries:
            what = f"tensor {name!r}"
            if name in tensors:
                self.fail(at, f"{what} is there twice; the first is at byte {offsets[name]}")
            form = known[kind]
            if form is None:
                self.refuse_types([entry for entry in entries if known[entry.kind] is None])
            if shape[-1] % form.BLOCK:
                self.fail(at, f"{what} has rows of {shape[-1]}: {form.NAME} needs a multiple of {form.BLOCK}")
            nbytes = prod(shape) // form.BLOCK * form.NBYTES
            if offset % alignment:
                self.fail(at, f"{what} has offset {offset}: it must be a multiple of the alignment, {alignment}")
            if start + offset + nbytes > self.size:
                self.fail(
                    at,
                    f"{what} ({form.NAME}, shape {list(shape)}) takes {nbytes} bytes from byte {start + offset} on, "
                    f"but the file ends at byte {self.size}",
                    _TRUNCATED,
                )
            offsets[name] = at
            tensors[name] = TensorInfo(name, shape, form.NAME, start + offset, nbytes)
        for before, after in pairwise(sorted(tensors.values(), key=lambda t: t.offset)):
            if before.offset + before.nbytes > after.offset:
                self.fail(
                    offsets[after.name],
                    f"tensor {after.name!r} (bytes {after.offset} to {after.offset + after.nbytes}) overlaps "
                    f"tensor {before.name!r} (bytes {before.offset} to {before.offset + before.nbytes})",
                )
        return tensors

    def refuse_types(self, entries: list[_Entry]) -> NoReturn:
        """Say which types cannot be read, all at once."""
        first, *rest = entries
        others = Counter(formats.ggml_name(entry.kind) for entry in rest)
        more = "".join(f"; {n} more of type {other}" for other, n in others.most_common(3))
        self.fail(
            first.at,
            f"tensor {first.name!r} has type {formats.ggml_name(first.kind)}, which is not supported{more}",
            f"supported types: {', '.join(sorted(formats.names()))}",
        )
