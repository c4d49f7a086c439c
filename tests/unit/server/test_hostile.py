"""Hostile clients on real sockets: each gets a clear 4xx in bounded time, while another client's stream keeps flowing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import uvicorn

from quire.config import ServerConfig
from quire.observe.errors import BadRequest
from quire.server import connections, lifecycle, middleware
from quire.server.app import create_app
from quire.server.shared import bodies
from tests.effort import at_most
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for, service_over
from tests.unit.server.test_contract import shape_of

CHAT = "/v1/chat/completions"
LONGEST = 1.0  # seconds of CPU, ours in all threads, between two tokens of the honest stream; they are 10 ms apart
PATIENCE = 15  # seconds: less than the limits that a test has to see at work


@asynccontextmanager
async def serving(completer: FakeCompleter) -> AsyncIterator[int]:
    """The app behind uvicorn as `quire serve` sets it up, in this loop."""
    app = create_app(ServerConfig(), service_over(completer))
    config = uvicorn.Config(app, http=connections.protocol(), lifespan="off", log_config=None, ws="none")
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
        status, body = await answer_from(reader)
        return status, json.loads(body) if body else None, time.monotonic() - began
    finally:
        writer.close()


async def answer_from(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and the body."""
    first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE)
    lengths = (int(line.split(b":")[1]) for line in first.split(b"\r\n") if line.startswith(b"content-length"))
    return int(first.split()[1]), await asyncio.wait_for(reader.readexactly(next(lengths, 0)), PATIENCE)


async def honest(port: int, gaps: list[float], stop: asyncio.Event) -> None:
    """A stream that is read while others misbehave."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(CHAT, len(body)) + body)
        last = time.process_time()
        async for line in reader:
            now = time.process_time()
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
                with at_most(5.0, name):
                    status, answer, _ = await exchange(port, head(CHAT, len(body)), body)
                assert status == 400, (name, status, answer)
                assert set(answer["error"]) == {"message", "type", "param", "code"}, name
            for kind in ("text/plain", "application/xml", "multipart/form-data"):
                status, _, _ = await exchange(port, head(CHAT, 2, kind), b"{}")
                assert status == 415
            status, answer, _ = await exchange(port, head(CHAT, 10_000_000), b"x" * 100_000)
            assert status == 413 and answer["error"]["code"] == "request_too_large"
        finally:
            stop.set()
            await asyncio.wait_for(stream, 20)
    assert len(gaps) > 20 and max(gaps) < LONGEST, max(gaps)


def crumbs(body: bytes) -> bytes:
    """A chunked body, a byte a chunk."""
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


async def test_bodies_in_chunks_of_one_byte_do_not_hold_others_up():
    """Whole buffers of chunks are parsed a few at a time, and the stream beside them is served between two turns."""
    completer = FakeCompleter(answer="x" * 60)
    completer.delay = 0.01
    gaps: list[float] = []
    stop = asyncio.Event()
    body = chat() + b" " * 30_000
    async with serving(completer) as port:
        stream = asyncio.create_task(honest(port, gaps, stop))
        try:
            sent = [exchange(port, head(CHAT, None) + crumbs(body)) for _ in range(3)]
            answers = await asyncio.gather(*sent)
            longest = max(gaps)
            status, answer, _ = await exchange(port, head(CHAT, None) + crumbs(body))  # of one alone, after others
        finally:
            stop.set()
            await asyncio.wait_for(stream, 20)
    assert {status for status, _, _ in answers} == {200} == {status}
    assert answer["choices"][0]["message"]["content"] == "x" * 60
    assert longest < 0.15, longest  # a whole buffer of the socket takes 0.7 seconds


async def test_a_body_in_too_many_chunks_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MAX_PIECES", 500)
    async with serving(FakeCompleter()) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(CHAT, None) + crumbs(b" " * 600))
        told = await asyncio.wait_for(reader.read(), PATIENCE)
        assert told.startswith(b"HTTP/1.1 400 ") and b"too many too small chunks" in told
        writer.close()
        body = chat() + b" " * 200_000  # as many chunks, and larger ones
        pieces = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[i : i + 300] for i in range(0, len(body), 300)))
        status, _, _ = await exchange(port, head(CHAT, None) + pieces + b"0\r\n\r\n")
        assert status == 200
        for _ in range(2):  # requests of one connection are counted apart
            status, _, _ = await exchange(port, head(CHAT, None) + crumbs(chat() + b" " * 350))
            assert status == 200


def test_what_waits_to_be_parsed_is_not_read_further():
    """A handler that asks for more of a body reads no more from the socket while chunks wait: ours would grow with what a client sends."""

    class Transport(asyncio.Transport):
        reads = True

        def pause_reading(self) -> None:
            self.reads = False

        def resume_reading(self) -> None:
            self.reads = True

    parser, transport = connections._Parser(h11.SERVER), Transport()
    flow = connections._Flow(transport, parser)
    parser.receive_data(head(CHAT, None) + crumbs(b"x" * (connections.PIECES + 1)))
    while parser.next_event() is not h11.PAUSED:
        pass
    flow.pause_reading()
    flow.resume_reading()
    assert not transport.reads
    parser.more()
    flow.resume_reading()
    assert transport.reads
    assert isinstance(parser.next_event(), h11.Data) and isinstance(parser.next_event(), h11.EndOfMessage)


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
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(middleware, "LINGER_SECONDS", 0.1)
    async with serving(FakeCompleter()) as port:
        status, answer, _ = await exchange(port, head(path, 1000), *[b"x"] * 4, pause=0.02)
        assert status == 408 and set(answer) >= shape, answer
        status, _, _ = await exchange(port, head(path, None), b"1\r\nx\r\n", pause=0.02)
        assert status == 408


async def test_a_slow_body_that_comes_is_taken(monkeypatch: pytest.MonkeyPatch):
    """A second more for each so many bytes: what is slow and large is not what drips."""
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(middleware, "BODY_RATE", 1)
    body = chat("a" * 60)
    async with serving(FakeCompleter()) as port:
        first, *pieces = [body[i : i + 12] for i in range(0, len(body), 12)]
        status, _, took = await exchange(port, head(CHAT, len(body)) + first, *pieces, pause=0.05)
    assert status == 200 and took > 0.3


async def test_a_head_that_drips_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    body = chat()
    async with serving(FakeCompleter()) as port:
        for pieces in ([b""], [b"POST "], [b"PO", b"ST"]):
            status, _, _ = await exchange(port, *pieces, pause=0.005)
            assert status == 408
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the second request of a connection is bounded as the first
            writer.write(head(CHAT, len(body)) + body)
            assert (await answer_from(reader))[0] == 200
        writer.write(b"GET /hea")
        rest = await asyncio.wait_for(reader.read(), PATIENCE)
        assert b"408 Request Timeout" in rest
        writer.close()


async def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    completer = FakeCompleter(answer="x" * 30)
    completer.delay = 0.02
    body = chat()
    async with serving(completer) as port:
        status, answer, took = await exchange(port, head(CHAT, len(body)), body)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "x" * 30 and took > 0.3


# The same in every dialect, in its own shape

SAYS = [{"role": "user", "content": "hi"}]
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CLAUDE = {"name": "f", "input_schema": {"type": "object"}}
# What is answered, and a tool where there are tools: the tool, and what its description is called in it.
SMALLEST: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    CHAT: ({"messages": SAYS}, TOOL),
    "/v1/completions": ({"prompt": "hi"}, None),
    "/v1/responses": ({"input": "hi"}, FLAT),
    "/v1/messages": ({"model": MODEL, "messages": SAYS, "max_tokens": 5}, CLAUDE),
    "/api/chat": ({"model": MODEL, "messages": SAYS, "stream": False}, TOOL),
    "/api/generate": ({"model": MODEL, "prompt": "hi", "stream": False}, None),
    "/generate": ({"inputs": "hi"}, None),
    "/completion": ({"prompt": "hi"}, None),
    f"/v2/models/{MODEL}/generate": ({"text_input": "hi"}, None),
    f"/v2/models/{MODEL}/infer": (
        {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]},
        None,
    ),
}


@pytest.mark.parametrize("path", SMALLEST)
async def test_every_dialect_refuses_in_its_own_shape(path: str):
    body, tool = SMALLEST[path]
    completer = FakeCompleter()
    completer.answer_format, completer.template = CALLER, FakeTemplate("messages tools")
    plain, json_kind = json.dumps(body).encode(), "application/json"
    bad: list[tuple[str, bytes, str, tuple[int, ...]]] = [
        ("twice", plain[:-1] + b', "top_p": 1, "top_p": 0.5}', json_kind, (400, 422)),
        ("inside", plain[:-1] + b', "metadata": {"a": "1", "a": "2"}}', json_kind, (400, 422)),
        ("XML", plain, "application/xml", (415,)),
        ("a form", plain, "multipart/form-data; boundary=x", (415,)),
        ("not UTF-8", plain.replace(b"hi", b"\xff"), json_kind, (400, 422)),
    ]
    if tool is not None:
        many = {**body, "tools": [{**tool, "name": f"f{i}"} if "name" in tool else tool for i in range(3000)]}
        told = "x" * 2_000_000
        inner = {**tool["function"], "description": told} if "function" in tool else None
        wordy = {**tool, "function": inner} if inner else {**tool, "description": told}
        bad.append(("thousands of tools", json.dumps(many).encode(), json_kind, (400,)))
        bad.append(("megabytes of description", json.dumps({**body, "tools": [wordy]}).encode(), json_kind, (400,)))
    async with client_for(completer) as http:
        good = await http.post(path, content=plain, headers={"content-type": json_kind})
        assert good.status_code == 200, good.text
        for name, content, kind, statuses in bad:
            with at_most(3.0, name):
                r = await http.post(path, content=content, headers={"content-type": kind})
            assert r.status_code in statuses, (name, r.status_code, r.text[:200])
            shape_of(path, r.json())
            if name in ("twice", "inside"):
                assert "comes twice" in r.text, (name, r.text)
    assert len(completer.seen) == 1


async def test_keys_of_large_bodies_are_looked_at_off_the_loop():
    """And not at all beyond a bound: a list of a million empty lists is no small thing to look through."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    body = b'{"a": [' + b'{"b": 1},' * 80_000 + b'{"c": 1, "c": 2}]}'
    assert len(body) < bodies.KEYS_MOST
    ticking = asyncio.create_task(tick())
    with pytest.raises(BadRequest, match="'c' comes twice"):
        await bodies.checked_keys(body)
    ticking.cancel()
    assert ticks  # none, had the loop waited
    assert await bodies.checked_keys(b'{"a": 1, "a": 2' + b" " * bodies.KEYS_MOST + b"}")
    for odd in (b"", b"[" * 100_000, b"\xff", b'{"a": 1' + b"9" * 10_000 + b', "b": 2}', b'{"a": NaN}'):
        assert await bodies.checked_keys(odd) == odd
