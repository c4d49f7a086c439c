"""Quantized weights as Hugging Face folders keep them: a matrix is made of several tensors, and config.json says how.

The registry is this directory's listing: each module has METHODS, the names of `quant_method` that it answers to, and
`scheme(settings)`, which checks what the configuration says. A `Scheme` tells from the stored tensors what matrix they are, and
reads it as a layout. What is wrong with a stored tensor is a `Wrong`; who knows its file puts that into words. Knows no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from quire.layouts import Bytes, Floats, Layout


class Settings(Protocol):
    """The quantization_config of a config.json, every answer checked."""

    where: str

    @property
    def raw(self) -> dict[str, Any]: ...
    def get(self, key: str) -> Any: ...
    def count(self, key: str, default: Any = ..., most: int = ...) -> Any: ...
    def text(self, key: str, default: Any = ...) -> Any: ...
    def flag(self, key: str, default: bool) -> bool: ...
    def inside(self, key: str) -> Settings | None: ...


class Stored(Protocol):
    """A tensor in a file, which reads as a view."""

    @property
    def type(self) -> str: ...  # safetensors' word: I32, F16, …
    @property
    def shape(self) -> tuple[int, ...]: ...
    def floats(self, *at: slice) -> Floats:
        """The tensor's numbers, or those in that part of it, of a floating type, as float32."""
        ...

    def integers(self) -> Any:
        """The tensor's numbers, of a whole type."""
        ...

    def octets(self) -> Bytes:
        """The tensor's bytes, in its shape with the last axis as many times longer as a number has bytes."""
        ...


Parts = Mapping[str, Stored]  # by the last part of their names


class Wrong(Exception):
    """A fault in the part of a packed matrix that has that name."""

    def __init__(self, part: str, what: str, supported: bool = True):
        super().__init__(what)
        self.part = part
        self.supported = supported  # False: the file may be right, but is not read here


class Scheme(Protocol):
    """The way in which one folder stores its packed matrices."""

    label: str  # for people
    notes: tuple[str, ...]  # what is to be told about reading it
    float8: bool  # its matrices are Float8
    parts: tuple[str, ...]  # the names of the tensors that may belong to a matrix; the first one is its mark
    idle: tuple[str, ...]  # the ends of names of tensors that serve other engines, and nothing here

    def marks(self, stored: Stored) -> bool:
        """Whether a tensor with the first part's name is one of a packed matrix."""
        ...

    def shape(self, parts: Parts) -> tuple[int, int]:
        """Rows and columns of the matrix. Checks types and shapes; reads no large tensor."""
        ...

    def read(self, parts: Parts) -> Layout:
        """The matrix. Its bytes are put together where they are read."""
        ...


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every module of this directory."""
    names = sorted(m.name for m in iter_modules(__path__) if not m.name.startswith("_"))
    return tuple(import_module(f"{__name__}.{name}") for name in names)


def methods() -> list[str]:
    """The names of every quant_method that is read."""
    return sorted(method for module in modules() for method in module.METHODS)


def scheme_of(method: str, settings: Settings) -> Scheme | None:
    """The scheme of a method, or None where it is not known here. Raises where its settings are not read."""
    found = [module for module in modules() if method in module.METHODS]
    return found[0].scheme(settings) if found else None


def need(parts: Parts, name: str, kinds: tuple[str, ...], shape: tuple[int, ...] | None, why: str = "") -> Stored:
    """A part of such a type and shape."""
    stored = parts.get(name)
    if stored is None:
        raise Wrong(name, f"is missing{why}")
    if stored.type not in kinds:
        raise Wrong(name, f"holds {stored.type} numbers: {' or '.join(kinds)} are needed")
    if shape is not None and stored.shape != shape:
        raise Wrong(name, f"has shape {text(stored.shape)}, but {text(shape)} is needed{why}")
    return stored


def text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"
