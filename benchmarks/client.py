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


async def ask(port: int, prompt: str, output: int) -> float:
    """Seconds to the first token of one streamed, greedy completion."""
    body = {"model": "bench", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    first, tokens = 0.0, 0
    try:
        while line := await reader.readline():
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise RuntimeError(
                    f"the server answered {line.decode().strip()}: {(await reader.read()).decode()[-500:]}"
                )
            if not line.startswith(b"data: {"):
                continue
            news = json.loads(line[6:])
            if news.get("choices") and not first:
                first = time.perf_counter() - begun
            if news.get("usage"):
                tokens = news["usage"]["completion_tokens"]
    finally:
        writer.close()
    if tokens != output:
        raise RuntimeError(f"the server gave {tokens} tokens: {output} were asked for")
    return first


async def drive(port: int, load: Load) -> Answer:
    """All requests, at most `concurrency` at a time; each has the shared text and a line of its own."""
    gate = asyncio.Semaphore(load.concurrency)

    async def one(i: int) -> float:
        async with gate:
            return await ask(port, f"{load.shared}\nQuestion {i}: what comes next?\n", load.output)

    begun = time.perf_counter()
    first = await asyncio.gather(*(one(i) for i in range(load.requests)))
    return Answer(load.requests * load.output / (time.perf_counter() - begun), list(first))
