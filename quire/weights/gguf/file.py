"""A GGUF model file: mapped into memory, checked, and handed out as layouts that are views of the map.

`GGUF.open` believes nothing the file says (`gguf_header`): what it returns has tensors that lie in the file, whole and
apart from each other, in formats that can be read. Whatever is wrong raises BadModelFile with the byte and the name.
A split model is opened by its first file, which knows the keys; the others lie beside it and hold tensors alone.
"""

from __future__ import annotations

import mmap
import os
import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from quire import formats
from quire.layouts import Bytes, Layout
from quire.observe.errors import BadModelFile, NotFound
from quire.weights.gguf.header import TensorInfo, parse
from quire.weights.gguf.metadata import Metadata
from quire.weights.gguf.strings import Strings
from quire.weights.mapped import MappedFile

__all__ = ["GGUF", "Metadata", "Strings", "TensorInfo", "describe", "expanded"]

MAX_ARCHITECTURE = 128  # characters; the name is a part of other keys
MAX_TEXT = 400  # characters of a text that describe() passes on
MAX_SPLITS = 1024
SPLIT = re.compile(r"(.*)-00001-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)


class _File(MappedFile):
    """A mapped file: its keys, and its own tensors."""

    wanted = "name a .gguf file"

    def __init__(self, path: str, file: mmap.mmap):
        super().__init__(path, file)
        assert self._data is not None  # it has just been mapped
        header = parse(self._data, path)
        self.version = header.version
        self.alignment = header.alignment
        self.data_start = header.data_start
        self.metadata = Metadata(path, header.values)
        self.own: Mapping[str, TensorInfo] = MappingProxyType(header.tensors)

    def bytes_of(self, info: TensorInfo) -> Bytes:
        """A tensor's bytes: a view of the mapped file."""
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        return self._data[info.offset : info.offset + info.nbytes]

    def release_tensor(self, info: TensorInfo) -> None:
        self.release_range(info.offset, info.nbytes)


class GGUF(_File):
    """One open model. Layouts stay valid after `close()`."""

    tensors: Mapping[str, TensorInfo]  # in file order; an offset is in the file that holds the tensor

    def __init__(self, path: str, file: mmap.mmap):
        super().__init__(path, file)
        self._others = self._open_others()
        self._where: dict[str, _File] = {}  # tensors of the others
        self.tensors = self._merged() if self._others else self.own
        self.size += sum(other.size for other in self._others)

    @property
    def architecture(self) -> str:
        """`general.architecture`, for instance "llama"."""
        name = self.metadata.get_str("general.architecture")
        if not 0 < len(name) <= MAX_ARCHITECTURE:
            raise BadModelFile(
                f"{self.path}: key 'general.architecture' is {len(name)} characters long: 1 to {MAX_ARCHITECTURE} are allowed"
            )
        return name

    def tensor(self, name: str) -> Layout:
        """A tensor's bytes as a layout: a view of the mapped file, no copy."""
        info = self.tensors.get(name)
        if info is None:
            raise BadModelFile(f"{self.path}: there is no tensor {name!r} among its {len(self.tensors)}")
        return formats.load(info.type).read(self._where.get(name, self).bytes_of(info), info.shape)

    def octets(self, name: str) -> Bytes:
        """Refuse: no format of GGUF has tensors of bytes that mean nothing by themselves."""
        raise BadModelFile(f"{self.path}: tensor {name!r} is {self.tensors[name].type}: bytes are needed")

    def release(self, name: str) -> None:
        """Give back the file pages of a tensor, once it has been repacked; a later read brings them back from the file."""
        self._where.get(name, self).release_tensor(self.tensors[name])

    def file_of(self, name: str) -> str:
        """The file that holds a tensor."""
        return self._where.get(name, self).path

    def close(self) -> None:
        super().close()
        for other in self._others:
            other.close()

    def __repr__(self) -> str:
        return f"<GGUF {self.path}: {len(self.metadata)} keys, {len(self.tensors)} tensors, {self.size} bytes>"

    def _open_others(self) -> list[_File]:
        """The files after the first, each checked to be the one that it should be."""
        count = self.metadata.get_int("split.count", 1, low=0, high=MAX_SPLITS)
        if count <= 1:
            return []
        number = self.metadata.get_int("split.no", 0)
        said = f"{self.path} is part {number + 1} of {count} (key 'split.count')"
        named = SPLIT.fullmatch(os.path.basename(self.path))
        if number != 0 or named is None or int(named[2]) != count:
            raise BadModelFile(
                f"{said}: a split model is opened by its first file",
                cure=f"name the one that ends in -00001-of-{count:05}.gguf",
            )
        others: list[_File] = []
        for i in range(1, count):
            name = f"{named[1]}-{i + 1:05}-of-{count:05}.gguf"
            try:
                other = _File.open(os.path.join(os.path.dirname(self.path), name))
            except NotFound:
                raise BadModelFile(
                    f"{said}, and {name} is not beside it", cure="fetch it; all of them lie in one folder"
                ) from None
            found = other.metadata.get_int("split.no", -1), other.metadata.get_int("split.count", 1)
            if found != (i, count):
                raise BadModelFile(
                    f"{other.path} says that it is part {found[0] + 1} of {found[1]}, not {i + 1} of {count}"
                )
            others.append(other)
        return others

    def _merged(self) -> Mapping[str, TensorInfo]:
        """The tensors of all files. Raises where two hold one, or some are not there."""
        found = dict(self.own)
        for other in self._others:
            twice = next((name for name in other.own if name in found), None)
            if twice is not None:
                raise BadModelFile(f"{other.path}: tensor {twice!r} is in {self.file_of(twice)} too")
            found |= other.own
            self._where |= dict.fromkeys(other.own, other)
        wanted = self.metadata.get_int("split.tensors.count", len(found))
        if wanted != len(found):
            raise BadModelFile(
                f"{self.path}: key 'split.tensors.count' is {wanted}, but its {len(self._others) + 1} files hold {len(found)} tensors"
            )
        return MappingProxyType(found)


def expanded(gguf: GGUF) -> list[str]:
    """The types that are kept as plain codes because kernels know no codebooks, and what that costs: a line for each."""
    in_file: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    bits: dict[str, int] = {}
    for info in gguf.tensors.values():
        codec = getattr(formats.load(info.type), "CODEC", None)
        if codec is not None and codec.nbytes != formats.load(info.type).NBYTES:
            in_file[info.type] += info.nbytes
            factors = codec.groups + 4 if codec.scale.wide else 2 * codec.groups
            kept[info.type] += info.elements // codec.block * (codec.block * codec.bits // 8 + factors)
            bits[info.type] = codec.bits
    return [
        f"{kind} weights are kept as {bits[kind]}-bit codes: {in_file[kind] / 2**20:.0f} MiB in the file, "
        f"{kept[kind] / 2**20:.0f} MiB in memory"
        for kind in in_file
    ]


def describe(gguf: GGUF) -> dict[str, object]:
    """The facts that `quire show` tells about a file. What the file does not say is None.

    Text is safe to print: control characters and bytes that are not text are replaced, and a long one is cut.
    """
    meta = gguf.metadata
    arch = gguf.architecture if "general.architecture" in meta else None

    def text(key: str) -> str | None:
        value = meta.get_str(key, None)
        return None if value is None else "".join(c if c.isprintable() else "\ufffd" for c in value[:MAX_TEXT])

    def number(key: str) -> int | list[int] | None:
        value = meta.get(f"{arch}.{key}")
        if isinstance(value, np.ndarray):  # one per layer
            return sorted({int(v) for v in meta.get_array(f"{arch}.{key}", kinds="iu")})
        return meta.get_int(f"{arch}.{key}", None)

    by_type: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for info in gguf.tensors.values():
        by_type[info.type] += info.nbytes
        elements[info.type] += info.elements
    tokens = meta.get_strings("tokenizer.ggml.tokens", None)
    weights = sum(by_type.values())
    parameters = sum(elements.values())
    return {
        "name": text("general.name"),
        "architecture": text("general.architecture"),
        "parameters": parameters,
        "size": gguf.size,
        "weights": weights,
        "bits_per_weight": round(8 * weights / parameters, 2) if parameters else None,
        "types": dict(by_type.most_common()),  # bytes by type, largest first
        "tensors": len(gguf.tensors),
        "context_length": number("context_length"),
        "layers": number("block_count"),
        "embedding_length": number("embedding_length"),
        "feed_forward_length": number("feed_forward_length"),
        "heads": number("attention.head_count"),
        "kv_heads": number("attention.head_count_kv"),
        "experts": number("expert_count"),
        "vocabulary": None if tokens is None else len(tokens),
        "tokenizer": text("tokenizer.ggml.model"),
        "pre_tokenizer": text("tokenizer.ggml.pre"),
        "chat_template": "tokenizer.chat_template" in meta,
        "license": text("general.license"),
        "gguf_version": gguf.version,
        "alignment": gguf.alignment,
    }
