"""Quantized matrices that a folder stores as several tensors each (codes, scales, zeros): found by name, checked, and shown as one tensor `….weight`.

What the tensors mean is in `formats/hub`; here they get their file and their name, for messages. What config.json calls a method
that is not read is refused by its name, before weights are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.formats import hub
from quire.layouts import Bytes, Dense, Floats, Layout
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.safetensors import Safetensors, TensorInfo
from quire.weights.values import Values

KEYS = {"quantization_config": "", "compression_config": "compressed-tensors"}  # the method where they name none
OWN = ("mxfp4",)  # methods that a family reads itself
_WHOLE = {"I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1"}


def settings_of(config: Values) -> tuple[str, Values] | None:
    """How the weights are quantized, as the configuration says: the method and its settings."""
    for key, default in KEYS.items():
        values = config.inside(key)
        if values is not None:
            return values.text("quant_method", default).lower(), values
    return None


def scheme_of(config: Values) -> hub.Scheme | None:
    """How matrices are packed; None where they are plain. Raises Unsupported for a method that is not read."""
    found = settings_of(config)
    if found is None:
        return None
    method, values = found
    scheme = hub.scheme_of(method, values)
    if scheme is None:
        key = values.where.rpartition(", ")[2]
        raise Unsupported(
            f"{config.where}: the weights are quantized ({key}: {method[:40] or 'an unnamed method'}), "
            "which is not read from safetensors",
            cure="use the model's plain version (bfloat16, float16 or float32), or a GGUF of it; "
            f"read are: {', '.join(hub.methods())}",
        )
    return scheme


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, as a format looks at it."""

    info: TensorInfo
    file: Safetensors

    @property
    def type(self) -> str:
        return self.info.type

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape

    def floats(self, *at: slice) -> Floats:
        whole = self.file.tensor(self.info.name)
        return Dense(whole.data[at], whole.dtype).dequantize()

    def integers(self) -> Any:
        return self.file.bytes_of(self.info.name).view(_WHOLE[self.type]).reshape(self.shape)

    def octets(self) -> Bytes:
        return self.file.bytes_of(self.info.name).reshape(*self.shape[:-1], -1)


@dataclass(frozen=True, slots=True)
class PackedInfo:
    """The name, type and shape of a packed matrix, known without reading it."""

    name: str
    type: str
    shape: tuple[int, int]
    nbytes: int
    stored: Mapping[str, StoredTensor]  # by the last part of their names

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Packed:
    """The packed matrices of one folder, by the names that plain ones would have."""

    def __init__(
        self, scheme: hub.Scheme, raw: Mapping[str, TensorInfo], file: Callable[[str], Safetensors], where: str
    ):
        self._scheme = scheme
        self.matrices: dict[str, PackedInfo] = {}
        self.rest: dict[str, TensorInfo] = dict(raw)  # plain tensors
        for name in raw:
            base, _, last = name.rpartition(".")
            stored = StoredTensor(raw[name], file(name))
            if last == scheme.parts[0] and base and scheme.marks(stored):
                self._add(base, {
                    part: StoredTensor(raw[full], file(full)) for part in scheme.parts if (full := f"{base}.{part}") in raw
                })  # fmt: skip
        self.idle = [name for name in self.rest if name.endswith(scheme.idle)] if scheme.idle else []
        for name in self.idle:
            del self.rest[name]
        if not self.matrices:
            raise BadModelFile(
                f"{where}: the configuration says that weights are quantized as {scheme.label}, "
                f"but none of {len(raw)} tensors is a {scheme.parts[0]} of that kind"
            )

    @property
    def tensors(self) -> dict[str, TensorInfo | PackedInfo]:
        return {**self.rest, **self.matrices}

    def read(self, name: str) -> Layout:
        """A packed matrix as a layout."""
        stored = self.matrices[name].stored
        return self._checked(name.removesuffix(".weight"), stored, lambda: self._scheme.read(stored))

    def notes(self, native: bool) -> list[str]:
        """Sentences for people: how matrices are stored in the files and by a backend, and what was left alone."""
        told = [f"weights in the files: {self._scheme.label}, {len(self.matrices)} matrices", *self._scheme.notes]
        if native and self._scheme.float8:
            inside = sum(i.nbytes for i in self.matrices.values()) / 2**20
            here = sum(2 * i.elements for i in self.matrices.values()) / 2**20
            told.append(
                f"FP8 weights are held as bfloat16, which rounds them: {inside:.0f} MiB in the files, {here:.0f} in memory"
            )
        if self.idle:
            told.append(
                f"{len(self.idle)} scales of activations, keys or values in the files are not used: {self.idle[0]}, …"
            )
        return told

    def _add(self, base: str, stored: dict[str, StoredTensor]) -> None:
        name = f"{base}.weight"
        if name in self.rest and "weight" not in stored:
            here = stored[self._scheme.parts[0]]
            raise BadModelFile(
                f"{here.file.path}: tensor {here.info.name!r} is there, and {name!r} too: which is meant?"
            )
        shape = self._checked(base, stored, lambda: self._scheme.shape(stored))
        nbytes = sum(s.info.nbytes for s in stored.values())
        self.matrices[name] = PackedInfo(name, self._scheme.label, shape, nbytes, stored)
        for s in stored.values():
            del self.rest[s.info.name]

    def _checked(self, base: str, stored: Mapping[str, StoredTensor], work: Callable[[], Any]) -> Any:
        try:
            return work()
        except hub.Wrong as e:
            at = stored.get(e.part) or next(iter(stored.values()))
            what = f"{at.file.path}: tensor '{base}.{e.part}' {e}"
            if e.supported:
                raise BadModelFile(what) from None
            raise Unsupported(what, cure="use the model's plain version, or a GGUF of it") from None
