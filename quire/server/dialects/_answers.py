"""What dialects tell of an answer beyond its text: calls put together from their parts, reasoning counted, times.

Knows chunks and receipts; knows no wire format but llama.cpp's `timings`, which is numbers alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.chat.types import Call, CallPart, Chunk
from quire.engine.types import Receipt


@dataclass(slots=True)
class Calls:
    """The calls of one choice as their parts come."""

    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[list[str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids)

    def add(self, parts: Iterable[CallPart]) -> None:
        """Take parts in; the first of a call has its id and name."""
        for part in parts:
            if part.index == len(self.ids):
                self.ids.append(part.id or f"call_{part.index}")
                self.names.append(part.name or "")
                self.arguments.append([])
            self.arguments[part.index].append(part.arguments)

    def all(self) -> list[Call]:
        """The calls so far."""
        joined = map("".join, self.arguments)
        return [Call(*one) for one in zip(self.ids, self.names, joined, strict=True)]

    @property
    def whole(self) -> bool:
        """There are calls, and the arguments of each are JSON: none was cut."""
        return bool(self.ids) and all(arguments_of(call) is not None for call in self.all())


def arguments_of(call: Call) -> dict[str, Any] | None:
    """A call's arguments as an object; None where they are not whole."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def merged(parts: list[CallPart]) -> list[CallPart]:
    """At most one part for each call: clients put a list of parts together by its indices, one for each."""
    made: dict[int, CallPart] = {}
    for part in parts:
        before = made.get(part.index)
        if before is not None:
            part = CallPart(part.index, before.id, before.name, before.arguments + part.arguments)
        made[part.index] = part
    return list(made.values())


@dataclass(slots=True)
class Thoughts:
    """How many tokens of a choice went into its reasoning, markers included.

    Tokens whose text is held back belong to what comes out next, but those at the end of the reasoning are its own.
    """

    tokens: int = 0
    _held: int = 0
    _inside: bool = False

    def add(self, chunk: Chunk) -> None:
        """Count one chunk."""
        count = len(chunk.tokens)
        if chunk.text or chunk.calls:
            self.tokens += self._held if self._inside else 0
            self._held, self._inside = 0, False
        elif chunk.reasoning:
            self.tokens += self._held + count
            self._held, self._inside = 0, True
        else:
            self._held += count
        if chunk.finish is not None and self._inside:
            self.tokens, self._held = self.tokens + self._held, 0


def timings(receipt: Receipt | None) -> dict[str, Any]:
    """llama.cpp's `timings` of a finished answer: what was computed and how long that took, cached tokens apart."""
    if receipt is None:
        return {}
    computed = receipt.prompt_tokens - receipt.cached_tokens
    return {
        "cache_n": receipt.cached_tokens,
        **_speed("prompt", computed, receipt.prefill_seconds),
        **_speed("predicted", receipt.output_tokens, receipt.decode_seconds),
    }


def _speed(name: str, count: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / count if count else None,
        f"{name}_per_second": count / seconds if seconds > 0 else None,
    }


@dataclass(slots=True)
class Pace:
    """The `timings` of an answer under way: tokens since the first one, by this process's clock."""

    count: int = 0
    began: float = 0.0

    def add(self, chunk: Chunk) -> dict[str, Any]:
        """Count one chunk and tell."""
        if chunk.tokens and not self.count:
            self.began = time.monotonic()
        self.count += len(chunk.tokens)
        return _speed("predicted", self.count, time.monotonic() - self.began if self.count else 0.0)
