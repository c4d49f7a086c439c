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

    def __init__(self, *, context: int, vocab_size: int) -> None:
        self._context = context
        self._vocab_size = vocab_size

    def on_request(self, request: Request) -> Request:
        """The same request, wanting a vector. Raises BadRequest for one that cannot be computed."""
        request = super().on_request(request)
        check(request, self._context, self._vocab_size)
        return msgspec.structs.replace(request, vector=True)


def check(request: Request, context: int, vocab_size: int) -> None:
    """Raises BadRequest for a text that cannot be computed."""
    tokens = request.tokens
    if not tokens:
        raise BadRequest("the text has no tokens", param="input")
    if len(tokens) > context:
        raise too_long(len(tokens), context)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise BadRequest(f"a token id is outside of the vocabulary of {vocab_size}", param="input")


def too_long(tokens: int, context: int, param: str = "input") -> BadRequest:
    """A text that does not fit."""
    return BadRequest(
        f"{param} has {tokens} tokens: the most this model takes is {context}",
        cure="shorten it, or ask for it to be cut (truncate)",
        param=param,
        code="context_length_exceeded",
    )
