"""The metadata of a GGUF file: keys with typed values.

A read-only mapping with getters that either return what the caller can use or raise BadModelFile naming the key.
Integers, floats and booleans are Python's; text is `str` (bytes that are not UTF-8 are escaped, see `gguf_strings`);
arrays of numbers are read-only numpy arrays, arrays of strings `Strings`, arrays of arrays lists. Knows no file format:
the header reader has checked every length before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from quire.observe.errors import BadModelFile
from quire.weights.gguf.strings import Strings

Array: TypeAlias = npt.NDArray[np.generic]
Value: TypeAlias = "int | float | bool | str | Array | Strings | list[Value]"
T = TypeVar("T")


class _Required:
    """Marks a getter called without a default."""


_REQUIRED = _Required()


class Metadata(Mapping[str, Value]):
    """Keys and values in file order. A getter without a default insists on the key."""

    __slots__ = ("_path", "_values")

    def __init__(self, path: str, values: dict[str, Value]):
        self._path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def get_int(
        self, key: str, default: T | _Required = _REQUIRED, *, low: int | None = None, high: int | None = None
    ) -> int | T:
        """An integer of any width, within [low, high] where they are given."""
        value = self._values.get(key)
        if value is None:
            return self._absent(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            raise BadModelFile(f"{self._path}: key {key!r} is {value}: it must be {bounds}")
        return value

    def get_float(self, key: str, default: T | _Required = _REQUIRED) -> float | T:
        """A finite number; an integer will do."""
        value = self._values.get(key)
        if value is None:
            return self._absent(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not math.isfinite(value):
            raise BadModelFile(f"{self._path}: key {key!r} is {value}: it must be finite")
        return float(value)

    def get_bool(self, key: str, default: T | _Required = _REQUIRED) -> bool | T:
        value = self._values.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def get_str(self, key: str, default: T | _Required = _REQUIRED) -> str | T:
        """Text, with bytes that are not UTF-8 escaped (see `gguf_strings`)."""
        value = self._values.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def get_strings(self, key: str, default: T | _Required = _REQUIRED) -> Strings | T:
        """An array of strings."""
        value = self._values.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, Strings):
            raise self._wrong(key, value, "an array of strings")
        return value

    def get_array(self, key: str, default: T | _Required = _REQUIRED, *, kinds: str = "iufb") -> Array | T:
        """An array of numbers, read-only. `kinds` are numpy's letters for what is accepted: i, u, f, b."""
        value = self._values.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            words = {"i": "integers", "u": "unsigned integers", "f": "floats", "b": "booleans"}
            raise self._wrong(key, value, "an array of " + " or ".join(words[k] for k in kinds))
        return value

    def _absent(self, key: str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            raise BadModelFile(f"{self._path}: key {key!r} is missing")
        return default

    def _wrong(self, key: str, value: Value, wanted: str) -> BadModelFile:
        return BadModelFile(f"{self._path}: key {key!r} is {_kind(value)}: it must be {wanted}")


def _kind(value: Value) -> str:
    """A value's type in words, with the value where that is short."""
    if isinstance(value, bool):
        return f"the boolean {value}"
    if isinstance(value, int):
        return f"the integer {value}"
    if isinstance(value, float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    if isinstance(value, Strings):
        return f"an array of {len(value)} strings"
    if isinstance(value, np.ndarray):
        return f"an array of {value.size} {value.dtype.name}"
    return f"an array of {len(value)} arrays"
