"""What a text must be that shall become a vector. Knows requests, never models."""

from __future__ import annotations

from quire.engine.types import Request
from quire.observe.errors import BadRequest


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
