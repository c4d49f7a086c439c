"""The life of a server process: bind, answer probes while models load, serve, drain, stop.

    bind -> run file -> uvicorn answers -> models load -> ready ... SIGTERM -> drain -> engines closed -> exit 0

Owns sockets, signals and the run file. The port is taken before anything is loaded, so a busy port fails at once. A
second signal stops without waiting. Nothing here polls: one timer a second refreshes the Date header, no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import uvicorn

from quire.config import VERSION, ServerConfig
from quire.engine.transport.client import EngineClient
from quire.observe.errors import QuireError
from quire.server import connections
from quire.server.app import create_app
from quire.server.served import Model
from quire.server.server import Server

if TYPE_CHECKING:
    from quire.chat.completer import Completer

log = logging.getLogger("quire.server")

KEEP_ALIVE = 65  # seconds an idle connection stays open: longer than the clients' pools keep theirs
BACKLOG = 1024
# How a model is opened: loads it and returns what serves it. Progress goes to the model's `note`.
Opener: TypeAlias = Callable[[Server, Model], Awaitable[tuple[EngineClient, "Completer"]]]


class PortTaken(QuireError):
    """The address cannot be bound."""

    code = "port_taken"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, or a clear refusal before any model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as e:
        raise PortTaken(
            f"cannot listen on {host}: {e}", cure="--host takes a name or address of this machine"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)  # now, not later: two sockets may be bound to one port until one of them listens
    except OSError as e:
        sock.close()
        if e.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is in use", cure="`quire ps` lists servers; --port takes another, 0 a free one"
            ) from None
        raise PortTaken(
            f"cannot listen on {host} port {port}: {e.strerror}",
            cure="--host takes an address of this machine, --port one of 1024 and more unless you are root",
        ) from None
    sock.setblocking(False)
    return sock


def url_of(sock: socket.socket) -> str:
    """How a client on this machine reaches the socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def run_file(home: Path, sock: socket.socket, *models: str) -> Generator[Path, None, None]:
    """`<home>/run/<pid>.json` for as long as the server runs; `quire ps` reads it."""
    host, port = sock.getsockname()[:2]
    folder = home / "run"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{os.getpid()}.json"
    note = {
        "pid": os.getpid(),
        "host": host,
        "port": port,
        "url": url_of(sock),
        "model": models[0],
        "models": models,
        "started": time.time(),
        "version": VERSION,
    }
    partial = path.with_suffix(".tmp")
    partial.write_bytes(msgspec.json.encode(note))
    partial.chmod(0o600)
    partial.replace(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers and without its ten wakeups a second."""

    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def main_loop(self) -> None:
        while not self.stop.is_set():
            self.server_state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stop.wait()


async def serve(
    config: ServerConfig,
    sock: socket.socket,
    server: Server,
    opener: Opener,
    *,
    on_ready: Callable[[Model], None] = lambda model: None,
) -> int:
    """Run until a signal says stop. The exit code: 0 after a drain, 128 + signal when a second one cut it short.

    Models load one after the other, and each takes requests as soon as it is loaded. Raises the error that kept one from loading.
    """
    http = _Http(
        uvicorn.Config(
            create_app(config, server),
            http=connections.protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,
        )
    )
    async with _signals() as signals:
        answering = asyncio.create_task(http.serve(sockets=[sock]))
        loading = asyncio.create_task(_load(server, opener, on_ready))
        code = 0
        try:
            first = asyncio.create_task(signals.get())
            await asyncio.wait({first, loading, answering}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done() and not first.done():
                loading.result()
                await asyncio.wait({first, answering}, return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            if answering.done():  # nobody asked it to end
                answering.result()
                raise QuireError("the HTTP server ended by itself; its log has the cause")
            code = await _drain(server, config.drain_seconds, signals)
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            if code:  # cut short: whatever still runs is dropped
                http.force_exit = True
            http.stop.set()
            http.should_exit = True
            await asyncio.gather(answering, return_exceptions=True)
            for job in server.jobs:
                await job.stop()
            clients = [model.client for model in server.models if model.client is not None]
            await asyncio.gather(*(client.close(0.0) for client in clients))
            server.close()
        return code


async def _load(server: Server, opener: Opener, on_ready: Callable[[Model], None]) -> None:
    for model in server.models:
        client, completer = await opener(server, model)
        server.attach(model, client, completer)
        _settle()
        on_ready(model)


def _settle() -> None:
    """Exempt what was made while loading from garbage collection (a tokenizer is hundreds of thousands of objects), and collect
    less often than after every few hundred tokens."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _drain(server: Server, seconds: float, signals: asyncio.Queue[int]) -> int:
    """Let running requests end. 0, or 128 + signal when another signal came meanwhile."""
    if server.in_flight:
        log.info("draining %d request(s), up to %g s; another signal stops at once", server.in_flight, seconds)
    draining = asyncio.create_task(server.drain(seconds))
    second = asyncio.create_task(signals.get())
    try:
        await asyncio.wait({draining, second}, return_when=asyncio.FIRST_COMPLETED)
        return 128 + second.result() if second.done() and not draining.done() else 0
    finally:
        for task in (draining, second):
            task.cancel()
        await asyncio.gather(draining, second, return_exceptions=True)


@contextlib.asynccontextmanager
async def _signals() -> AsyncIterator[asyncio.Queue[int]]:
    """SIGTERM and SIGINT as a queue."""
    queue: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)
    for number in caught:
        loop.add_signal_handler(number, queue.put_nowait, int(number))
    try:
        yield queue
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
