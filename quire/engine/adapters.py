"""Adapters by name: loaded and unloaded while the engine runs, chosen by requests. To the engine loop these are RequestHooks.

    load ──► read, fit to the model's matrices, take a slot        request ──► enter: its adapter's key, a namespace of its own
    unload ──► the name is gone at once; its slot when the last request that uses it has left

A key is one content under one name: an adapter that is loaded again has another key, so nothing cached under the old one is ever
found. Namespaces are keyed hashes, so no tenant can name one; the key is kept, so that a
restart finds their pages again wherever these were kept. Loading happens between two steps: what runs waits for it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from quire.backends.adapters import Adapts
from quire.cache.secret import Secret
from quire.engine.types import AdapterInfo, Request
from quire.models.adapter_targets import AdapterTargets
from quire.observe.errors import BadRequest, NotEnoughMemory, NotFound
from quire.runner.lora import Loras
from quire.weights.adapters.read import open_adapter

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


class Ordered(Protocol):
    """A runner that has adapters."""

    def adopt(self, loras: Loras) -> None: ...
    def between(self, task: Callable[[], None]) -> None: ...


@dataclass(slots=True)
class _Resident:
    """An adapter whose pairs are in a slot: several names may stand for one."""

    key: str
    info: AdapterInfo
    users: int = 0
    leaving: bool = False


class Adapters:
    """The adapters of one engine. Used from its thread."""

    fields = ("adapter",)

    def __init__(
        self,
        targets: AdapterTargets,
        program: Adapts,
        runner: Ordered,
        slots: int,
        memory: Callable[[], int] | None = None,
        secret: Secret | None = None,
    ):
        """`memory` says what is free where pairs are kept; None: nobody knows. `secret` is what namespaces are made with;
        None: one that ends with this process."""
        self._targets = targets
        self._runner = runner
        self._slots = slots
        self._loras = Loras(program, slots)
        runner.adopt(self._loras)
        self._memory = memory
        self._named: dict[str, _Resident] = {}
        self._residents: dict[str, _Resident] = {}  # by key; also those that are leaving
        self._used: dict[str, str] = {}  # request id -> key
        self._loads = 0
        self._secret = secret or Secret(None)

    def listed(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return [r.info for r in self._named.values()]

    def load(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter and make it ready. Raises a QuireError, and then nothing has changed."""
        if not NAME.fullmatch(name):
            raise BadRequest(
                f"{name[:128]!r} is not a name for an adapter: letters, digits and ._:/@+-", param="lora_name"
            )
        if name in self._named:
            raise BadRequest(
                f"an adapter {name!r} is loaded already",
                cure="unload it first",
                param="lora_name",
                code="adapter_exists",
            )
        if not self._loras.room:
            leaving = sum(r.leaving for r in self._residents.values())
            leaves = f", {leaving} of them unloaded and still in use" if leaving else ""
            raise BadRequest(
                f"{self._slots} adapters are loaded{leaves}: there is no room for another",
                cure="unload one, or start with a larger --max-loras",
                code="too_many_adapters",
            )
        adapter = open_adapter(path)
        pairs = self._targets.fit(adapter)
        free = None if self._memory is None else self._memory()
        if free is not None and adapter.nbytes > free:
            raise NotEnoughMemory(
                f"{adapter.path} takes {adapter.nbytes / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB are free",
                cure="unload another adapter",
            )
        self._loads += 1
        key = f"{name}@{adapter.digest[:12]}.{self._loads}"
        self._runner.between(lambda: self._loras.put(key, pairs))
        info = AdapterInfo(
            name=name,
            path=os.path.abspath(path),
            rank=adapter.rank,
            modules=len(adapter.modules),
            nbytes=adapter.nbytes,
            digest=adapter.digest,
        )
        self._named[name] = self._residents[key] = _Resident(key, info)
        return info

    def unload(self, name: str) -> None:
        """Let no new request use an adapter; those that use it finish with it."""
        resident = self._named.pop(name, None)
        if resident is None:
            raise NotFound(f"there is no adapter {name[:128]!r}", param="lora_name", code="adapter_not_found")
        resident.leaving = True
        self._let_go(resident)

    def on_request(self, request: Request) -> Request:
        """The request with its adapter's key and a namespace that only it has. Raises NotFound."""
        if not request.adapter:
            return request
        resident = self._named.get(request.adapter)
        if resident is None:
            raise NotFound(
                f"the adapter {request.adapter[:128]!r} is not loaded", param="model", code="model_not_found"
            )
        resident.users += 1
        self._used[request.id] = resident.key
        # What it computes depends on the content alone, but two names never share: one of them may be unloaded for a reason.
        parts = f"{len(request.namespace)} {request.namespace} {resident.info.name} {resident.info.digest}"
        own = hashlib.blake2b(parts.encode(), key=self._secret.key("adapters"), digest_size=16).hexdigest()
        return msgspec.structs.replace(request, adapter=resident.key, namespace=own)

    def on_end(self, request_id: str) -> None:
        """A request has ended, however it did."""
        key = self._used.pop(request_id, None)
        if key is not None:
            resident = self._residents[key]
            resident.users -= 1
            self._let_go(resident)

    def _let_go(self, resident: _Resident) -> None:
        if resident.leaving and not resident.users:
            del self._residents[resident.key]
            self._runner.between(lambda: self._loras.drop(resident.key))
