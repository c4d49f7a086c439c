"""A streaming completions client that counts, and servers to point it at: started, asked, stopped.

One small asyncio client for every server, so that none of them is measured through another's. A reply that has fewer
tokens than were asked for is an error, not a fast answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvloop

from benchmarks.record import ROOT

START_SECONDS = 120.0


@dataclass(slots=True)
class Load:
    """What is asked of a server."""

    shared: str  # the text that every prompt begins with
    requests: int = 32
    output: int = 128
    concurrency: int = 8


@dataclass(slots=True)
class Answer:
    """One round of all requests."""

    tokens_per_second: float
    first: list[float]  # seconds to the first token, one per request

    def at(self, share: float) -> float:
        ordered = sorted(self.first)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def server(command: list[str], port: int, health: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """A server that is ready, for as long as the block runs."""
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(f"http://127.0.0.1:{port}{health}", process)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args} ended with {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server at {url} was not ready in {START_SECONDS:.0f} s")


class _Reply(asyncio.Protocol):
    """What a server sends until it hangs up. Kept as it comes, and read when all is over: a client's work would take the
    cores of a server that uses all there are."""

    def __init__(self, request: bytes):
        self.begun = time.perf_counter()
        self.first: float | None = None  # seconds until an event with a choice
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._came = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._came += data
        if self.first is None and any(news.get("choices") for news in self._events()):
            self.first = time.perf_counter() - self.begun

    def connection_lost(self, exc: Exception | None) -> None:
        if self.over.done():
            return
        if exc is not None:
            self.over.set_exception(exc)
        else:
            self.over.set_result(None)

    def _events(self) -> Iterator[dict[str, Any]]:
        """Those that are whole."""
        lines = self._came.split(b"\n")
        return (json.loads(line[6:]) for line in lines[:-1] if line.startswith(b"data: {"))

    def tokens(self) -> int:
        """How many it says it gave."""
        head = bytes(self._came[:200]).partition(b"\r\n")[0].decode(errors="replace")
        if " 200 " not in head:
            raise RuntimeError(f"the server answered {head}: {self._came[-500:].decode(errors='replace')}")
        return max((news["usage"]["completion_tokens"] for news in self._events() if news.get("usage")), default=0)


async def ask(port: int, prompt: str, output: int) -> _Reply:
    """One streamed, greedy completion."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data
    reply = _Reply(request)
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: reply, "127.0.0.1", port)
    try:
        await reply.over
    finally:
        transport.close()
    return reply


def drive(port: int, load: Load) -> Answer:
    """All requests, at most `concurrency` at a time; each has the shared text and a line of its own."""

    async def every() -> tuple[float, list[_Reply]]:
        gate = asyncio.Semaphore(load.concurrency)

        async def one(i: int) -> _Reply:
            async with gate:
                return await ask(port, f"{load.shared}\nQuestion {i}: what comes next?\n", load.output)

        begun = time.perf_counter()
        replies = await asyncio.gather(*(one(i) for i in range(load.requests)))
        return time.perf_counter() - begun, replies

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        took, replies = runner.run(every())
    first = []
    for reply in replies:
        if (tokens := reply.tokens()) != load.output:
            raise RuntimeError(f"the server gave {tokens} tokens: {load.output} were asked for")
        if reply.first is None:
            raise RuntimeError("the server streamed no token, but says that it gave them")
        first.append(reply.first)
    return Answer(load.requests * load.output / took, first)
