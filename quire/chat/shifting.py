"""Answers that go on past the context, where a request asks for it: tokens after the first few are left out, and the rest is computed anew.

An engine's sequence ends with the context. What goes on is a new one, whose prompt is what was kept of prompt and answer together, so every
token is computed from exactly the tokens that are still there, at the places that they have now. (To move the cache along instead is
cheaper, and leaves in it what was computed from tokens that are gone.) Draws go on with a seed that follows from the request's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from quire.engine.transport.client import EngineClient
from quire.engine.types import Event, Receipt, Request
from quire.observe.errors import BadRequest

FULL_CONTEXTS = 10  # that an answer without a bound may fill, as with Ollama
_STEP = 0x9E3779B97F4A7C15  # between the seeds of parts
_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Shift:
    """How an answer goes on past the context."""

    context: int  # tokens that prompt and answer may have together
    keep: int = 0  # tokens at the beginning of the prompt that stay
    discard: int | None = None  # tokens after these that are left out each time; None: half of the others
    names: tuple[str, str] = ("keep", "discard")  # what the client calls these two

    def check(self, prompt: int) -> None:
        """Raise BadRequest where hardly anything could be left out: each time, what is kept is computed anew."""
        keep, discard = self.names
        most, least = self.context * 3 // 4, max(1, self.context // 16)
        if not 0 <= self.keep <= most:
            raise BadRequest(
                f"{keep}: {self.keep} tokens are to stay when the context is full: of {self.context}, at most {most} can",
                param=keep,
            )
        if self.discard is not None and not least <= self.discard < self.context - self.keep:
            raise BadRequest(
                f"{discard} is {self.discard}: of a context of {self.context} of which {self.keep} stay, {least} to "
                f"{self.context - self.keep - 1} can be left out",
                param=discard,
            )
        if prompt >= self.context:
            raise BadRequest(f"the prompt has {prompt} tokens, the context {self.context}", param="prompt")

    def shifted(self, tokens: list[int]) -> list[int]:
        """What is kept of a full context."""
        gone = max(1, (len(tokens) - self.keep) // 2) if self.discard is None else self.discard
        return [*tokens[: self.keep], *tokens[self.keep + gone :]]


class ShiftingClient:
    """An engine whose requests go on past the context, as far as a completer asks one."""

    def __init__(self, client: EngineClient, shift: Shift):
        self._client = client
        self._shift = shift
        self._parts: dict[str, str] = {}  # the engine's request that computes one of ours
        self._aborted: set[str] = set()

    def abort(self, request_id: str) -> None:
        """End a request; its last event still comes."""
        self._aborted.add(request_id)
        self._client.abort(self._parts.get(request_id, request_id))

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Events of the request, as if there were one context without an end."""
        most = request.sampling.max_tokens
        wanted, tokens = FULL_CONTEXTS * self._shift.context if most is None else most, list(request.tokens)
        made = parts = gone = 0
        total = Receipt()
        while True:
            part = self._part(request, tokens, parts, made, wanted)
            self._parts[request.id] = part.id
            async with aclosing(self._client.generate(part)) as events:
                async for event in events:
                    tokens += event.tokens
                    made += len(event.tokens)
                    total = _added(total, event.receipt, gone)
                    goes_on = event.finish == "length" and made < wanted and request.id not in self._aborted
                    if goes_on:
                        yield msgspec.structs.replace(event, id=request.id, finish=None, receipt=None)
                        break
                    last = event.finish is not None
                    yield msgspec.structs.replace(event, id=request.id, receipt=total if last else None)
                    if last:
                        return
                else:
                    return
            before = len(tokens)
            tokens = self._shift.shifted(tokens)
            gone += before - len(tokens)
            parts += 1

    def _part(self, request: Request, tokens: list[int], parts: int, made: int, wanted: int) -> Request:
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=min(wanted - made, self._shift.context - len(tokens))
        )
        if not parts:
            return msgspec.structs.replace(request, tokens=list(tokens), sampling=sampling)
        sampling = msgspec.structs.replace(
            sampling,
            seed=((request.sampling.seed or 0) + parts * _STEP) & _MASK,
            min_tokens=max(0, request.sampling.min_tokens - made),
            prompt_logprobs=None,
        )
        return msgspec.structs.replace(
            request, id=f"{request.id}.{parts}", tokens=list(tokens), sampling=sampling, follows=None
        )


def _added(total: Receipt, new: Receipt | None, gone: int) -> Receipt:
    """The receipt of all parts: prompt and cache are the first one's, work and times add up."""
    if new is None:
        return total
    if not total.prompt_tokens:
        return msgspec.structs.replace(new, shifted_tokens=gone)
    sums = {name: getattr(total, name) + getattr(new, name) for name in _SUMS}
    return msgspec.structs.replace(total, shifted_tokens=gone, **sums)


_SUMS = (
    *("output_tokens", "loaded_tokens", "chunks", "steps", "preemptions", "drafted_tokens", "accepted_tokens"),
    *("queue_seconds", "prefill_seconds", "decode_seconds"),
)
