"""Collecting the answer of any dialect from its chunks: the text, calls put together from their parts, reasoning tokens, usage, times.

Knows chunks and receipts; knows no wire format but OpenAI's `usage` and llama.cpp's `timings`, which are numbers alone.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from quire.chat.types import Call, CallPart, Chunk
from quire.engine.types import Receipt
from quire.server.feed import Feed
from quire.server.served import Served
from quire.server.shared.sampling import Sampling

MAX_CHOICES = 512  # prompts times n


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
        """Whether there are calls, and the arguments of each are JSON: none was cut."""
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


@dataclass(slots=True)
class Partial:
    """One choice as it comes together."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    thoughts: Thoughts = field(default_factory=Thoughts)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    receipt: Receipt | None = None

    def add(self, chunk: Chunk) -> None:
        """Take one chunk in."""
        self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        if chunk.calls:
            self.calls.add(chunk.calls)
        self.thoughts.add(chunk)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        if chunk.finish is not None:
            self.finish, self.stop_reason, self.receipt = chunk.finish, chunk.stop_reason, chunk.receipt

    @property
    def called(self) -> bool:
        """Whether it ended with calls to make: not cut by a length, nor by a stop string inside of one."""
        if self.finish != "stop" or not self.calls:
            return False
        return not isinstance(self.stop_reason, str) or self.calls.whole


@dataclass(slots=True)
class Usage:
    """Counts of one HTTP request: each prompt once, the output of every choice."""

    prompts: list[int]  # tokens of each
    output: int = 0
    cached: int = 0
    details: dict[str, int] | None = None  # of the output; None: the dialect has none

    def finish(self, index: int, receipt: Receipt | None, tokens: int) -> None:
        """A choice ended; `tokens` were delivered of it. What was computed past a stop string depends on timing."""
        self.output += tokens
        if index == 0 and receipt is not None:
            self.cached += receipt.cached_tokens

    def so_far(self, prompt: int, output: int) -> dict[str, int]:
        """The `usage` in a chunk of one choice: of the prompt with this number, and that many tokens of the answer."""
        tokens = self.prompts[prompt]
        return {"prompt_tokens": tokens, "completion_tokens": output, "total_tokens": tokens + output}

    def body(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt = sum(self.prompts)
        body: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.output,
            "total_tokens": prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        return body if self.details is None else body | {"completion_tokens_details": self.details}


def receipt_body(index: int, receipt: Receipt | None) -> dict[str, Any]:
    """A receipt as clients see it: every field, defaults included."""
    fields = {} if receipt is None else {f: getattr(receipt, f) for f in receipt.__struct_fields__}
    return {"index": index, **fields}


@dataclass(slots=True)
class Envelope:
    """The fields that every object of one answer repeats."""

    id: str
    object: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        """One response object."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def envelope(served: Served, request: Sampling, prefix: str, kind: str) -> Envelope:
    """The envelope of an answer; the client's request_id, if any, is in its id."""
    return Envelope(
        f"{prefix}-{request.request_id or secrets.token_hex(12)}", kind, served.name, served.model.fingerprint
    )


async def collect(feed: Feed) -> tuple[dict[tuple[int, int], Partial], dict[int, list[Any]]]:
    """Run a feed to its end: choices by (prompt, index), and prompt logprobs by prompt."""
    choices: dict[tuple[int, int], Partial] = {}
    prompt_logprobs: dict[int, list[Any]] = {}
    async with feed:
        async for items in feed.batches():
            for prompt, chunk in items:
                choices.setdefault((prompt, chunk.index), Partial()).add(chunk)
                if chunk.prompt_logprobs:
                    prompt_logprobs[prompt] = chunk.prompt_logprobs
    return choices, prompt_logprobs
