"""What every route shares: the model being served, the stage it is in, and the requests in flight.

One Service per app, used from one event loop. Stages: loading -> ready <-> restarting -> failed, and draining at the end. A route
asks `ready()` for the completer and gets it or a 503 that says the stage. Knows the engine client only by its protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Collection
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.config import VERSION, ServerConfig
from quire.engine.transport.client import AdapterClient, EngineClient
from quire.engine.types import AdapterInfo, EngineInfo
from quire.observe.errors import BadRequest, NotFound, Unavailable
from quire.observe.metrics import Metrics, ModelMetrics
from quire.server import urgency
from quire.server.state import State

if TYPE_CHECKING:
    from quire.chat.completer import Completer
    from quire.chat.embedder import Embedder
    from quire.weights.store.store import Store


# The adapter that the request of this task chose; empty: the model as it is.
ADAPTER: ContextVar[str] = ContextVar("adapter", default="")
# What speaks for the model in this task, where the name that its request chose has a template of its own.
SPEAKER: ContextVar[Completer | None] = ContextVar("speaker", default=None)


class Running(Protocol):
    """An answer on its way, as far as a shutdown cares."""

    def fail(self, error: BaseException) -> None: ...


class Job(Protocol):
    """Work of the server's own, beside requests. It begins when a model is there, and is let go when the server drains."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class Service:
    """The served model and the traffic on it."""

    def __init__(self, config: ServerConfig, name: str):
        self.config = config
        self.name = name  # what clients call the model
        self.created = int(time.time())
        self.metrics = Metrics()
        self.model_metrics: ModelMetrics | None = None
        self.client: EngineClient | None = None
        self.completer: Completer | None = None
        self.fingerprint = ""
        self.note = "starting"  # what loading is busy with
        self.path: str | None = None  # the model's file or folder, once it is known
        self.store: Store | None = None  # the models of this machine, where clients may see them
        self.expected: frozenset[str] = frozenset()  # adapters that will be there once the model is loaded
        self.made: dict[
            str, bool
        ] = {}  # adapters of names in the store; whether the name is that adapter and nothing else
        self.speakers: dict[str, Completer] = {}  # by the template that takes the place of the model's own
        self.restarted = 0  # times the engine process was started again
        self.state = State(config.state_dir)
        self.jobs: list[Job] = []
        self.closing: list[Callable[[], None]] = []  # called when the process ends
        self.feeds: set[Running] = set()
        self.in_flight = 0  # HTTP requests between their first byte in and last byte out, probes not counted
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loaded = asyncio.Event()  # or never to be

    @property
    def stage(self) -> str:
        """loading, ready, restarting, failed (the engine is not started again) or draining."""
        if self.draining:
            return "draining"
        if self.completer is None or self.client is None:
            return "loading"
        if self.client.alive:
            return "ready"
        return "failed" if getattr(self.client, "gave_up", False) else "restarting"

    @property
    def detail(self) -> str:
        """What the stage is about, for people: what loading is busy with, or why the engine is not alive."""
        stage = self.stage
        if stage == "loading":
            return self.note
        return str(getattr(self.client, "why", "")) if stage in ("restarting", "failed") else ""

    @property
    def info(self) -> EngineInfo:
        """The engine's decisions; only once ready."""
        if self.completer is None:
            raise Unavailable(f"the model is {self.stage}", cure="wait until GET /ready answers 200")
        return self.completer.info

    def attach(self, client: EngineClient, completer: Completer) -> None:
        """The model is loaded: from now on requests are taken."""
        info = completer.info
        self.fingerprint = fingerprint(info)
        self.model_metrics = self.metrics.model(
            self.name,
            context=info.context,
            page_size=info.page_size,
            pages=info.pages,
            snapshot=client.stats,
            restarts=lambda: self.restarted,
            hangs=lambda: int(getattr(client, "hangs", 0)),
        )
        self.client = client
        self.completer = completer
        self._loaded.set()
        for job in self.jobs:
            job.start()

    async def loaded(self) -> None:
        """Wait for the first load to end, for clients that expect a request to wait for it. Says nothing of what came."""
        await self._loaded.wait()

    def ready(self) -> Completer:
        """The completer, or 503 with the stage."""
        stage = self.stage
        if stage != "ready" or self.completer is None:
            what = {
                "loading": f"the model is still loading ({self.note})",
                "restarting": self.detail or "the engine process died and is being started again",
                "failed": self.detail or "the engine process died too often and is not started again",
                "draining": "the server is shutting down",
            }
            again = "start the server again" if stage == "failed" else "try again when GET /ready answers 200"
            raise Unavailable(what[stage], cure=again)
        return SPEAKER.get() or self.completer

    def embedder(self) -> Embedder:
        """What embeds and scores here; 503 with the stage, 400 where the model was loaded to generate."""
        from quire.chat.embedder import Embedder

        completer = self.ready()
        info = msgspec.structs.replace(completer.info, model=self.name)  # a client knows it by this name
        return Embedder(completer.client, completer.tokenizer, info, urgency.priority())

    def generator(self) -> Completer:
        """The completer; 503 with the stage, 400 where the model makes no text."""
        completer = self.ready()
        if completer.info.task != "generate":
            does, where = (
                ("embeds texts", "/v1/embeddings")
                if completer.info.task == "embed"
                else ("scores pairs of texts", "/v1/rerank")
            )
            raise BadRequest(
                f"{self.name} {does}: it cannot generate text",
                cure=f"POST {where}",
                param="model",
                code="unsupported_task",
            )
        return completer

    @property
    def loaded_adapters(self) -> dict[str, AdapterInfo]:
        """Every adapter that the engine has, by name."""
        client = self.client
        return {own.name: own for own in client.adapters} if isinstance(client, AdapterClient) else {}

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The adapters that requests may name as their model, by name. A name that means more than its adapter is not among them."""
        return {name: own for name, own in self.loaded_adapters.items() if self.made.get(name, True)}

    def check_model(self, name: str | None, of: Collection[str] | None = None) -> None:
        """404 unless `name` is the served model or an adapter of it; no name means the model.

        The text is the same for every other name. This is the one place where a request chooses: what it chose stays with the
        task that serves it, and `Feed` gives it to every generation. `of`: the names that a dialect answers to, in place of `adapters`.
        """
        ADAPTER.set("")
        SPEAKER.set(None)
        if name is None or name == self.name:
            return
        known = self.adapters if self.client is not None else self.expected
        if name not in (known if of is None else of):
            raise NotFound(
                "that model is not served here",
                cure="GET /v1/models lists what is",
                param="model",
                code="model_not_found",
            )
        ADAPTER.set(name)

    @property
    def answering(self) -> str:
        """What this task's request called the model: its name, or the adapter's."""
        return ADAPTER.get() or self.name

    def enter(self) -> None:
        """An HTTP request began."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """An HTTP request ended."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests, wait for those in flight, then fail the rest. True when none had to be failed."""
        self.draining = True
        self._loaded.set()
        for job in self.jobs:
            await job.stop()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
            return True
        except TimeoutError:
            pass
        for feed in list(self.feeds):
            feed.fail(Unavailable("the server is shutting down and this answer was not finished in time"))
        try:
            async with asyncio.timeout(2.0):
                await self._idle.wait()
        except TimeoutError:
            pass
        return False

    def close(self) -> None:
        """Let go of what is on disk."""
        for close in self.closing:
            close()
        self.state.close()


def fingerprint(info: EngineInfo) -> str:
    """Changes when the tokens might: another version, model or kernel set. The number of threads is not part of it."""
    backend = re.sub(r",?\s*\d+ threads?", "", info.backend)
    parts = (VERSION, info.model, info.architecture, info.vocab_size, info.weight_bytes, backend)
    return "fp_" + hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:12]
