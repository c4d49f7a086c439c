"""The models that a server has, and how a request gets the one it asks for.

    Models (the registry) -> Model (one engine and its state) -> Served (a model as one request gets it)

`Models.resolve` is the only way from a name in a request to a model. What the request chose (an adapter, a template of its own, who asks)
is in the `Served` that it gets and travels as an argument. Loading and unloading belong to the owner of a model (loading.py); this file
never does either. It knows the engine by its client's protocol, and no dialect.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import msgspec

from quire.config import VERSION
from quire.engine.transport.client import AdapterClient, EngineClient
from quire.engine.types import AdapterInfo, EngineInfo
from quire.observe.errors import BadRequest, NotFound, QuireError, Unavailable
from quire.observe.metrics import ModelMetrics
from quire.server.callers import NOBODY, Caller
from quire.server.reading import STRICT, Reading
from quire.weights.store.catalogue import look_up

if TYPE_CHECKING:
    from quire.chat.completer import Completer
    from quire.chat.embedder import Embedder
    from quire.chat.prefixes.finder import Finder
    from quire.chat.templates.template import ChatTemplate
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.chat.types import Generation

MAX_NAME = 512  # characters of a name that is looked for
WATCHED = 512  # tokens of a prompt from which on it is worth knowing why it was not in the prefix cache


class Running(Protocol):
    """An answer on its way, as far as a shutdown cares."""

    def fail(self, error: BaseException) -> None: ...


class Progress:
    """How far a model's loading is, by a clock: what is left of it goes by the part that is done, or by how long it took before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began: float | None = None
        self._took: float | None = None  # seconds of the last load that came to its end
        self._done = 0.0  # the part of it

    def begin(self) -> None:
        """Loading starts, perhaps again."""
        self._began, self._done = self._clock(), 0.0

    def note(self, done: int, total: int) -> None:
        """Note how many bytes of all are read."""
        self._done = min(1.0, done / total) if total > 0 else 0.0

    def end(self) -> None:
        """The model is loaded."""
        if self._began is not None:
            self._took, self._began = self._clock() - self._began, None

    def left(self) -> float | None:
        """Seconds that are left, at least one; None: nobody can say."""
        spent = 0.0 if self._began is None else self._clock() - self._began
        if self._took is not None:
            return max(1.0, self._took - spent)
        if self._began is None:
            return None
        return max(1.0, spent * (1 - self._done) / self._done) if self._done else 1.0


class Model:
    """One model of a server, from before it is loaded. Stages: loading -> ready <-> restarting -> failed, and draining at the end."""

    def __init__(self, names: str | Sequence[str], *, source: str = "", expected: Iterable[str] = ()):
        self.names: tuple[str, ...] = (names,) if isinstance(names, str) else tuple(names)  # answers have the first
        self.source = source  # what the model store calls it; empty for a file outside of the store
        self.created = int(time.time())
        self.client: EngineClient | None = None
        self.completer: Completer | None = None
        self.metrics: ModelMetrics | None = None
        self.finder: Finder | None = None  # of what breaks prefixes, once a long prompt came
        self.fingerprint = ""
        self.note = "starting"  # what loading is busy with
        self.loading = Progress()
        self.path: str | None = None  # the model's file or folder, once it is known
        self.expected = frozenset(expected)  # adapters that will be there once the model is loaded
        self.private: set[str] = set()  # adapters that requests may name only where a dialect says so
        self.restarted = 0  # times the engine process was started again
        self.draining = False
        self.running: set[Running] = set()  # its answers on their way
        self._settled = asyncio.Event()  # loaded, or never to be

    @property
    def name(self) -> str:
        """What answers call the model."""
        return self.names[0]

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
    def retry_after(self) -> float | None:
        """Seconds until it is worth asking again; None: nobody can say."""
        return self.loading.left() if self.stage in ("loading", "restarting") else None

    @property
    def info(self) -> EngineInfo:
        """The engine's decisions; only once loaded."""
        if self.completer is None:
            wait = "wait until GET /ready answers 200"
            raise Unavailable(f"the model is {self.stage}", retry_after=self.retry_after, cure=wait)
        return self.completer.info

    def attach(self, client: EngineClient, completer: Completer, metrics: ModelMetrics) -> None:
        """The model is loaded: from now on requests are taken."""
        self.fingerprint = fingerprint(completer.info)
        self.metrics = metrics
        self.client = client
        self.completer = completer
        self.loading.end()
        self._settled.set()

    def drain(self) -> None:
        """No new request is taken, and none waits for the model any more."""
        self.draining = True
        self._settled.set()

    async def settled(self) -> None:
        """Wait for the first load to end, for clients that expect a request to wait for it. Says nothing of what came."""
        await self._settled.wait()

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
            raise Unavailable(what[stage], retry_after=self.retry_after, cure=again)
        return self.completer

    @property
    def loaded_adapters(self) -> dict[str, AdapterInfo]:
        """Every adapter that the engine has, by name."""
        client = self.client
        return {own.name: own for own in client.adapters} if isinstance(client, AdapterClient) else {}

    @property
    def adapters(self) -> dict[str, AdapterInfo]:
        """The adapters that any request may name as its model, by name."""
        return {name: own for name, own in self.loaded_adapters.items() if name not in self.private}

    def has_adapter(self, name: str) -> bool:
        """Whether requests may name that adapter; while the model loads, whether they will."""
        return name in (self.adapters if self.client is not None else self.expected)

    def served(self, adapter: str = "", caller: Caller = NOBODY, reading: Reading = STRICT) -> Served:
        """What a request for it is answered by; 503 while it cannot be."""
        return Served(self, self.ready(), adapter or self.name, adapter, caller, reading)


@dataclass(frozen=True, slots=True)
class Served:
    """What one request is answered by: a model, how the request called it, who asks, and how its body is read."""

    model: Model
    completer: Completer  # the model's own, or one with the template that the request's name has
    name: str  # what the answer calls it: the model's name, or the adapter's
    adapter: str = ""  # empty: the model as it is
    caller: Caller = field(default=NOBODY)
    reading: Reading = STRICT  # how the request's body is read
    agent: str = ""  # the User-Agent header
    canonical: tuple[str, ...] = ()  # what of a conversation is rewritten before it becomes a prompt

    @property
    def tokenizer(self) -> Tokenizer:
        return self.completer.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        return self.completer.template

    @property
    def client(self) -> EngineClient:
        return self.completer.client

    @property
    def info(self) -> EngineInfo:
        """The engine's decisions: context, vocabulary, sizes."""
        return self.completer.info

    @property
    def metrics(self) -> ModelMetrics | None:
        return self.model.metrics

    def generates(self) -> None:
        """Refuse a request for text where the model makes none."""
        task = self.info.task
        if task == "generate":
            return
        does, where = ("embeds texts", "/v1/embeddings") if task == "embed" else ("scores pairs of texts", "/v1/rerank")
        raise BadRequest(
            f"{self.model.name} {does}: it cannot generate text",
            cure=f"POST {where}",
            param="model",
            code="unsupported_task",
        )

    def embedder(self) -> Embedder:
        """What embeds and scores here; it refuses what the model does not do."""
        from quire.chat.embedder import Embedder

        info = msgspec.structs.replace(self.info, model=self.model.name)  # a client knows it by this name
        caller = self.caller
        return Embedder(
            self.client, self.tokenizer, info, caller.priority(), namespace=caller.namespace(""), adapter=self.adapter
        )

    def placed(self, generation: Generation) -> Generation:
        """The generation with its adapter, behind whom it stands, and whose prefixes it may find."""
        if self.caller is NOBODY and self.adapter == generation.adapter:
            return generation  # as nearly all are: nothing of it changes
        priority = self.caller.priority(generation.priority)
        namespace = self.caller.namespace(generation.namespace)
        return replace(generation, priority=priority, namespace=namespace, adapter=self.adapter)


class Models:
    """The models of one server, in the order they were named. Names are the same in every dialect.

    With `any_name` a name that means nothing means the first model: for clients that send one name whatever they speak to.
    """

    def __init__(self, models: Iterable[Model], *, any_name: bool = False):
        self._any_name = any_name
        self._models: list[Model] = []
        for model in models:
            self.add(model)

    def add(self, model: Model) -> None:
        """Add a model. A name means one model."""
        for name in model.names:
            if any(name in other.names for other in self._models):
                raise BadRequest(f"two models are called {name!r}", cure="give one of them another name", param="model")
        self._models.append(model)

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    @property
    def first(self) -> Model:
        """The one that answers where a dialect has no field for a model's name."""
        return self._models[0]

    @property
    def instead(self) -> Model | None:
        """The model that answers where a name means nothing; None: such a request is refused."""
        return self.first if self._any_name else None

    @property
    def names(self) -> str:
        """The names of what is served, for people."""
        return ", ".join(model.name for model in self._models)

    def get(self, name: str) -> Model | None:
        """The model that has this name; adapters are not looked at."""
        return next((m for form in forms(name) for m in self._models if form in m.names), None)

    def find(self, name: str) -> tuple[Model, str] | None:
        """The model, and the adapter of it (or an empty name), that a request means by `name`."""
        for form in forms(name):
            for model in self._models:
                if form in model.names:
                    return model, ""
            for model in self._models:
                if model.has_adapter(form):
                    return model, form
        return None

    def choose(self, name: str | None, *, first: bool = False) -> tuple[Model, str]:
        """What `find` gives, and for no name the only model, or the `first` of several. 404 for a name that means nothing, 400
        where one is needed."""
        if name is None:
            if len(self._models) == 1 or first:
                return self.first, ""
            raise BadRequest(
                "model is missing: this server has several",
                cure=f"send one of {self.names}",
                param="model",
                code="model_required",
            )
        found = self.find(name)
        if found is None and self.instead is not None:
            return self.instead, ""
        if found is None:
            raise NotFound(
                "that model is not served here",
                cure="GET /v1/models lists what is",
                param="model",
                code="model_not_found",
            )
        return found

    async def resolve(
        self, name: str | None, caller: Caller = NOBODY, *, first: bool = False, reading: Reading = STRICT
    ) -> Served:
        """What a request is answered by. 404 and 400 as `choose` has them, 503 while the model cannot answer."""
        model, adapter = self.choose(name, first=first)
        return model.served(adapter, caller, reading)


def forms(name: str) -> Iterator[str]:
    """What a name in a request may mean: itself, itself without the tag `latest`, and what the catalogue calls it (smollm2 is smollm2:135m)."""
    yield name
    if len(name) > MAX_NAME:
        return
    bare = bare_name(name)
    if bare != name:
        yield bare
    full = canonical(bare)
    if full != bare:
        yield full


def bare_name(name: str) -> str:
    """A name without the tag that stands for no tag."""
    return name.strip().removesuffix(":latest")


def canonical(name: str) -> str:
    """A name as `quire run` understands it: smollm2 is smollm2:135m."""
    try:
        return look_up(bare_name(name)).name
    except QuireError:
        return bare_name(name)


def fingerprint(info: EngineInfo) -> str:
    """Changes when the tokens might: another version, model or kernel set. The number of threads is not part of it."""
    backend = re.sub(r",?\s*\d+ threads?", "", info.backend)
    parts = (VERSION, info.model, info.architecture, info.vocab_size, info.weight_bytes, backend)
    return "fp_" + hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:12]
