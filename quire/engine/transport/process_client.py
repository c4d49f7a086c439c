"""An engine in another process: spawned, spoken to over a private local socket (`child.py`), watched and restarted.

Used from one asyncio loop. When the engine dies every pending request raises EngineDead with how it died; requests that
come while it restarts get Unavailable; after too many deaths within a minute it stays dead and says why. One that hangs is
killed (`heartbeat.py`), which is a death like any other. Idle, next to nothing runs on either side: the socket's descriptor sits
in the loop, the engine sends statistics only when they change, and a few times a minute it is asked whether it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import msgspec
import zmq

from quire.config import EngineConfig
from quire.engine.transport import wire
from quire.engine.transport.child import Child
from quire.engine.transport.heartbeat import Heartbeat, Work, patience
from quire.engine.transport.pending import Pending
from quire.engine.transport.remote_adapters import RemoteAdapters
from quire.engine.transport.span_rows import SentRows
from quire.engine.types import AdapterInfo, EngineInfo, Event, Request, Stats, Vocabulary
from quire.observe.errors import BadRequest, EngineDead, QuireError, Unavailable
from quire.observe.steps import KEPT, StepInfo

RESTART_WINDOW = 60.0
BACKOFF = (0.1, 0.5, 2.0, 5.0, 10.0)  # seconds before the first, second, ... restart within the window
LAST_WORDS = 0.05  # for what a dead engine sent to come out of the socket
STOP_SECONDS = 5.0  # for an engine to end when told to
COUNTERS = (
    "steps",
    "prompt_tokens",
    "computed_prompt_tokens",
    "output_tokens",
    "prefix_queries",
    "prefix_hits",
    "loaded_tokens",
    "preemptions",
    "evictions",
    "drafted_tokens",
    "accepted_tokens",
)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class ProcessClient:
    """An EngineClient whose engine is a child process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        restarts: int = 5,
        hang_seconds: float = 60.0,  # silence after which it is killed; 0: never
        on_line: Callable[[str], None] = _to_stderr,
        on_progress: Callable[[int, int], None] | None = None,
        on_restart: Callable[[str], None] | None = None,
        builder: str = wire.BUILDER,
    ):
        loras = tuple((name, _text(os.path.abspath(path))) for name, path in config.loras)
        self._config = replace(config, path=_text(os.path.abspath(config.path)), loras=loras)
        self._restarts = restarts
        self._hang_seconds = hang_seconds
        self._on_line = on_line
        self._on_progress = on_progress
        self._on_restart = on_restart
        self._builder = builder
        self._pending = Pending(config.max_seqs + config.max_waiting)  # until the engine says how many it takes
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._child: Child | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque()
        self._info: EngineInfo | None = None
        self._vocabulary: Vocabulary | None = None  # what an engine that is started again must be told again
        self._adapters = RemoteAdapters(self._send, on_line)
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[list[StepInfo]]] = {}  # for the newest steps
        self._rows = SentRows(self._send)
        self._stats = Stats()
        self._past = Stats()  # the counters of engines that have died: a counter never goes down
        self._up = False
        self._closing = False
        self._gave_up = False
        self._hangs = 0
        self._heartbeat: Heartbeat | None = None
        self._failure: wire.Fatal | None = None  # what the engine said before it ended
        self._why = "the engine has not been started"  # ... when it is not up

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def alive(self) -> bool:
        return self._up and not self._closing

    @property
    def pid(self) -> int | None:
        """The engine's process, while there is one."""
        return self._child.pid if self._child else None

    @property
    def why(self) -> str:
        """Why it is not alive, in words; empty when it is."""
        return "" if self.alive else self._why

    @property
    def gave_up(self) -> bool:
        """Whether the engine died too often and is not started again; `why` says more."""
        return self._gave_up

    @property
    def hangs(self) -> int:
        """Times it was killed because it did not answer."""
        return self._hangs

    def stats(self) -> Stats:
        total = {name: getattr(self._stats, name) + getattr(self._past, name) for name in COUNTERS}
        return msgspec.structs.replace(self._stats, **total)

    async def steps(self, most: int = KEPT) -> list[StepInfo]:
        self._check_alive()
        ticket = next(self._tickets)
        self._send(wire.AskSteps(ticket=ticket, most=most))
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        try:
            return await answer
        finally:
            self._asked.pop(ticket, None)

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        if not request.spans:
            return self._pending.events(request, self._submit, self.abort)
        return self._with_rows(request)

    async def _with_rows(self, request: Request) -> AsyncGenerator[Event, None]:
        """The events of a request with spans, whose rows the engine keeps until its end."""
        sent = False

        def submit(own: Request) -> None:
            nonlocal sent
            self._check_alive()
            sent = True
            self._send(wire.Add(request=self._rows.submit(own)))

        try:
            async with contextlib.aclosing(self._pending.events(request, submit, self.abort)) as events:
                async for event in events:
                    yield event
        finally:
            if sent:
                with contextlib.suppress(Unavailable):  # it is just dying, and its rows with it
                    self._rows.left(request.id)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        if self._vocabulary is None:
            self._vocabulary = vocabulary
            if self._up:
                self._send(wire.SetVocabulary(vocabulary=vocabulary))

    @property
    def adapters(self) -> list[AdapterInfo]:
        return list(self._adapters.loaded.values())

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        self._check_alive()
        return await self._adapters.load(name, _text(path))

    async def unload_adapter(self, name: str) -> None:
        self._check_alive()
        await self._adapters.unload(name)

    def abort(self, request_id: str) -> None:
        if self._up:
            with contextlib.suppress(Unavailable):  # it is just dying, and the request with it
                self._send(wire.Abort(ids=[request_id]))

    async def start(self) -> EngineInfo:
        """Spawn, load and wait until ready. A model that cannot be loaded raises the engine's own error."""
        if self._watcher is not None:
            raise QuireError("this client was started already")
        self._context = zmq.Context(io_threads=1)
        self._why = "the engine is loading"
        try:
            await self._spawn()
            info = await self._until_ready()
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.create_task(self._watch())
        return info

    async def close(self, drain_seconds: float = 0.0) -> None:
        self._closing = True
        self._why = "the engine is shutting down"
        if self._up and len(self._pending):
            if drain_seconds > 0:
                await self._pending.drained(drain_seconds)
            if left := self._pending.ids():
                with contextlib.suppress(QuireError):
                    self._send(wire.Abort(ids=left))
                await self._pending.drained(1.0)
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
            self._watcher = None
        await self._stop_process()
        self._pending.fail(lambda: Unavailable("the engine was shut down"))
        self._adapters.failed(lambda: Unavailable("the engine was shut down"))
        self._unanswered("the engine was shut down")
        if self._context is not None:
            self._context.term()
            self._context = None
        self._why = "the engine was shut down"

    # The process.

    async def _spawn(self) -> None:
        """A new engine process."""
        if self._context is None:
            raise Unavailable(self._why)
        if self._info is not None:  # not the first: it begins with what the one before it still had
            self._config = replace(self._config, loras=self._adapters.unchanged(self._config.loras))
        self._failure = None
        self._ready = asyncio.get_running_loop().create_future()
        self._child = Child(self._hear, self._on_line)
        await self._child.spawn(self._context, self._config, self._builder)

    async def _until_ready(self) -> EngineInfo:
        """Ready or the reason why not."""
        ready, child = self._ready, self._child
        if ready is None or child is None:
            raise Unavailable(self._why)
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            child.drain()  # its last words may still be in the socket
            if not ready.done() and self._failure is None:
                await asyncio.sleep(LAST_WORDS)
                child.drain()
        finally:
            ended.cancel()
            child.unname()
        if not ready.done():
            if self._failure is not None:
                raise self._failure.error()
            raise EngineDead(f"the engine process {child.ending} while it was loading")
        self._info = ready.result()
        self._pending.limit = self._info.max_seqs + self._config.max_waiting
        self._up = True
        self._why = ""
        if self._vocabulary is not None:
            self._send(wire.SetVocabulary(vocabulary=self._vocabulary))
        self._adapters.started(self._info)
        return self._info

    async def _watch(self) -> None:
        """Wait for the engine to die; tell everybody; start it again while that makes sense."""
        while (child := self._child) is not None:
            reason = await self._until_hung(child)
            if reason is not None:
                self._hangs += 1
                self._down(reason)  # first: a process that cannot even be killed at once keeps nobody waiting
                child.kill()
                await child.wait()
            else:
                self._up = False
                self._why = reason = f"the engine process {child.ending}"
                await asyncio.sleep(LAST_WORDS)
                child.drain()
                if self._failure is not None:
                    reason += f": {self._failure.message}"
                self._down(reason)
            if not await self._restart(reason):
                return

    async def _until_hung(self, child: Child) -> str | None:
        """Wait for its end (None), or until it is to be killed for its silence (why)."""
        pid = child.pid
        if self._hang_seconds <= 0 or self._info is None or pid is None:
            await child.wait()
            return None
        longest = patience(self._info, self._hang_seconds)
        self._heartbeat = Heartbeat(self._hang_seconds, longest, self._ask, lambda: Work.of(pid))
        ended, lost = asyncio.create_task(child.wait()), asyncio.create_task(self._heartbeat.lost())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            return None if ended.done() else f"the engine process {lost.result()}: it hung and was killed"
        finally:
            self._heartbeat = None
            for task in (ended, lost):
                task.cancel()

    def _ask(self) -> None:
        with contextlib.suppress(Unavailable):  # it is just dying
            self._send(wire.Ping())

    def _down(self, reason: str) -> None:
        self._up = False
        self._why = f"{reason}; it is being restarted"
        self._past = self.stats()
        self._rows.lost()
        self._stats = Stats(pages_total=self._stats.pages_total, page_size=self._stats.page_size)
        if self._child is not None:
            self._child.hang_up()
        self._pending.fail(lambda: EngineDead(f"{reason} while it held this request", cure="send it again"))
        self._adapters.failed(lambda: EngineDead(f"{reason} while it changed its adapters", cure="try again"))
        self._unanswered(self._why)

    def _unanswered(self, why: str) -> None:
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(Unavailable(why))

    async def _restart(self, reason: str) -> bool:
        """Spawn until it is ready, or too many deaths have come together."""
        while True:
            now = time.monotonic()
            self._deaths.append(now)
            while self._deaths[0] < now - RESTART_WINDOW:
                self._deaths.popleft()
            if len(self._deaths) > self._restarts:
                self._why = f"{reason}; it died {len(self._deaths)} times within a minute and stays down"
                self._gave_up = True
                self._on_line(self._why)
                return False
            delay = BACKOFF[min(len(self._deaths), len(BACKOFF)) - 1]
            self._on_line(f"{reason}; restarting it in {delay:g} s")
            if self._on_restart is not None:
                self._on_restart(reason)
            await asyncio.sleep(delay)
            try:
                await self._spawn()
                await self._until_ready()
            except (QuireError, OSError) as e:  # OSError: no process, no folder; that may pass as well
                reason = str(e) if isinstance(e, QuireError) else f"the engine process cannot be started: {e}"
                await self._stop_process()
                self._adapters.failed(lambda reason=reason: EngineDead(reason))
                self._why = f"{reason}; it is being restarted"
            else:
                self._on_line("the engine is ready again")
                return True

    async def _stop_process(self) -> None:
        """Ask, then insist."""
        self._up = False
        if self._child is not None:
            listens = self._ready is not None and self._ready.done()  # before that there is nobody to ask
            await self._child.stop(STOP_SECONDS if listens else 0.0)
        self._child = None

    # Messages.

    def _check_alive(self) -> None:
        if not self.alive:
            stays = self._gave_up or self._closing
            raise Unavailable(self._why, cure="" if stays else "try again in a few seconds")

    def _submit(self, request: Request) -> None:
        self._check_alive()
        self._send(wire.Add(request=request))

    def _send(self, message: wire.ToEngine) -> None:
        if self._child is None or not self._child.connected:
            raise Unavailable(self._why)
        self._child.send(message)

    def _hear(self, message: wire.FromEngine) -> None:
        if self._heartbeat is not None:
            self._heartbeat.heard = True
        match message:
            case wire.Events(events):
                self._pending.deliver(events)
            case wire.StatsUpdate(stats):
                self._stats = stats
            case wire.Answer():
                self._adapters.answered(message)
            case wire.Steps(ticket, steps):
                asked = self._asked.get(ticket)
                if asked is not None and not asked.done():
                    asked.set_result(steps)
            case wire.Pong():
                pass  # that it came is all it says
            case wire.Progress(done, total):
                if self._on_progress is not None:
                    self._on_progress(done, total)
            case wire.Fatal():
                self._failure = message
            case wire.Ready(version, info):
                if self._ready is None or self._ready.done():
                    return
                if version == wire.VERSION:
                    self._ready.set_result(info)
                else:
                    text = f"the engine speaks version {version} of the protocol, this client {wire.VERSION}"
                    self._ready.set_exception(QuireError(text))


def _text(path: str) -> str:
    """A path that can go through JSON."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"the path {path!r} is not UTF-8: an engine process cannot be told it", param="path") from None
    return path
