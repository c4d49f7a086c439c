"""A manifest: the record that the store has on disk for one name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.observe.errors import BadModelFile
from quire.weights.download.repository import is_plain

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class File(msgspec.Struct, frozen=True):
    """One file of a model that is a folder."""

    path: str
    size: int
    sha256: str


class Defaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of a name that was made from another model, for where a request has none."""

    parent: str  # the model that it was made from, or the digest of a file
    system: str = ""
    parameters: dict[str, Any] = {}  # options, by Ollama's names
    messages: tuple[dict[str, str], ...] = ()  # role and content, before those of a conversation
    template: str = ""  # Jinja, in place of the model's own
    adapter: tuple[File, ...] = ()  # one GGUF file, or those of a PEFT folder: what is added to the model

    @property
    def only_adapts(self) -> bool:
        """Whether there is nothing in it beside an adapter."""
        return bool(self.adapter) and not (self.system or self.parameters or self.messages or self.template)


class Manifest(msgspec.Struct, frozen=True):
    """The record that the store keeps of one name."""

    name: str
    source: str
    digest: str  # sha256:<hex>; of a folder, of the list of its files
    size: int
    pulled_at: str  # ISO 8601, UTC
    format: str = "gguf"
    licence: str = ""
    files: tuple[File, ...] = ()  # of a folder
    defaults: Defaults | None = None  # of a name that was made here

    @property
    def sha256(self) -> str:
        return self.digest.partition(":")[2]

    @property
    def folder(self) -> bool:
        return bool(self.files)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong in the store. `fatal`: a model that cannot be used as it is."""

    text: str
    cure: str
    fatal: bool


def decode(data: bytes, name: str) -> Manifest:
    """A manifest from its bytes. Raises BadModelFile; what it returns names no path outside the store."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.DecodeError as e:
        raise BadModelFile(f"the manifest of {name} is broken: {e}", cure=f"`quire pull --force {name}`") from e
    if not _DIGEST.fullmatch(manifest.digest):
        raise BadModelFile(f"the manifest of {name} holds no sha256 digest: {manifest.digest[:80]!r}")
    adapter = () if manifest.defaults is None else manifest.defaults.adapter
    bad = next((f.path for f in (*manifest.files, *adapter) if not is_plain(f.path)), None)
    if bad is not None:
        raise BadModelFile(f"the manifest of {name} names {bad[:80]!r}, which is no file of a model")
    return manifest


def encode(manifest: Manifest) -> bytes:
    """A manifest for people to read."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def digest_of(files: Iterable[File]) -> str:
    """One digest for all files of a folder and their names."""
    lines = sorted(f"{f.sha256}  {f.path}\n" for f in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()
