"""Adapters of names that were made by /api/create: their files, whether they fit the model, and the engine's copy of them.

The store has the truth; `settle` makes the engines follow it after a name was made, copied or deleted, `Loading` when a model is loaded. A
name is answered with its adapter or not at all. One that has more than an adapter (options, a system text) is answered by Ollama's routes
alone, because only they know that; any other is a model's name in every API.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.transport.client import AdapterClient, EngineClient
from quire.observe.errors import BadRequest, QuireError
from quire.server.errors import clean
from quire.server.ollama.names import Names
from quire.server.served import Model
from quire.server.threads import in_thread
from quire.weights.store.manifest import File, Manifest
from quire.weights.store.store import Store

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DIGEST = re.compile(r"@?sha256[:-]([0-9a-f]{64})")


def read(store: Store, given: dict[str, str]) -> tuple[tuple[File, ...], Path]:
    """The files of `adapters`, names and digests: one GGUF file, or a PEFT folder's two; what else such a folder has is not used."""
    found: dict[str, str] = {}
    for name, digest in given.items():
        match = DIGEST.fullmatch(digest)
        if match is None:
            raise BadRequest(
                f"adapters: {digest[:80]!r} is no digest: sha256: and 64 hexadecimal digits",
                cure="send the file to /api/blobs/ first; paths of the client's are not read here",
                param="adapters",
            )
        found[name.replace("\\", "/").rpartition("/")[2]] = match[1]
    if CONFIG in found and WEIGHTS in found:
        return store.adapter([(name, found[name]) for name in (CONFIG, WEIGHTS)])
    if len(found) != 1:
        raise BadRequest(
            f"adapters has {', '.join(sorted(found))[:200]}: it must be one GGUF file, or {CONFIG} and {WEIGHTS}",
            param="adapters",
        )
    ((_, sha256),) = found.items()
    return store.adapter([("adapter.gguf", sha256)])


def check_fits(model: str, adapter: Path) -> None:
    """Refuse an adapter that is none, or not of the model at that path. Reads headers, and of the adapter everything."""
    from quire.engine.construction.adapters import MOST, open_adapted
    from quire.models import load
    from quire.weights.checkpoint import open_checkpoint

    try:
        with open_checkpoint(model) as checkpoint:
            config = EngineConfig(path=model, loras=(("adapter", str(adapter)),), max_lora_rank=MOST)
            open_adapted(config, load(checkpoint), checkpoint)
    except QuireError as error:
        said = error.message.replace(str(adapter), "the adapter").replace(model, "the model")
        raise BadRequest(f"adapters: {clean(said, 'it cannot be used')}", cure=error.cure, param="adapters") from None


async def settle(names: Names, name: str) -> str:
    """Make the engines follow the store in what `name` means. What is to be told of it, if anything."""
    store = names.server.store
    if store is None:
        return ""
    found = await in_thread(lambda: _made(names, store, name))
    before = names.made.get(name)
    if before is not None and isinstance(before.client, AdapterClient):
        await before.client.unload_adapter(name)
        del names.made[name]
        before.private.discard(name)
    if found is None:
        return ""
    model, made = found
    client = model.client
    if not isinstance(client, AdapterClient) or not model.info.max_adapters:
        return f"{name} is kept; this server has no room for adapters and will answer to it when it is started again"
    try:
        await _load(names, model, client, *made)
    except QuireError as error:
        return (
            f"{name} is kept and not answered: its adapter could not be loaded: {clean(str(error), 'it does not fit')}"
        )
    return ""


def _made(names: Names, store: Store, name: str) -> tuple[Model, tuple[Manifest, Path]] | None:
    """The adapter that a name has in the store, and the served model that it is for."""
    for model in names.server.models:
        for manifest, path in [] if model.path is None else store.adapted(model.path):
            if manifest.name == name:
                return model, (manifest, path)
    return None


class Loading:
    """What these routes do when a model is loaded: make room for the adapters of names that were made of it, and load them."""

    def __init__(self, names: Names):
        self._names = names

    async def before(self, model: Model, config: EngineConfig) -> EngineConfig:
        """With room for adapters where names in the store need it."""
        if config.task not in ("auto", "generate"):
            return config
        wanted = await asyncio.to_thread(self._adapted, model, config.path)
        return replace(config, runtime_lora=True) if wanted else config

    async def after(self, model: Model, client: EngineClient, say: Callable[[str], None]) -> None:
        """Load the adapters of every name that was made of the model; what cannot be is told, and its name is not answered."""
        if (
            model.path is None
            or client.info is None
            or not client.info.max_adapters
            or not isinstance(client, AdapterClient)
        ):
            return
        for manifest, adapter in self._adapted(model, model.path):
            try:
                if self._names.get(manifest.name) is not None:
                    raise BadRequest("that is the name of the model itself")
                await _load(self._names, model, client, manifest, adapter)
            except QuireError as error:
                say(f"{manifest.name} is not answered: its adapter could not be loaded: {error}")

    def _adapted(self, model: Model, path: str) -> list[tuple[Manifest, Path]]:
        """The adapters that made names of this file have, with their files. Only the first model that serves the file gets them."""
        store = self._names.server.store
        return [] if store is None or self._names.model_at(path) is not model else store.adapted(path)


async def _load(names: Names, model: Model, client: AdapterClient, manifest: Manifest, adapter: Path) -> None:
    await client.load_adapter(manifest.name, str(adapter))
    defaults = manifest.defaults
    names.made[manifest.name] = model
    if defaults is None or not defaults.only_adapts:
        model.private.add(manifest.name)
