"""Hostile clients on real sockets: each gets a clear 4xx in bounded time, while another client's stream keeps flowing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from quire.config import ServerConfig
from quire.server import lifecycle, limits
from quire.server.app import create_app
from tests.unit.server.fakes import MODEL, FakeCompleter, service_over

CHAT = "/v1/chat/completions"
LONGEST = 1.0  # seconds between two tokens of the honest stream; they are 10 ms apart


@asynccontextmanager
async def serving(completer: FakeCompleter) -> AsyncIterator[int]:
    """The app behind uvicorn as `quire serve` sets it up, in this loop."""
    app = create_app(ServerConfig(), service_over(completer))
    config = uvicorn.Config(app, http=lifecycle._Protocol, lifespan="off", log_config=None, ws="none")
    http = lifecycle._Http(config)
    sock = lifecycle.bind("127.0.0.1", 0)
    task = asyncio.create_task(http.serve(sockets=[sock]))
    try:
        yield sock.getsockname()[1]
    finally:
        http.stop.set()
        http.should_exit = True
        await asyncio.wait_for(task, 10)


def head(path: str, length: int | None, kind: str = "application/json") -> bytes:
    size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n{size}\r\n\r\n".encode()


async def exchange(port: int, *pieces: bytes, pause: float = 0.0) -> tuple[int, Any, float]:
    """Send the pieces; the status, the JSON that came back, and how long it took."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        status = int(first.split()[1])
        length = next(
            (int(line.split(b":")[1]) for line in first.split(b"\r\n") if line.startswith(b"content-length")), 0
        )
        body = await asyncio.wait_for(reader.readexactly(length), 10)
        return status, json.loads(body) if body else None, time.monotonic() - began
    finally:
        writer.close()


async def honest(port: int, gaps: list[float], stop: asyncio.Event) -> None:
    """A stream that is read while others misbehave."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(CHAT, len(body)) + body)
        last = time.monotonic()
        async for line in reader:
            now = time.monotonic()
            gaps.append(now - last)
            last = now
            if line.startswith(b"data: [DONE]") or stop.is_set():
                break
        writer.close()


def chat(content: str = "hi", **more: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()


DEEP = b'{"messages": [], "metadata": ' + b'{"a":' * 400_000 + b"1" + b"}" * 400_000 + b"}"
TOOL = {"type": "function", "function": {"name": "f", "description": "x" * 1000, "parameters": {"type": "object"}}}
BODIES: dict[str, bytes] = {
    "nested a million deep": DEEP,
    "nested schema": chat(response_format={"type": "json_schema", "json_schema": {"name": "x"}})[:-2]
    + b', "schema": '
    + b'{"not":' * 100_000,
    "five megabytes of text": chat("x" * 5_000_000),
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xc3\x28\xff"}]}',
    "half a surrogate": b'{"messages": [{"role": "user", "content": "\\udc00"}]}',
    "keys that come twice": b'{"messages": [], "messages": [{"role": "user", "content": 5}], "temperature": 1, "temperature": "a"}',
    "ten thousand keys": json.dumps({f"k{i}": i for i in range(10_000)}).encode(),
    "not a number": b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
    "a number of a megabyte": b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b"9" * 1_000_000 + b"}",
    "a hundred thousand messages": b'{"messages": [' + b'{"role":"x","content":""},' * 100_000 + b"{}]}",
    "thousands of tools": chat(tools=[TOOL] * 3000, tool_choice={"type": "function", "function": {"name": "g"}}),
    "brackets": b"[" * 7_000_000,
}


async def test_every_bad_body_is_refused_while_a_stream_flows():
    completer = FakeCompleter(answer="x" * 60)
    completer.delay = 0.01
    gaps: list[float] = []
    stop = asyncio.Event()
    async with serving(completer) as port:
        stream = asyncio.create_task(honest(port, gaps, stop))
        try:
            for name, body in BODIES.items():
                status, answer, took = await exchange(port, head(CHAT, len(body)), body)
                assert status == 400, (name, status, answer)
                assert set(answer["error"]) == {"message", "type", "param", "code"}, name
                assert took < 5, (name, took)
            for kind in ("text/plain", "application/xml", "multipart/form-data"):
                status, _, _ = await exchange(port, head(CHAT, 2, kind), b"{}")
                assert status == 415
            status, answer, _ = await exchange(port, head(CHAT, 10_000_000), b"x" * 100_000)
            assert status == 413 and answer["error"]["code"] == "request_too_large"
        finally:
            stop.set()
            await asyncio.wait_for(stream, 20)
    assert len(gaps) > 20 and max(gaps) < LONGEST, max(gaps)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        (CHAT, {"error"}),
        ("/v1/messages", {"type", "error"}),
        ("/api/chat", {"error"}),
        ("/generate", {"error", "error_type"}),
        (f"/v2/models/{MODEL}/infer", {"error"}),
    ],
)
async def test_a_body_that_drips_is_not_waited_for(path: str, shape: set[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.1)
    async with serving(FakeCompleter()) as port:
        status, answer, took = await exchange(port, head(path, 1000), *[b"x"] * 4, pause=0.02)
        assert status == 408 and set(answer) >= shape, answer
        assert took < 3
        status, _, _ = await exchange(port, head(path, None), b"1\r\nx\r\n", pause=0.02)
        assert status == 408


async def test_a_slow_body_that_comes_is_taken(monkeypatch: pytest.MonkeyPatch):
    """A second more for each so many bytes: what is slow and large is not what drips."""
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.15)
    monkeypatch.setattr(limits, "BODY_RATE", 100)
    body = chat("a" * 60)
    async with serving(FakeCompleter()) as port:
        pieces = [body[i : i + 12] for i in range(0, len(body), 12)]
        status, _, took = await exchange(port, head(CHAT, len(body)), *pieces, pause=0.05)
    assert status == 200 and took > 0.2


async def test_a_head_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "HEAD_SECONDS", 0.2)
    body = chat()
    async with serving(FakeCompleter()) as port:
        for pieces in ([b""], [b"POST "], [b"P", b"O", b"S", b"T"]):
            status, _, took = await exchange(port, *pieces, pause=0.02)
            assert status == 408 and took < 3
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the second request of a connection is bounded as the first
            writer.write(head(CHAT, len(body)) + body)
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.05)
        writer.write(b"GET /hea")
        rest = await asyncio.wait_for(reader.read(), 3)
        assert b"408 Request Timeout" in rest
        writer.close()


async def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "HEAD_SECONDS", 0.1)
    completer = FakeCompleter(answer="x" * 30)
    completer.delay = 0.02
    body = chat()
    async with serving(completer) as port:
        status, answer, took = await exchange(port, head(CHAT, len(body)), body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "x" * 30 and took > 0.3
