"""Rows on their way to an engine process: once each, in bounded parts, gone with the last request that needs them."""

from __future__ import annotations

import asyncio
import os
import random
from hashlib import sha256

import msgspec
import pytest

from quire.config import EngineConfig
from quire.engine.transport import span_rows, wire
from quire.engine.transport.process_client import ProcessClient
from quire.engine.transport.span_rows import HeldRows, SentRows
from quire.engine.types import Event, Request
from quire.observe.errors import Busy, TooLarge
from quire.runner.params import SamplingParams
from quire.runner.spans import Span


def span(start: int, rows: bytes) -> Span:
    return Span(start=start, length=len(rows) // 4, kind="image", digest=sha256(rows).digest(), rows=rows)


def request(name: str, *rows: bytes) -> Request:
    at, spans = 0, []
    for own in rows:
        spans.append(span(at, own))
        at += len(own) // 4
    return Request(id=name, tokens=[1] * (at + 1), spans=tuple(spans), sampling=SamplingParams(max_tokens=3))


class Line:
    """A socket that encodes and decodes, and what it carried."""

    def __init__(self) -> None:
        self.held = HeldRows()
        self.parts: list[int] = []
        self.added: list[Request] = []
        self.sent = SentRows(self.send)

    def send(self, message: wire.ToEngine) -> None:
        match message := wire.decode_to_engine(wire.encode(message)):
            case wire.Rows():
                self.parts.append(len(message.data))
                self.held.take(message)
            case wire.Forget(names):
                self.held.forget(names)
            case wire.Add(own):
                self.added.append(self.held.filled(own))
            case _:
                raise AssertionError(message)

    def add(self, own: Request) -> None:
        self.send(wire.Add(request=self.sent.submit(own)))


def test_rows_go_once_and_stay_while_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_rows, "PART", 1000)
    line, one, two = Line(), os.urandom(4096), os.urandom(400)
    first = request("a.0", one, two, one)
    for i in range(4):
        line.add(msgspec.structs.replace(first, id=f"a.{i}"))
    assert line.parts == [1000, 1000, 1000, 1000, 96, 400]
    assert line.added == [msgspec.structs.replace(first, id=f"a.{i}") for i in range(4)]
    for i in range(3):
        line.sent.left(f"a.{i}")
        line.sent.left(f"a.{i}")  # told twice, counted once
    line.add(request("b", two))
    assert line.added[-1] == request("b", two) and len(line.parts) == 6
    line.sent.left("a.3")
    assert [len(rows) for rows in line.held._whole.values()] == [400]
    line.add(request("c", one))
    assert line.parts[6:] == [1000, 1000, 1000, 1000, 96] and line.added[-1] == request("c", one)
    line.sent.left("b"), line.sent.left("c")
    assert not line.held._whole and not line.held._rows and not line.sent._users


def test_random_requests_always_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_rows, "PART", 64)
    rng, line = random.Random(1), Line()
    pictures = [rng.randbytes(4 * rng.randint(1, 60)) for _ in range(6)]
    live: list[str] = []
    for i in range(400):
        if live and rng.random() < 0.5:
            line.sent.left(live.pop(rng.randrange(len(live))))
        else:
            own = request(str(i), *rng.choices(pictures, k=rng.randint(1, 3)))
            line.add(own)
            assert line.added[-1] == own
            live.append(own.id)
        if rng.random() < 0.02:  # the engine dies
            line.sent.lost()
            line.held, live = HeldRows(), []
    for name in live:
        line.sent.left(name)
    assert not line.held._whole and not line.sent._users


def test_what_is_too_much_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line()
    monkeypatch.setattr(span_rows, "MAX_ROWS", 100)
    monkeypatch.setattr(span_rows, "MAX_HELD", 220)
    with pytest.raises(TooLarge, match="104 bytes of rows: at most 100"):
        line.add(request("a", bytes(104)))
    line.add(request("b", b"1" * 100, b"2" * 100))
    with pytest.raises(Busy, match="200 bytes of rows"):
        line.add(request("c", b"3" * 24))
    line.add(request("d", b"1" * 100))  # which is there
    assert line.parts == [100, 100]
    line.sent.left("b")
    line.add(request("e", b"3" * 24))


def test_parts_that_do_not_fit_together_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held, own = HeldRows(), request("a", b"1" * 8)
    name = span_rows.name_of(own.spans[0])
    named = span_rows._without(own)
    monkeypatch.setattr(span_rows, "MAX_HELD", 100)
    for parts in (
        [wire.Rows(name=name, at=4, total=8, data=b"1111")],
        [wire.Rows(name=name, at=0, total=8, data=b"1" * 9)],
        [wire.Rows(name=name, at=0, total=1 << 40, data=b"1" * 101)],
        [wire.Rows(name=name, at=0, total=8, data=b"1111")],
    ):
        for part in parts:
            held.take(part)
        assert held.filled(named).spans[0].rows == b""  # which the engine refuses
        held.forget([name])
        assert not held._rows and not held._whole


async def test_an_engine_process_gets_them_and_says_what_it_thinks_of_them() -> None:
    """The counting engine takes no spans: that its own refusal comes back shows that the request got there, and that nothing stays."""
    c = ProcessClient(
        EngineConfig(path="", name="counter"), builder="tests.unit.engine.fake_engine:build", on_line=lambda _: None
    )
    await c.start()
    try:

        async def refusal(own: Request) -> Event:
            (event,) = [event async for event in c.generate(own)]
            return event

        events = await asyncio.gather(*(refusal(request(f"r{i}", b"1" * 4096)) for i in range(5)))
        assert all(e.error is not None and "reads text alone" in e.error for e in events)
        assert not c._rows._users and not c._rows._of
        text = Request(id="t", tokens=[5], sampling=SamplingParams(max_tokens=2))
        assert [t for e in [e async for e in c.generate(text)] for t in e.tokens] == [6, 7]
    finally:
        await c.close()
