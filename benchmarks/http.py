"""What the HTTP path costs: a server over an engine that makes tokens at once, and clients that only count.

    python -m benchmarks.http [--clients 64] [--tokens 256] [--seconds 8] [--route chat] [--save]

Three processes, as in service: the server, its (null) engine, and this one. Measured:

  rate      tokens per second to all clients together, each its own event, and the server's processor time for each
  steady    the same with an engine that steps every 2 ms: what arrives of the 32,000 a second that it makes
  first     from the request to the first byte of its answer, one request at a time on an idle server; beside it the same of a bare loop
            that answers anything at once, asked in turn: what the machine and its other guests add to both
  stall     the longest gap between tokens of streams that step every 20 ms, without and with prompts of 32K tokens being tokenized

A client is a socket: it sends one request after another and counts events in what comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import files
from benchmarks.record import ROOT, save

EVENT = b"data: {"
LAST = b"0\r\n\r\n"  # the end of a chunked body
TICK = os.sysconf("SC_CLK_TCK")
BARE = "bare"
TARGETS = {"rate_tokens_per_second": 30_000, "first_byte_ms": 5.0}


# The server, as a process of its own


class _Bare(asyncio.Protocol):
    """Answers whatever comes with a fixed few bytes."""

    SAYS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"9\r\ndata: {}\n\r\n" + LAST

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(self.SAYS)  # type: ignore[attr-defined]


def serve_bare() -> None:
    """The same loop without a server around it."""
    import uvloop

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Bare, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\nready", flush=True)
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def serve(builder: str) -> None:
    """Print the address, then serve until told to stop."""
    if builder == BARE:
        return serve_bare()
    import logging

    import uvloop

    from quire.chat.completer import Completer
    from quire.chat.loading import tokenizer_and_template
    from quire.config import EngineConfig, ServerConfig
    from quire.engine.transport.process_client import ProcessClient
    from quire.server import lifecycle
    from quire.server.served import Model
    from quire.server.server import Server
    from quire.weights.checkpoint import open_checkpoint

    logging.basicConfig(level=logging.WARNING)
    path = str(files.model())
    config = ServerConfig(port=0, log_requests=False)
    sock = lifecycle.bind(config.host, 0)

    async def opener(server: Server, model: Model) -> Any:
        client = ProcessClient(EngineConfig(path=path), builder=f"benchmarks.null_engine:{builder}")
        info = await client.start()
        with open_checkpoint(path) as checkpoint:
            tokenizer, template = tokenizer_and_template(checkpoint)
        return client, Completer(client, tokenizer, template, info)

    async def run() -> int:
        service = Server(config, [Model("null")])
        return await lifecycle.serve(config, sock, service, opener, on_ready=lambda model: print("ready", flush=True))

    print(lifecycle.url_of(sock), flush=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(run()))


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    address: tuple[str, int]

    def cpu_seconds(self) -> float:
        """Processor time of the HTTP process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


@contextmanager
def running(builder: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.http", "--serve", builder]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        host, _, port = process.stdout.readline().strip().removeprefix("http://").rpartition(":")
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("the server did not start")
        yield Server(process, (host, int(port)))
    finally:
        process.terminate()
        process.wait(30)


# Clients


def request(route: str, tokens: int, prompt: str = "Say something long.") -> bytes:
    """A streaming request that is answered with so many tokens."""
    body: dict[str, Any] = {"model": "null", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    if route == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        path = "/v1/completions"
        body["prompt"] = prompt
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@dataclass
class Client:
    """One connection, its count of events, and when they came."""

    sock: socket.socket
    ask: bytes
    events: int = 0
    answers: int = 0
    sent: float = 0.0
    waiting: bool = True
    first: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    keep_times: bool = False
    tail: bytes = b""

    def send(self) -> None:
        self.sent, self.waiting = time.perf_counter(), True
        self.sock.sendall(self.ask)

    def read(self, again: bool) -> None:
        data = self.sock.recv(1 << 18)
        now = time.perf_counter()
        if not data:
            raise SystemExit("the server closed a connection")
        if self.waiting:
            self.waiting = False
            if not data.startswith(b"HTTP/1.1 200"):
                raise SystemExit(data[:300])
            self.first.append(now - self.sent)
        # What may be half an event at the end of one read is whole with the beginning of the next.
        seen = self.tail + data
        self.events += seen.count(EVENT)
        self.tail = seen[-(len(EVENT) - 1) :]
        if self.keep_times:
            self.times.append(now)
        if data.endswith(LAST):
            self.answers += 1
            self.tail = b""
            if again:
                self.send()


def drive(server: Server, clients: int, ask: bytes, seconds: float, *, keep_times: bool = False) -> dict[str, Any]:
    """Clients that ask again and again for so long; what came, after a second of warming up."""
    selector = selectors.DefaultSelector()
    every: list[Client] = []
    for _ in range(clients):
        sock = socket.create_connection(server.address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        every.append(Client(sock, ask, keep_times=keep_times))
        selector.register(sock, selectors.EVENT_READ, every[-1])
    for client in every:
        client.send()

    def turn(until: float) -> None:
        while (left := until - time.perf_counter()) > 0:
            for key, _ in selector.select(left):
                key.data.read(again=True)

    turn(time.perf_counter() + 1.0)
    began, events, cpu = time.perf_counter(), sum(c.events for c in every), server.cpu_seconds()
    turn(began + seconds)
    took, made = time.perf_counter() - began, sum(c.events for c in every) - events
    cpu = server.cpu_seconds() - cpu
    for client in every:
        client.sock.close()
    times = [t for c in every for t in (c.times[k + 1] - c.times[k] for k in range(len(c.times) - 1))]
    return {
        "tokens_per_second": made / took,
        "server_cpu_share": cpu / took,
        "server_us_per_token": 1e6 * cpu / max(1, made),
        "first_byte_ms": [1e3 * t for c in every for t in c.first],
        "gaps_ms": [1e3 * t for t in times],
    }


def first_bytes(server: Server, ask: bytes, count: int) -> list[float]:
    """Milliseconds to the first byte, one request after another."""
    sock = socket.create_connection(server.address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client = Client(sock, ask)
    for i in range(count):
        client.send()
        while client.answers == i:
            client.read(again=False)
        time.sleep(0.005)
    sock.close()
    return [1e3 * t for t in client.first[5:]]  # without what is only done once


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


# Figures


def measure_rate(route: str, clients: int, tokens: int, seconds: float) -> dict[str, Any]:
    with running("build") as server:
        found = drive(server, clients, request(route, tokens), seconds)
        first, bare = measure_first(server, route)
    return {
        "tokens_per_second": round(found["tokens_per_second"]),
        "server_us_per_token": round(found["server_us_per_token"], 1),
        "server_cpu_share": round(found["server_cpu_share"], 2),
        "first_byte_ms": {
            "median": round(statistics.median(first), 2),
            "p99": round(percentile(first, 0.99), 2),
            "bare_median": round(statistics.median(bare), 2),
            "bare_p99": round(percentile(bare, 0.99), 2),
        },
    }


def measure_first(server: Server, route: str, rounds: int = 10) -> tuple[list[float], list[float]]:
    """First bytes of the server and of a bare loop, in turn."""
    first: list[float] = []
    bare: list[float] = []
    with running(BARE) as floor:
        for _ in range(rounds):
            first += first_bytes(server, request(route, 4), 55)
            bare += first_bytes(floor, request(route, 4), 55)
    return first, bare


def measure_steady(route: str, clients: int, seconds: float) -> dict[str, Any]:
    with running("build_steady") as server:
        found = drive(server, clients, request(route, 1024), seconds, keep_times=True)
    return {
        "offered_tokens_per_second": clients * 500,
        "tokens_per_second": round(found["tokens_per_second"]),
        "server_us_per_token": round(found["server_us_per_token"], 1),
        "server_cpu_share": round(found["server_cpu_share"], 2),
        "gap_ms": {
            "median": round(statistics.median(found["gaps_ms"]), 2),
            "p99": round(percentile(found["gaps_ms"], 0.99), 2),
        },
    }


def measure_stall(route: str, seconds: float) -> dict[str, Any]:
    """Gaps of eight slow streams, alone and beside long prompts."""
    words = "The quick brown fox jumps over the lazy dog, and " * 2978  # about 32,760 tokens
    long = request(route, 1, words)
    gaps: dict[str, list[float]] = {}
    with running("build_slow") as server:
        for name in ("alone", "beside"):
            command = [sys.executable, "-m", "benchmarks.http", "--long", f"{server.address[0]}:{server.address[1]}"]
            other = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) if name == "beside" else None
            if other is not None and other.stdin is not None:
                other.stdin.write(long)
                other.stdin.close()
            gaps[name] = drive(server, 8, request(route, 4096), seconds, keep_times=True)["gaps_ms"]
            if other is not None:
                other.terminate()
                other.wait()
        ids = len(_ids(words))
    return {
        "prompt_tokens": ids,
        **{
            name: {"median_ms": round(statistics.median(g), 1), "longest_ms": round(max(g), 1)}
            for name, g in gaps.items()
        },
    }


def _ids(text: str) -> list[int]:
    from quire.chat.loading import tokenizer_of
    from quire.weights.checkpoint import open_checkpoint

    with open_checkpoint(str(files.model())) as checkpoint:
        return tokenizer_of(checkpoint).encode(text, add_special=False, parse_special=False)


def ask_long(address: str) -> None:
    """Send what comes on standard input as a request, again and again."""
    host, _, port = address.rpartition(":")
    client = Client(socket.create_connection((host, int(port))), sys.stdin.buffer.read())
    client.send()
    while True:
        client.read(again=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--only", choices=("rate", "first", "steady", "stall"))
    parser.add_argument("--save", action="store_true", help="keep a record in results/")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--long", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve)
    if asked.long:
        ask_long(asked.long)
    settings = {"clients": asked.clients, "tokens": asked.tokens, "seconds": asked.seconds, "route": asked.route}
    found: dict[str, Any] = {}
    if asked.only in (None, "rate"):
        found["rate"] = measure_rate(asked.route, asked.clients, asked.tokens, asked.seconds)
    if asked.only == "first":
        with running("build") as server:
            first, bare = measure_first(server, asked.route)
        for name, values in (("first", first), ("bare", bare)):
            shares = {f"p{100 * p:g}": round(percentile(values, p), 2) for p in (0.5, 0.9, 0.99, 1.0)}
            found[name] = shares
    if asked.only in (None, "steady"):
        found["steady"] = measure_steady(asked.route, asked.clients, asked.seconds)
    if asked.only in (None, "stall"):
        found["stall"] = measure_stall(asked.route, asked.seconds)
    print(json.dumps(found, indent=1))
    if asked.save:
        print(save("http", {"settings": settings, "targets": TARGETS, **found}))


if __name__ == "__main__":
    main()
