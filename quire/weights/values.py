"""A JSON object from a file beside the weights, such as config.json: read whole under a bound, asked by key, every answer checked.

Getters either return what the caller can use or raise BadModelFile naming the file and the key. A key that is null is
not there: configurations write both. Knows no model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from quire.observe.errors import BadModelFile

MAX_JSON = 16 << 20  # bytes; a tokenizer_config.json with every added token has a few hundred thousand
T = TypeVar("T")


class _Required:
    """Marks a getter called without a default."""


_REQUIRED = _Required()


class Values:
    """One JSON object. A getter without a default insists on the key."""

    __slots__ = ("raw", "where")

    def __init__(self, where: str, raw: dict[str, Any]):
        self.where = where  # the file, and the key inside it for an object in an object
        self.raw = raw

    @classmethod
    def read(cls, path: Path, most: int = MAX_JSON) -> Values:
        """The object in a file. Raises FileNotFoundError where there is none."""
        text = read_text(path, most)
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise BadModelFile(f"{path} is not JSON: {str(e)[:200]}") from None
        if not isinstance(raw, dict):
            raise BadModelFile(f"{path} holds {_kind(raw)}: an object is needed")
        return cls(str(path), raw)

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def get(self, key: str) -> Any:
        """Whatever is there, or None."""
        return self.raw.get(key)

    def count(self, key: str, default: T | _Required = _REQUIRED, most: int = 1 << 24) -> int | T:
        """A whole number from 1 to `most`."""
        value = self.raw.get(key)
        if value is None:
            return self._absent(key, default)
        if type(value) is not int or not 0 < value <= most:
            raise BadModelFile(f"{self.where}: {key} is {_kind(value)}: it must be a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: T | _Required = _REQUIRED) -> float | T:
        """A positive, finite number."""
        value = self.raw.get(key)
        if value is None:
            return self._absent(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30 or not math.isfinite(value):
            raise BadModelFile(f"{self.where}: {key} is {_kind(value)}: it must be a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise BadModelFile(f"{self.where}: {key} is {_kind(value)}: it must be true or false")
        return value

    def text(self, key: str, default: T | _Required = _REQUIRED) -> str | T:
        value = self.raw.get(key)
        if value is None:
            return self._absent(key, default)
        if not isinstance(value, str):
            raise BadModelFile(f"{self.where}: {key} is {_kind(value)}: it must be a string")
        return value

    def inside(self, key: str) -> Values | None:
        """The object at `key`, or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise BadModelFile(f"{self.where}: {key} is {_kind(value)}: it must be an object")
        return Values(f"{self.where}, {key}", value)

    def ids(self, key: str) -> list[int]:
        """Token ids: one number, a list of them, or nothing."""
        value = self.raw.get(key)
        if value is None:
            return []
        listed = value if isinstance(value, list) else [value]
        if len(listed) > 1024 or not all(type(i) is int and 0 <= i < 1 << 31 for i in listed):
            raise BadModelFile(f"{self.where}: {key} is {_kind(value)}: it must be a token id or a list of them")
        return listed

    def _absent(self, key: str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            raise BadModelFile(f"{self.where}: {key} is missing")
        return default


def read_text(path: Path, most: int) -> str:
    """A text file whole. Raises FileNotFoundError, or BadModelFile where it is too large or not text."""
    try:
        with path.open("rb") as f:
            data = f.read(most + 1)
    except FileNotFoundError:
        raise
    except OSError as e:
        raise BadModelFile(f"{path} cannot be read: {e.strerror or e}") from None
    if len(data) > most:
        raise BadModelFile(f"{path} has more than {most} bytes: that is not what it should hold")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadModelFile(f"{path} is not text: byte {e.start} is not UTF-8") from None


def _kind(value: Any) -> str:
    """A value in words, cut short."""
    if isinstance(value, dict):
        return "an object"
    return f"the string {value[:60]!r}" if isinstance(value, str) else str(value)[:60]
