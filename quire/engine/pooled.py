"""Texts that become a vector each, an embedding or a score: what such a request must be, before the scheduler has it.

They ride in the same scheduler and batch as requests that generate. A model in which every row of a text sees every other adds
the limit WholePrompts. Knows requests, never models.
"""

from __future__ import annotations

import msgspec

from quire.engine.hooks import NoAdapters
from quire.engine.texts import check
from quire.engine.types import Request


class Texts(NoAdapters):
    """The hooks of an engine that embeds or scores: every request wants a vector."""

    fields = ("id", "tokens")  # no request is without

    def __init__(self, *, context: int, vocab_size: int) -> None:
        self._context = context
        self._vocab_size = vocab_size

    def on_request(self, request: Request) -> Request:
        """The same request, wanting a vector. Raises BadRequest for one that cannot be computed."""
        request = super().on_request(request)
        check(request, self._context, self._vocab_size)
        return msgspec.structs.replace(request, vector=True)
