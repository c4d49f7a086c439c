"""Adapters of names that were made by /api/create: their files, whether they fit the model, and the engine's copy of them.

The store has the truth; `settle` makes the engine follow it after a name was made, copied or deleted, `load_made` when a server starts. A
name is answered with its adapter or not at all. One that has more than an adapter (options, a system text) is answered by Ollama's routes
alone, because only they know that; any other is a model's name in every API.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.transport.client import AdapterClient
from quire.observe.errors import BadRequest, QuireError
from quire.server.errors import clean
from quire.server.service import Service
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


async def settle(service: Service, name: str) -> str:
    """Make the engine follow the store in what `name` means. What is to be told of it, if anything."""
    store, client = service.store, service.client
    if store is None or service.path is None:
        return ""
    at = service.path
    made = next(((m, path) for m, path in await in_thread(lambda: store.adapted(at)) if m.name == name), None)
    if name in service.made and isinstance(client, AdapterClient):
        await client.unload_adapter(name)
        del service.made[name]
    if made is None:
        return ""
    if not isinstance(client, AdapterClient) or not service.info.max_adapters:
        return f"{name} is kept; this server has no room for adapters and will answer to it when it is started again"
    try:
        await _load(service, client, *made)
    except QuireError as error:
        return (
            f"{name} is kept and not answered: its adapter could not be loaded: {clean(str(error), 'it does not fit')}"
        )
    return ""


def room_for(service: Service, config: EngineConfig) -> EngineConfig:
    """The engine's configuration, with room for adapters where names in the store need it."""
    wanted = service.store is not None and service.store.adapted(config.path)
    return replace(config, runtime_lora=True) if wanted and config.task in ("auto", "generate") else config


async def load_made(service: Service, client: AdapterClient, path: str, say: Callable[[str], None]) -> None:
    """Load the adapters of every name that was made of the model; what cannot be is told, and its name is not answered."""
    for manifest, adapter in [] if service.store is None else service.store.adapted(path):
        try:
            if manifest.name == service.name:
                raise BadRequest("that is the name of the model itself")
            await _load(service, client, manifest, adapter)
        except QuireError as error:
            say(f"{manifest.name} is not answered: its adapter could not be loaded: {error}")


async def _load(service: Service, client: AdapterClient, manifest: Manifest, adapter: Path) -> None:
    await client.load_adapter(manifest.name, str(adapter))
    defaults = manifest.defaults
    service.made[manifest.name] = defaults is not None and defaults.only_adapts
