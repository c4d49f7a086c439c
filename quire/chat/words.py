"""The words of a checkpoint: its tokenizer and its chat template, from wherever they lie in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.chat.template import ChatTemplate
from quire.chat.tokenizer import Tokenizer
from quire.weights.gguf import GGUF

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened


def tokenizer_of(checkpoint: Opened) -> Tokenizer:
    """The tokenizer. Raises BadModelFile or Unsupported, naming the file and what is wrong in it."""
    if isinstance(checkpoint, GGUF):
        return Tokenizer.from_gguf(checkpoint.metadata)
    from quire.chat.hub import read_tokenizer

    return read_tokenizer(checkpoint)


def words_of(checkpoint: Opened) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer, and the template where there is one: a model without one takes completions, not chat."""
    tokenizer = tokenizer_of(checkpoint)
    if isinstance(checkpoint, GGUF):
        return tokenizer, ChatTemplate.from_gguf(checkpoint.metadata, tokenizer)
    from quire.chat.hub import read_template

    return tokenizer, read_template(checkpoint, tokenizer)
