"""Cards: the facts that Ollama's clients get about a model, from its header (read once) and from the store's manifest.

A card is of a served model or of one in the store. A fact that is not known is empty: a file outside the store has no digest. Paths of this machine are
never in a card. Reads files, so it runs in a thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from quire.observe.errors import NotFound, QuireError
from quire.server.ollama import requests
from quire.server.ollama.names import Names
from quire.server.served import Model, canonical

if TYPE_CHECKING:
    from quire.weights.store.manifest import Defaults, Manifest

CACHED = 256  # headers kept


@dataclass(frozen=True, slots=True)
class Header:
    """A model's own words."""

    details: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    template: str = ""
    licence: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class Card:
    """One model."""

    name: str
    size: int  # bytes on disk
    digest: str  # sha256, or "" where nobody computed it
    modified: float  # seconds since the epoch
    header: Header
    licence: str = ""
    defaults: Defaults | None = None  # of a name that was made from another

    def listed(self) -> dict[str, Any]:
        """The card as /api/tags lists it."""
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": requests.stamp(self.modified),
            "size": self.size,
            "digest": self.digest,
            "details": self.header.details | ({} if self.defaults is None else {"parent_model": self.defaults.parent}),
        }


def served(names: Names, model: Model) -> Card | None:
    """A served model, or None while it is not known where it is."""
    if model.path is None:
        return None
    manifest, store = names.manifest(model.name), names.server.store
    if manifest is not None and store is not None and str(store.blob(manifest)) == model.path:
        return _of(manifest, model.path)
    header = read(model.path)
    return Card(model.name, header.size, "", os.stat(model.path).st_mtime, header, header.licence)


def all_cards(names: Names) -> list[Card]:
    """The served models by all their names, then the store's others, newest first. One whose header cannot be read has no details."""
    store = names.server.store
    cards = [(model, served(names, model)) for model in names.server.models]
    first = [replace(card, name=name) for model, card in cards if card is not None for name in model.names]
    known = {card.name for card in first}
    rest: list[Card] = []
    if store is not None:
        named = [m for m in store.list() if m.name not in known]
        rest = sorted((_of(m, str(store.blob(m))) for m in named), key=lambda card: -card.modified)
    return first + rest


def find(names: Names, name: str) -> Card:
    """The model of that name, served or in the store. 404 lists what there is."""
    model, store = names.get(name), names.server.store
    if model is not None and (card := served(names, model)) is not None:
        return card
    if store is not None and (manifest := names.manifest(canonical(name))) is not None:
        return _of(manifest, str(store.blob(manifest)))
    known = ", ".join(card.name for card in all_cards(names)[:16])
    raise NotFound(
        f"model {name[:128]!r} is not here",
        cure=f"there are: {known}" if known else "",
        param="model",
        code="model_not_found",
    )


def _of(manifest: Manifest, path: str) -> Card:
    try:
        header = read(path)
    except (QuireError, OSError):
        header = Header(unknown(manifest.format))
    try:
        when = datetime.fromisoformat(manifest.pulled_at).timestamp()
    except ValueError:
        when = 0.0
    licence = manifest.licence or header.licence
    size = manifest.size + sum(file.size for file in (manifest.defaults.adapter if manifest.defaults else ()))
    return Card(manifest.name, size, manifest.sha256, when, header, licence, manifest.defaults)


def read(path: str) -> Header:
    """The header of a model's file or folder; read again when it changes."""
    return _read(path, os.stat(path).st_mtime_ns)


@lru_cache(maxsize=CACHED)
def _read(path: str, changed: int) -> Header:
    from quire.weights import folder
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.gguf.file import GGUF, describe

    with open_checkpoint(path) as checkpoint:
        if isinstance(checkpoint, GGUF):
            told, info, form = describe(checkpoint), _metadata(checkpoint), "gguf"
            template = checkpoint.metadata.get("tokenizer.chat_template")
        else:
            told, form, template = folder.describe(checkpoint), "safetensors", _written(checkpoint)
            info = _as_metadata(told)
    family, types = str(told.get("architecture") or ""), told.get("types")
    count, size = told.get("parameters"), told.get("size")
    parameters = count if isinstance(count, int) else 0
    level = next(iter(types), "") if isinstance(types, dict) else ""
    info["general.parameter_count"] = parameters
    return Header(
        _details(form, family, parameters, str(level)),
        info,
        _text(template) if isinstance(template, str) else "",
        _text(str(told.get("license") or "")),
        size if isinstance(size, int) else 0,
    )


def _metadata(gguf: Any) -> dict[str, Any]:
    """A file's own keys; arrays are null, as Ollama has them unless asked for all."""
    left_out = {"tokenizer.chat_template", "general.name"}
    return {
        _text(key): _text(value) if isinstance(value, str) else value if isinstance(value, bool | int | float) else None
        for key, value in gguf.metadata.items()
        if key not in left_out
    }


def _as_metadata(told: dict[str, object]) -> dict[str, Any]:
    """A folder's facts by the names that a GGUF would have them."""
    family = str(told.get("architecture") or "")
    names = {
        "context_length": "context_length",
        "layers": "block_count",
        "embedding_length": "embedding_length",
        "feed_forward_length": "feed_forward_length",
        "heads": "attention.head_count",
        "kv_heads": "attention.head_count_kv",
        "vocabulary": "vocab_size",
    }
    found = {f"{family}.{name}": told[key] for key, name in names.items() if isinstance(told.get(key), int)}
    return {"general.architecture": family, **found}


def _written(folder: Any) -> str | None:
    """The chat template of a folder, where it is a text of its own or in the tokenizer's settings."""
    words = folder.values("tokenizer_config.json") or {}
    written = folder.text("chat_template.jinja", 1 << 24) or words.get("chat_template")
    return written if isinstance(written, str) else None


def unknown(form: str = "") -> dict[str, Any]:
    """`details` of a model whose header cannot be read."""
    return _details(form, "", 0, "")


def _details(form: str, family: str, parameters: int, level: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": form,
        "family": _text(family),
        "families": [_text(family)] if family else [],
        "parameter_size": _people(parameters),
        "quantization_level": level.upper(),
    }


def _people(count: int) -> str:
    """134515008 as 134.52M."""
    for unit, size, digits in (("B", 10**9, 1), ("M", 10**6, 2), ("K", 10**3, 0)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count) if count else ""


def _text(value: str) -> str:
    """Text that JSON can hold, whatever the file has."""
    return value.encode("utf-8", "replace").decode()
