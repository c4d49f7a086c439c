"""Texts that become a vector each, an embedding or a score: what such a request must be, before the scheduler has it.

They ride in the same scheduler and batch as requests that generate. A model in which every row of a text sees every other adds
the limit WholePrompts. Knows requests, never models.
"""

from __future__ import annotations

import msgspec

from quire.engine.hooks import NoAdapters
from quire.engine.types import Request
from quire.observe.errors import BadRequest


class Texts(NoAdapters):
    """The hooks of an engine that embeds or scores: every request wants a vector."""

    fields = ("id", "tokens")  # no request is without

    def __init__(self, *, context: int, vocab_size: int) -> None:
        self._context = context
        self._vocab_size = vocab_size

    def on_request(self, request: Request) -> Request:
        """The same request, wanting a vector. Raises BadRequest for one that cannot be computed."""
        tokens = super().on_request(request).tokens
        if not tokens:
            raise BadRequest("the text has no tokens", param="input")
        if len(tokens) > self._context:
            raise too_long(len(tokens), self._context)
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise BadRequest(f"a token id is outside of the vocabulary of {self._vocab_size}", param="input")
        return msgspec.structs.replace(request, vector=True)


def too_long(tokens: int, context: int, param: str = "input") -> BadRequest:
    """A text that does not fit."""
    return BadRequest(
        f"{param} has {tokens} tokens: the most this model takes is {context}",
        cure="shorten it, or ask for it to be cut (truncate)",
        param=param,
        code="context_length_exceeded",
    )
