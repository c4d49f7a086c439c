"""A safetensors file: mapped into memory, checked, and handed out as layouts that are views of the map.

    8 bytes   length of the header, little-endian
    header    JSON: name -> {dtype, shape, data_offsets}, and perhaps "__metadata__"
    data      the tensors, one after another, without gaps

`Safetensors.open` believes nothing the header says: what it returns has tensors that lie in the file, whole, apart from
each other, and that fill it. What is wrong is a BadModelFile with the file, the tensor and the numbers. A type of number that no
layout holds is refused when its tensor is asked for, so that one nobody uses does no harm.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from quire.layouts import Bytes, Dense
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.mapped import MappedFile

MAX_HEADER = 100_000_000  # bytes, as in the format's own implementation
MAX_DIMS = 8
MAX_NAME = 512  # characters of a tensor's name
DENSE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: where its bytes are and what they mean."""

    name: str
    type: str  # the format's word: F32, BF16, …
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Safetensors(MappedFile):
    """One open file. Layouts stay valid after `close()`."""

    wanted = "name a .safetensors file"
    tensors: Mapping[str, TensorInfo]  # in file order

    def __init__(self, path: str, file: mmap.mmap):
        super().__init__(path, file)
        self.tensors = MappingProxyType(_parse(path, file, self.size))

    def tensor(self, name: str) -> Dense:
        """A tensor's bytes as a layout: a view of the mapped file, no copy."""
        info, data = self._find(name)
        if info.type not in DENSE:
            raise Unsupported(
                f"{self.path}: tensor {name!r} holds {info.type} numbers, which are not supported here",
                cure=f"supported: {', '.join(DENSE)}; a quantized model can be had as GGUF",
            )
        return Dense.of(data, info.shape, DENSE[info.type])

    def octets(self, name: str) -> Bytes:
        """A tensor of unsigned bytes, in its shape: a view of the mapped file, no copy."""
        info, data = self._find(name)
        if info.type != "U8":
            raise BadModelFile(f"{self.path}: tensor {name!r} holds {info.type} numbers: bytes (U8) are needed")
        return data.reshape(info.shape)

    def bytes_of(self, name: str) -> Bytes:
        """A tensor's bytes, whatever they are: a view of the mapped file, no copy."""
        return self._find(name)[1]

    def _find(self, name: str) -> tuple[TensorInfo, Bytes]:
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            raise BadModelFile(f"{self.path}: there is no tensor {name!r} among its {len(self.tensors)}")
        return info, self._data[info.offset : info.offset + info.nbytes]

    def release(self, name: str) -> None:
        """Give back the file pages of a tensor, once it has been repacked; a later read brings them back from the file."""
        info = self.tensors[name]
        self.release_range(info.offset, info.nbytes)

    def __repr__(self) -> str:
        return f"<Safetensors {self.path}: {len(self.tensors)} tensors, {self.size} bytes>"


def _parse(path: str, file: mmap.mmap, size: int) -> dict[str, TensorInfo]:
    """Every tensor by name, in the order of their bytes."""
    if size < 8:
        raise BadModelFile(f"{path} has {size} bytes: a safetensors file begins with 8 of length")
    length = int.from_bytes(file[:8], "little")
    if length > MAX_HEADER:
        raise BadModelFile(
            f"{path}: its first 8 bytes say a header of {length} bytes: at most {MAX_HEADER} are allowed"
        )
    if 8 + length > size:
        raise BadModelFile(f"{path} is cut short: its header ends at byte {8 + length}, the file at {size}")
    infos = [
        _tensor(path, name, entry, 8 + length)
        for name, entry in _header(path, file[8 : 8 + length]).items()
        if name != "__metadata__"
    ]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    at, before = 8 + length, "the header"
    for info in infos:
        if info.offset < at:
            raise BadModelFile(
                f"{path}: tensor {info.name!r} begins at byte {info.offset}, but {before} goes on to {at}: they overlap"
            )
        end = info.offset + info.nbytes
        if end > size:
            raise BadModelFile(
                f"{path} is cut short: tensor {info.name!r} is bytes {info.offset} to {end}, the file ends at {size}",
                cure="fetch it again",
            )
        if info.offset > at:
            raise BadModelFile(f"{path}: bytes {at} to {info.offset}, before tensor {info.name!r}, belong to no tensor")
        at, before = end, f"tensor {info.name!r}"
    if at != size:
        raise BadModelFile(f"{path}: {before} ends at byte {at}, but the file goes on to {size}")
    return {info.name: info for info in infos}


def _header(path: str, data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise BadModelFile(f"{path}: its header has {twice[:MAX_NAME]!r} twice")
        return made

    if not data.startswith(b"{"):
        raise BadModelFile(f"{path} is not a safetensors file: its header begins with {data[:4]!r}, not with '{{'")
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise BadModelFile(f"{path}: its header is not JSON: {str(e)[:200]}") from None
    metadata = header.get("__metadata__")
    if metadata is not None and not isinstance(metadata, dict):
        raise BadModelFile(f"{path}: __metadata__ of its header is a {type(metadata).__name__}, not an object")
    return header


def _tensor(path: str, name: str, entry: Any, data_start: int) -> TensorInfo:
    def wrong(what: str) -> BadModelFile:
        return BadModelFile(f"{path}: tensor {name[:MAX_NAME]!r} {what}")

    if len(name) > MAX_NAME:
        raise wrong(f"has a name of {len(name)} characters: at most {MAX_NAME} are allowed")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise wrong("is not described by dtype, shape and data_offsets")
    kind, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in BITS:
        raise wrong(f"has the dtype {str(kind)[:40]!r}, which is not known; known: {', '.join(BITS)}")
    if not _counts(shape) or len(shape) > MAX_DIMS:
        raise wrong(f"has the shape {repr(shape)[:80]}: at most {MAX_DIMS} numbers from 0 on are allowed")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise wrong(f"has the data_offsets {repr(span)[:80]}: two numbers, the first not above the second, are needed")
    bits = math.prod(shape) * BITS[kind]
    if bits != 8 * (span[1] - span[0]):
        need = bits // 8 if bits % 8 == 0 else bits / 8
        raise wrong(f"has {span[1] - span[0]} bytes, but {_text(shape)} numbers of {kind} take {need}")
    return TensorInfo(name, kind, tuple(shape), data_start + span[0], span[1] - span[0])


def _counts(value: Any) -> bool:
    """A list of whole numbers, none negative and none absurd."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _text(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "1"
