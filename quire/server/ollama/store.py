"""Ollama's routes over the model store: pull with progress, delete, copy; push is refused by name. Making one is `create.py`.

They change this machine, so they answer on loopback, or to who has the key, and to nobody else. Names come over the network: a path or
an address is never taken. A pull runs in a thread that a stuck network cannot make the process wait for; it ends when its client goes,
and what came so far is kept for the next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.observe.errors import BadRequest, Busy, NotFound, QuireError
from quire.server import errors
from quire.server.callers import Caller, caller_of
from quire.server.errors import ClientGone, Unimplemented
from quire.server.middleware import is_loopback
from quire.server.ollama import adapters, requests
from quire.server.ollama.names import Names
from quire.server.replies import HEADERS, LineStream, line, reply
from quire.server.served import bare_name, canonical
from quire.server.server import Server
from quire.server.shared.compat import Absent, Endpoint, Fields
from quire.server.threads import in_thread
from quire.weights import names as written
from quire.weights.store.store import Store

MAX_PULLS = 4  # at a time
TELL_SECONDS = 0.1  # between two lines of progress


class PullRequest(msgspec.Struct, kw_only=True):
    """`name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class DeleteRequest(msgspec.Struct, kw_only=True):
    """`name` is the older word for `model`."""

    model: str | None = None
    name: str | None = None


class CopyRequest(msgspec.Struct, kw_only=True):
    """A second name for a model."""

    source: str
    destination: str


class ReadOnly(QuireError):
    """The store may not be changed from there."""

    code = "forbidden"
    status = 403


class Gone(Exception):
    """Nobody waits for this pull any more."""


def register(app: FastAPI, names: Names) -> None:
    """Add the routes."""
    running: set[Pulling] = set()

    async def pull(request: Request) -> Response:
        asked = requests.parse(await requests.read(request), PullRequest, neutral={"insecure": (None, False)})
        store = writable(names.server, caller_of(request.scope))
        name = model_name(asked.model or asked.name)
        _check_source(name)
        wanted = store.look_up(name)
        if len(running) >= MAX_PULLS:
            raise Busy(f"{MAX_PULLS} pulls are under way: that is the most at a time", retry_after=30.0)
        pulling = Pulling(names.server, wanted.name, wanted.sha256, running.discard)
        running.add(pulling)
        pulling.begin(store)
        if asked.stream is None or asked.stream:
            return PullStream(pulling)
        async for _ in pulling.watched(request.receive):
            pass
        return reply({"status": "success"})

    async def delete(request: Request) -> Response:
        asked = requests.parse(await requests.read(request), DeleteRequest)
        store = writable(names.server, caller_of(request.scope))
        given = model_name(asked.model or asked.name)
        name = canonical(given)
        if (model := names.get(given) or names.loaded_from(name)) is not None:
            called = "" if model.name == name else f", as {model.name}"
            raise BadRequest(f"{name[:128]} is being served{called}", cure="stop its server first", param="model")
        if await in_thread(lambda: store.get(name)) is None:
            raise NotFound(f"model {given[:128]!r} is not here", cure="GET /api/tags lists what is", param="model")
        await in_thread(lambda: store.remove(name))
        await adapters.settle(names, name)
        return Response()

    async def copy(request: Request) -> Response:
        asked = requests.parse(await requests.read(request), CopyRequest)
        store = writable(names.server, caller_of(request.scope))
        source, name = canonical(model_name(asked.source)), bare_name(model_name(asked.destination))
        made = await in_thread(lambda: store.copy(source, name))
        await adapters.settle(names, made.name)  # what it has to tell, an answer without a body cannot
        return Response()

    async def push(request: Request) -> Response:
        raise Unimplemented("push is not supported: there is no registry to push to")

    app.add_api_route("/api/pull", pull, methods=["POST"], response_model=None)
    app.add_api_route("/api/delete", delete, methods=["DELETE"], response_model=None)
    app.add_api_route("/api/copy", copy, methods=["POST"], response_model=None)
    app.add_api_route("/api/push", push, methods=["POST"], response_model=None)


def writable(server: Server, caller: Caller) -> Store:
    """The store, for who may change it."""
    if server.store is None:
        raise Unimplemented("this server was started without a model store")
    caller.check_administers("changing the models of this machine")
    if not is_loopback(server.config.host) and not server.config.api_key:
        raise ReadOnly(
            "models are not pulled, copied or deleted from other machines without a key",
            cure="start the server with QUIRE_API_KEY, or use `quire pull` and `quire rm` there",
        )
    return server.store


def model_name(name: str | None) -> str:
    """The name in a request, without Ollama's `:latest`."""
    if not name:
        raise BadRequest("model is missing", param="model")
    return bare_name(name)


def _check_source(name: str) -> None:
    """No path, and no address of the client's choosing: what this machine can reach is not theirs to ask."""
    parsed = written.parse(name)
    if isinstance(parsed, written.Reference) and parsed.scheme in ("file", "url"):
        raise BadRequest(
            "models are asked for by name here, not by path or address",
            cure="a short name (smollm2:135m), hf:org/repo, pypi:… or npm:…; `quire pull` takes the others",
            param="model",
        )


class Pulling:
    """One pull: the store's Progress in its thread, lines of status in the loop's."""

    def __init__(self, server: Server, name: str, sha256: str | None, ended: Callable[[Pulling], None]):
        self.server = server
        self.name = name
        self.digest = {"digest": f"sha256:{sha256}"} if sha256 else {}
        self.gone = threading.Event()
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._lines: list[dict[str, Any]] = [{"status": f"pulling {name}"}]
        self._news = asyncio.Event()
        self._done = False
        self._failure: BaseException | None = None
        # In the thread
        self._label, self._total, self._here, self._told = name, None, 0, 0.0

    def begin(self, store: Store) -> None:
        """Start the thread."""

        def body() -> None:
            failure: BaseException | None = None
            try:
                store.pull(self.name, self)
            except BaseException as e:
                failure = e
            self._post(self._finished, failure)

        threading.Thread(target=body, daemon=True, name="pull").start()

    # Progress, in the thread

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        self._check()
        self._label, self._total, self._here = label, total, done
        self._tell()

    def advance(self, n: int) -> None:
        self._check()
        self._here += n
        if time.monotonic() - self._told >= TELL_SECONDS:
            self._tell()

    def finish(self) -> None:
        if self._total is not None and not self.gone.is_set():
            self._tell()

    def note(self, text: str) -> None:
        self._post(self._line, {"status": errors.clean(text, f"{self.name} is on this machine")})

    def _check(self) -> None:
        if self.gone.is_set():
            raise Gone

    def _tell(self) -> None:
        self._told = time.monotonic()
        total = {} if self._total is None else {"total": self._total}
        body = {"status": f"pulling {self._label}", **self.digest, **total, "completed": self._here}
        self._post(self._line, body)

    def _post(self, call: Callable[..., None], *values: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, *values)

    # In the loop

    def _line(self, body: dict[str, Any]) -> None:
        self._lines.append(body)
        self._news.set()

    def _finished(self, failure: BaseException | None) -> None:
        self._ended(self)
        self._done = True
        if self._failure is None:
            self._failure = failure
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """End the answer with `error`; the thread ends when it next says something."""
        self.gone.set()
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def watched(self, receive: Receive) -> AsyncIterator[list[dict[str, Any]]]:
        """Batches of lines, until the end; raises what ended it early, and a client's departure."""
        watch = asyncio.create_task(self._watch(receive))
        self.server.running.add(self)
        try:
            while True:
                lines, self._lines = self._lines, []
                if lines:
                    yield lines
                    continue
                if self._failure is not None:
                    raise self._failure
                if self._done:
                    return
                self._news.clear()
                await self._news.wait()
        finally:
            self.gone.set()
            self.server.running.discard(self)
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())


class PullStream(Response):
    """The lines of a pull. Trouble is a line `{"error": …}`: the status has left long before."""

    media_type = LineStream.media_type

    def __init__(self, pulling: Pulling):
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self.pulling = pulling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        last = line({"status": "success"})
        try:
            async for lines in self.pulling.watched(receive):
                await write(b"".join(map(line, lines)))
        except ClientGone:
            last = b""
        except Exception as error:
            if not isinstance(error, QuireError):
                errors.log.error("unexpected %s in a pull", type(error).__name__, exc_info=error)
                error = QuireError("the server failed on this request; its log has the cause")
            last = line(errors.shaped(scope["path"], error)[1])
        await write(last, more=False)


_NAME = {"name": "the older word for `model`", "stream": "true by default"}
COMPAT = (
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/pull",
        what="Lines of progress; ends when its client goes, and what came is kept for the next pull.",
        fields=(Fields(shape=PullRequest, neutral={"insecure": (None, False)}, notes=_NAME),),
        example={"model": "none-such"},
        surface="model insecure stream",
        task="store",
    ),
    Endpoint(
        dialect="Ollama",
        method="DELETE",
        path="/api/delete",
        what="Of models in the store; one that is being served is not deleted.",
        fields=(Fields(shape=DeleteRequest, notes=_NAME),),
        example={"model": "none-such"},
        surface="model",
        task="store",
    ),
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/copy",
        what="A second name for what is here.",
        fields=(Fields(shape=CopyRequest),),
        example={"source": "none-such", "destination": "mine"},
        surface="source destination",
        task="store",
    ),
)
ABSENT = (Absent("Ollama", "/api/push", "there is no registry to push to", 501),)
