"""An engine in another process: spawned, spoken to over a private local socket, watched and restarted.

Used from one asyncio loop. When the engine dies every pending request raises EngineDead with how it died; requests that
come while it restarts get Unavailable; after too many deaths within a minute it stays dead and says why. One that hangs is
killed (`pulse.py`), which is a death like any other. Idle, next to nothing runs on either side: the socket's descriptor sits
in the loop, the engine sends statistics only when they change, and a few times a minute it is asked whether it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

import quire
from quire.config import EngineConfig
from quire.engine import wire
from quire.engine.pending import Pending
from quire.engine.pulse import Pulse, Work, patience
from quire.engine.remote_adapters import RemoteAdapters
from quire.engine.types import AdapterInfo, EngineInfo, Event, Request, Stats, Vocabulary
from quire.observe.errors import BadRequest, EngineDead, QuireError, Unavailable

ROOT = str(Path(quire.__file__).resolve().parent.parent)
# Our own package first in the child, and the working directory not on its path at all (-P).
CHILD = (
    "import sys; root = sys.argv.pop(); root in sys.path or sys.path.insert(0, root); "
    "from quire.engine.process_main import main; sys.exit(main())"
)
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
        self._socket: zmq.Socket[bytes] | None = None
        self._directory: str | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._relay: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque()
        self._info: EngineInfo | None = None
        self._vocabulary: Vocabulary | None = None  # what an engine that is started again must be told again
        self._adapters = RemoteAdapters(self._send, on_line)
        self._stats = Stats()
        self._past = Stats()  # the counters of engines that have died: a counter never goes down
        self._up = False
        self._closing = False
        self._gave_up = False
        self._hangs = 0
        self._pulse: Pulse | None = None
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
        return self._process.pid if self._process else None

    @property
    def why(self) -> str:
        """Why it is not alive, in words; empty when it is."""
        return "" if self.alive else self._why

    @property
    def gave_up(self) -> bool:
        """It died too often and is not started again; `why` says more."""
        return self._gave_up

    @property
    def hangs(self) -> int:
        """Times it was killed because it did not answer."""
        return self._hangs

    def stats(self) -> Stats:
        total = {name: getattr(self._stats, name) + getattr(self._past, name) for name in COUNTERS}
        return msgspec.structs.replace(self._stats, **total)

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        return self._pending.events(request, self._submit, self.abort)

    def teach(self, vocabulary: Vocabulary) -> None:
        if self._vocabulary is None:
            self._vocabulary = vocabulary
            if self._up:
                self._send(wire.Teach(vocabulary=vocabulary))

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
        if self._context is not None:
            self._context.term()
            self._context = None
        self._why = "the engine was shut down"

    # The process.

    async def _spawn(self) -> None:
        """A new socket, a new child, and its configuration on its standard input."""
        if self._context is None:
            raise Unavailable(self._why)
        if self._info is not None:  # not the first: it begins with what the one before it still had
            self._config = replace(self._config, loras=self._adapters.still(self._config.loras))
        loop = asyncio.get_running_loop()
        self._directory = tempfile.mkdtemp(prefix="quire-")  # 0700
        address = f"ipc://{self._directory}/{secrets.token_hex(8)}"
        boot = wire.Boot(
            version=wire.VERSION,
            config=self._config,
            address=address,
            parent=os.getpid(),
            builder=self._builder,
            bound_to_thread=threading.current_thread() is threading.main_thread(),
        )
        line = msgspec.json.encode(boot) + b"\n"
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, wire.MAX_MESSAGE),
        ):
            socket.setsockopt(option, value)
        try:
            socket.bind(address)
        except zmq.ZMQError as e:
            socket.close()
            raise QuireError(f"cannot open the engine's socket {address}: {e}", cure="is TMPDIR too long?") from e
        self._socket = socket
        self._failure = None
        self._ready = loop.create_future()
        loop.add_reader(_descriptor(socket), self._drain)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", CHILD, ROOT),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to answer
        )
        stdin = self._process.stdin
        if stdin is not None:  # stays open: its closing is how the child learns of our death
            stdin.write(line)
        self._relay = asyncio.create_task(self._relay_stderr(self._process))

    async def _until_ready(self) -> EngineInfo:
        """Ready or the reason why not."""
        ready, process = self._ready, self._process
        if ready is None or process is None:
            raise Unavailable(self._why)
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            self._drain()  # its last words may still be in the socket
            if not ready.done() and self._failure is None:
                await asyncio.sleep(LAST_WORDS)
                self._drain()
        finally:
            ended.cancel()
            self._remove_directory()
        if not ready.done():
            if self._failure is not None:
                raise self._failure.error()
            raise EngineDead(f"the engine process {_ending(process.returncode)} while it was loading")
        self._info = ready.result()
        self._pending.limit = self._info.max_seqs + self._config.max_waiting
        self._up = True
        self._why = ""
        if self._vocabulary is not None:
            self._send(wire.Teach(vocabulary=self._vocabulary))
        self._adapters.started(self._info)
        return self._info

    def _remove_directory(self) -> None:
        """Once both ends are connected the socket needs no name, and nothing is left behind however we end."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    async def _watch(self) -> None:
        """Wait for the engine to die; tell everybody; start it again while that makes sense."""
        while self._process is not None:
            reason = await self._until_hung(self._process)
            if reason is not None:
                self._hangs += 1
                self._down(reason)  # first: a process that cannot even be killed at once keeps nobody waiting
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            else:
                self._up = False
                self._why = reason = f"the engine process {_ending(self._process.returncode)}"
                await asyncio.sleep(LAST_WORDS)
                self._drain()
                if self._failure is not None:
                    reason += f": {self._failure.message}"
                self._down(reason)
            if not await self._restart(reason):
                return

    async def _until_hung(self, process: asyncio.subprocess.Process) -> str | None:
        """Wait for its end (None), or until it is to be killed for its silence (why)."""
        if self._hang_seconds <= 0 or self._info is None:
            await process.wait()
            return None
        longest = patience(self._info, self._hang_seconds)
        self._pulse = Pulse(self._hang_seconds, longest, self._ask, lambda: Work.of(process.pid))
        ended, lost = asyncio.create_task(process.wait()), asyncio.create_task(self._pulse.lost())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            return None if ended.done() else f"the engine process {lost.result()}: it hung and was killed"
        finally:
            self._pulse = None
            for task in (ended, lost):
                task.cancel()

    def _ask(self) -> None:
        with contextlib.suppress(Unavailable):  # it is just dying
            self._send(wire.Ping())

    def _down(self, reason: str) -> None:
        self._up = False
        self._why = f"{reason}; it is being restarted"
        self._past = self.stats()
        self._stats = Stats(pages_total=self._stats.pages_total, page_size=self._stats.page_size)
        self._close_socket()
        self._pending.fail(lambda: EngineDead(f"{reason} while it held this request", cure="send it again"))
        self._adapters.failed(lambda: EngineDead(f"{reason} while it changed its adapters", cure="try again"))

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
        process = self._process
        self._up = False
        self._remove_directory()
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(QuireError):
                    self._send(wire.Shutdown())
                try:
                    # Not yet ready: it does not listen, so there is nobody to ask.
                    wait = STOP_SECONDS if self._ready is not None and self._ready.done() else 0.0
                    await asyncio.wait_for(process.wait(), wait)
                except TimeoutError:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
            if process.stdin is not None:
                process.stdin.close()
            if self._relay is not None:
                await self._relay
        self._process = None
        self._close_socket()

    async def _relay_stderr(self, process: asyncio.subprocess.Process) -> None:
        """Whatever the engine prints is somebody's clue: pass it on, marked."""
        stream = process.stderr
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the stream's limit: it was dropped
                line = b"(a very long line)\n"
            if not line:
                return
            self._on_line("engine: " + line.decode(errors="replace").rstrip("\n"))

    # The socket.

    def _close_socket(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(_descriptor(self._socket))
            self._socket.close()
            self._socket = None

    def _check_alive(self) -> None:
        if not self.alive:
            stays = self._gave_up or self._closing
            raise Unavailable(self._why, cure="" if stays else "try again in a few seconds")

    def _submit(self, request: Request) -> None:
        self._check_alive()
        self._send(wire.Add(request=request))

    def _send(self, message: wire.ToEngine) -> None:
        socket = self._socket
        if socket is None:
            raise Unavailable(self._why)
        data = wire.encode(message)
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # no peer: it has just died, or has not connected yet
            raise Unavailable("the engine process does not answer", cure="try again in a few seconds") from None
        # The descriptor is edge-triggered, and sending may have eaten the edge of something that came in.
        asyncio.get_running_loop().call_soon(self._drain)

    def _drain(self) -> None:
        """Take in everything that is there."""
        while self._socket is not None:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._pulse is not None:
                self._pulse.heard()
            try:
                message = wire.decode_from_engine(data)
            except msgspec.DecodeError as e:  # not our engine, or not in its right mind
                self._failure = wire.Fatal(kind="EngineDead", message=f"it sent a message that cannot be read: {e}")
                if self._process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        self._process.kill()
                return
            self._handle(message)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Events(events):
                self._pending.deliver(events)
            case wire.StatsUpdate(stats):
                self._stats = stats
            case wire.Answer():
                self._adapters.answered(message)
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


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "stopped answering"
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"
    return f"ended with status {status}"
