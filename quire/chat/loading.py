"""The tokenizer and the chat template of a checkpoint, from a GGUF's metadata or from the files of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.chat.templates.template import MAX_SOURCE, ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, NotFound
from quire.weights.checkpoint import naming
from quire.weights.gguf.file import GGUF

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened


def tokenizer_of(checkpoint: Opened) -> Tokenizer:
    """The tokenizer. Raises BadModelFile or Unsupported, naming the file and what is wrong in it."""
    if isinstance(checkpoint, GGUF):
        with naming(checkpoint.path):
            return Tokenizer.from_gguf(checkpoint.metadata)
    from quire.chat.hub import read_tokenizer

    return read_tokenizer(checkpoint)


def tokenizer_and_template(checkpoint: Opened, template: str | None = None) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer, and the template where there is one: a model without one takes completions, not chat. `template` is a
    file with one that takes the place of the model's own."""
    tokenizer = tokenizer_of(checkpoint)
    if template is not None:
        return tokenizer, template_file(Path(template), tokenizer)
    with naming(checkpoint.path):
        if isinstance(checkpoint, GGUF):
            return tokenizer, ChatTemplate.from_gguf(checkpoint.metadata, tokenizer)
        from quire.chat.hub import read_template

        return tokenizer, read_template(checkpoint, tokenizer)


def template_file(path: Path, tokenizer: Tokenizer) -> ChatTemplate:
    """A template that somebody keeps in a file. Raises NotFound or BadModelFile, naming it."""
    try:
        with path.open("rb") as file:
            data = file.read(4 * MAX_SOURCE + 1)
    except OSError as e:
        raise NotFound(f"the chat template {path} cannot be read: {e.strerror or e}") from None
    try:
        source = data.decode()
    except UnicodeDecodeError:
        raise BadModelFile(f"{path} is not UTF-8 text: it cannot be a chat template") from None
    bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return ChatTemplate(source, bos, eos, where=str(path))
