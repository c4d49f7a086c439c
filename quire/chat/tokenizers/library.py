"""Calls into the `tokenizers` library that leave other threads alone.

Its `encode` keeps the interpreter lock to the end, so that a prompt of 32K tokens would stop every stream of a server for a tenth of
a second; its batch call lets the lock go. Short texts take the plain call, which costs less to make. The ids are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

LONG = 2048  # characters, about a millisecond


def ids_of(library: tokenizers.Tokenizer, text: str) -> list[int]:
    """The ids of a text, without the tokens that a model wants around it."""
    if len(text) < LONG:
        return library.encode(text, add_special_tokens=False).ids
    return library.encode_batch_fast([text], add_special_tokens=False)[0].ids
