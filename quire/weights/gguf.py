"""A GGUF model file: mapped into memory, checked, and handed out as layouts that are views of the map.

`GGUF.open` believes nothing the file says (`gguf_header`): what it returns has tensors that lie in the file, whole and
apart from each other, in formats that can be read. Whatever is wrong raises BadModelFile with the byte and the name.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from quire import formats
from quire.layouts import Bytes, Layout
from quire.observe.errors import BadModelFile
from quire.weights.gguf_header import TensorInfo, parse
from quire.weights.gguf_metadata import Metadata
from quire.weights.gguf_strings import Strings
from quire.weights.mapped import MappedFile

__all__ = ["GGUF", "Metadata", "Strings", "TensorInfo", "describe", "expanded"]

MAX_ARCHITECTURE = 128  # characters; the name is a part of other keys
MAX_TEXT = 400  # characters of a text that describe() passes on


class GGUF(MappedFile):
    """One open model file. Layouts stay valid after `close()`."""

    wanted = "name a .gguf file"
    version: int
    alignment: int
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]  # in file order

    def __init__(self, path: str, file: mmap.mmap):
        super().__init__(path, file)
        assert self._data is not None  # it has just been mapped
        header = parse(self._data, path)
        self.version = header.version
        self.alignment = header.alignment
        self.data_start = header.data_start
        self.metadata = Metadata(path, header.values)
        self.tensors = MappingProxyType(header.tensors)
        self._refuse_splits()

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
        if self._data is None:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors.get(name)
        if info is None:
            raise BadModelFile(f"{self.path}: there is no tensor {name!r} among its {len(self.tensors)}")
        return formats.load(info.type).read(self._data[info.offset : info.offset + info.nbytes], info.shape)

    def octets(self, name: str) -> Bytes:
        """No format of this file has tensors of bytes that mean nothing by themselves."""
        raise BadModelFile(f"{self.path}: tensor {name!r} is {self.tensors[name].type}: bytes are needed")

    def release(self, name: str) -> None:
        """Let go of a tensor's pages, once it has been repacked; a later read brings them back from the file."""
        info = self.tensors[name]
        self.release_range(info.offset, info.nbytes)

    def file_of(self, name: str) -> str:
        """The file that holds a tensor: this one."""
        return self.path

    def __repr__(self) -> str:
        return f"<GGUF {self.path}: {len(self.metadata)} keys, {len(self.tensors)} tensors, {self.size} bytes>"

    def _refuse_splits(self) -> None:
        parts = self.metadata.get_int("split.count", 1)
        if parts > 1:
            number = self.metadata.get_int("split.no", 0) + 1
            raise BadModelFile(
                f"{self.path} is part {number} of {parts} (key 'split.count'): split models are not supported",
                cure="merge the parts into one file",
            )


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
    """What `quire show` tells about a file. What the file does not say is None.

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
