"""The server object, one per process: configuration, metrics, the state folder, the requests in flight, and the models.

One Server per app, used from one event loop. A dialect gets it in `register(app, server)` and asks `resolve` for the model (a `Served`) that answers a request.
A dialect that has to do something when a model is loaded adds a `LoadHook`; work beside requests is a `Job`. Knows no dialect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request

from quire.config import EngineConfig, ServerConfig
from quire.engine.transport.client import EngineClient
from quire.observe.errors import Unavailable
from quire.observe.metrics import Metrics
from quire.server.callers import NOBODY, SCOPE
from quire.server.reading import Reading
from quire.server.served import Model, Models, Running, Served
from quire.server.state import State

if TYPE_CHECKING:
    from quire.chat.completer import Completer
    from quire.weights.store.store import Store

CANONICALIZE = "x-quire-canonicalize"  # a header: what of a conversation shall be rewritten, in place of what the server was started with


class Job(Protocol):
    """Work of the server's own, beside requests. It begins when a model is there, and is let go when the server drains."""

    def start(self) -> None: ...
    async def stop(self) -> None: ...


class LoadHook(Protocol):
    """What a dialect does when a model is loaded."""

    async def before(self, model: Model, config: EngineConfig) -> EngineConfig:
        """The engine's configuration, with what the dialect needs of it."""
        ...

    async def after(self, model: Model, client: EngineClient, say: Callable[[str], None]) -> None:
        """The engine runs, and no request has been taken yet. `say` is told what people should know."""
        ...


class Server:
    """The process: its models, and the traffic on all of them."""

    def __init__(self, config: ServerConfig, models: Iterable[Model]):
        self.config = config
        self.models = Models(models, any_name=config.any_model_name)
        self.metrics = Metrics()
        self.store: Store | None = None  # the models of this machine, where clients may see them
        self.state = State(config.state_dir)
        self.hooks: list[LoadHook] = []
        self.jobs: list[Job] = []
        self.closing: list[Callable[[], None]] = []  # called when the process ends
        self.running: set[Running] = set()  # what is under way and needs no model
        self.in_flight = 0  # HTTP requests between their first byte in and last byte out, probes not counted
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def stage(self) -> str:
        """loading (some model still is), ready (all are), degraded (some are), restarting or failed (none is), or draining."""
        stages = [model.stage for model in self.models]
        if self.draining:
            return "draining"
        if "loading" in stages:
            return "loading"
        if "ready" in stages:
            return "ready" if set(stages) == {"ready"} else "degraded"
        return "restarting" if "restarting" in stages else "failed"

    @property
    def health(self) -> str:
        """loading (until every model that was named has loaded once), failed (none comes back), or ok."""
        if any(model.completer is None for model in self.models):
            return "ok" if self.draining else "loading"
        return "failed" if self.stage == "failed" else "ok"

    @property
    def retry_after(self) -> float | None:
        """Seconds until a model more may answer; None: nobody can say."""
        return min((s for model in self.models if (s := model.retry_after) is not None), default=None)

    @property
    def takes_requests(self) -> bool:
        """Whether a request sent now would be taken, for one of the models at least."""
        return self.stage in ("ready", "degraded")

    async def resolve(self, request: Request, name: str | None, *, first: bool = False) -> Served:
        """What the request is answered by, by the name it has for a model. See `Models.resolve`."""
        scope = request.scope
        served = await self.models.resolve(name, scope.get(SCOPE, NOBODY), first=first, reading=Reading(scope))
        agent, asked = request.headers.get("user-agent", ""), request.headers.get(CANONICALIZE)
        canonical = self.config.canonicalize
        if asked is not None:
            from quire.chat.canonical import names

            canonical = names(asked, f"the header {CANONICALIZE}")
        return replace(served, agent=agent, canonical=canonical)

    def attach(self, model: Model, client: EngineClient, completer: Completer) -> None:
        """A model is loaded: from now on its requests are taken."""
        info = completer.info
        metrics = self.metrics.model(
            model.name,
            context=info.context,
            page_size=info.page_size,
            pages=info.pages,
            snapshot=client.stats,
            restarts=lambda: model.restarted,
            hangs=lambda: int(getattr(client, "hangs", 0)),
        )
        model.attach(client, completer, metrics)
        for job in self.jobs:
            job.start()

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
        for model in self.models:
            model.drain()
        for job in self.jobs:
            await job.stop()
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
            return True
        except TimeoutError:
            pass
        for one in [*self.running, *(answer for model in self.models for answer in model.running)]:
            one.fail(Unavailable("the server is shutting down and this answer was not finished in time"))
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
        if all(model.completer is None for model in self.models):
            self.state.unused()
        self.state.close()
