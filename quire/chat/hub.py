"""The tokenizer and the chat template of a folder as Hugging Face lays it out: which files they are in.

tokenizer.json comes first (`tokenizer_json.py`), then Mistral's tekken.json (`tokenizers/tekken.py`), then SentencePiece's tokenizer.model
(`spm_file.py`). Other kinds of file are refused by name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.chat.templates.template import MAX_SOURCE, ChatTemplate
from quire.chat.tokenizers.hub_names import named_tokens
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.observe.errors import BadModelFile, NotFound, Unsupported

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

MAX_TEMPLATES = 16
OTHERS = ("tiktoken.model", "spiece.model", "vocab.json", "vocab.txt")


def read_tokenizer(folder: Folder) -> Tokenizer:
    """The folder's tokenizer. Raises BadModelFile, Unsupported or NotFound, naming the file."""
    has = {name for name in ("tokenizer.json", "tekken.json", "tokenizer.model", *OTHERS) if _is_in(folder, name)}
    if "tokenizer.json" in has:
        from quire.chat.tokenizers import tokenizer_json

        return tokenizer_json.read(folder)
    if "tekken.json" in has:
        from quire.chat.tokenizers import tekken

        return tekken.read(folder)
    for name in ("tokenizer.model", "spiece.model"):
        if name in has:
            from quire.chat.tokenizers import spm_file

            return spm_file.read(folder, name)
    for other in OTHERS:
        if other in has:
            raise Unsupported(
                f"{folder.path} has {other} and no tokenizer.json: that kind of tokenizer file is not read",
                cure="transformers writes one: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
    raise NotFound(f"{folder.path} has no tokenizer.json: the model has no tokenizer", cure="fetch it too")


def _is_in(folder: Folder, name: str) -> bool:
    return os.path.exists(os.path.join(folder.path, name))


def read_template(folder: Folder, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The folder's chat template, or None: such a model takes completions, not chat."""
    config = folder.values("tokenizer_config.json")
    where, named = _templates(folder, config)
    if not named:
        return None
    default = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
    if default is None:
        raise BadModelFile(f"{where} has the chat templates {', '.join(sorted(named))} and no default")
    names = named_tokens(folder, config)
    bos, eos = names.pop("bos_token", ""), names.pop("eos_token", "")
    tools = named.get("tool_use")
    with_tools = ChatTemplate(tools, bos, eos, where=where, more=names) if tools else None
    return ChatTemplate(default, bos, eos, where=where, more=names, with_tools=with_tools)


def _templates(folder: Folder, config: Values | None) -> tuple[str, dict[str, str]]:
    """The file that templates were found in, and the templates by name. Files of their own come before tokenizer_config.json."""
    path = Path(folder.path)
    found: dict[str, str] = {}
    for name, file in [("default", "chat_template.jinja"), *_more_templates(path)]:
        text = folder.text(file, 4 * MAX_SOURCE)
        if text is not None:
            found[name] = text
    if found:
        return str(path / "chat_template.jinja"), found
    for values in (folder.values("chat_template.json"), config):
        given = None if values is None else values.get("chat_template")
        if given is None:
            continue
        where = f"{values.where}, chat_template" if values else ""
        if isinstance(given, str):
            return where, {"default": given}
        pairs = [(k, v) for k, v in given.items()] if isinstance(given, dict) else _pairs(given)
        if pairs is None or not all(isinstance(k, str) and isinstance(v, str) for k, v in pairs):
            raise BadModelFile(f"{where} is neither a template nor a list of named ones")
        return where, dict(pairs)
    return "", {}


def _pairs(given: Any) -> list[tuple[Any, Any]] | None:
    if not isinstance(given, list) or len(given) > MAX_TEMPLATES or not all(isinstance(t, dict) for t in given):
        return None
    return [(t.get("name"), t.get("template")) for t in given]


def _more_templates(path: Path) -> list[tuple[str, str]]:
    folder = path / "additional_chat_templates"
    if not folder.is_dir():
        return []
    return [(p.stem, f"{folder.name}/{p.name}") for p in sorted(folder.glob("*.jinja"))[:MAX_TEMPLATES]]
