"""A server started as a user starts it: `quire serve smollm2:135m`, in a process of its own, on a free port."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from quire.config import DEFAULT_MODEL

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0


@dataclass
class Server:
    """A running `quire serve`, and everything it has printed."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)
    _news: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def client(self, **more: object) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120, **more)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def metric(self, name: str) -> float:
        """The value of the one series whose name and labels start so."""
        found = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        assert len(found) == 1, (name, found)
        return float(found[0].rpartition(" ")[2])

    def ready(self) -> bool:
        try:
            return self.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def engine_pid(self) -> int:
        """The one child process that holds the model."""
        children = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                children.append(int(stat.parent.name))
        assert len(children) == 1, children
        return children[0]

    def read(self) -> None:
        """Collect what it prints; runs in a thread."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            self._news.put(line)
        self._news.put(None)

    def wait_for_line(self, pattern: str, seconds: float) -> re.Match[str]:
        end = time.monotonic() + seconds
        while True:
            line = self._news.get(timeout=max(0.01, end - time.monotonic()))
            if line is None:
                raise AssertionError("the server ended:\n" + "\n".join(self.lines))
            if match := re.search(pattern, line):
                return match

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def wait_until(what: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something that must come true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def launch(*options: str, model: str = DEFAULT_MODEL, env: dict[str, str] | None = None, wait: bool = True) -> Server:
    """`quire serve` with these options; waits until it is ready unless told not to."""
    command = [sys.executable, "-m", "quire.cli.main", "serve", model, "--port", "0", *options]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})})
    server = Server(process)
    threading.Thread(target=server.read, daemon=True).start()
    try:
        server.url = server.wait_for_line(r"listening on (http://\S+:\d+)", START_SECONDS)[1]
        if wait:
            server.wait_for_line(r"is ready at ", START_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return server


@pytest.fixture(scope="session")
def server(model_path: Path) -> Iterator[Server]:
    """One server for all tests that do it no harm."""
    started = launch()
    yield started
    assert started.stop() == 0, "\n".join(started.lines)


@pytest.fixture
def start(model_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers of a test's own; stopped at its end."""
    started: list[Server] = []

    def make(*options: str, **more: object) -> Server:
        started.append(launch(*options, **more))
        return started[-1]

    yield make
    for one in started:
        one.stop()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    """The official client."""
    return server.client()
