"""The engine without a model does what the process around an engine asks of one."""

from __future__ import annotations

import zmq

from benchmarks import null_engine
from quire.engine import wire
from quire.engine.process_main import serve
from quire.engine.types import Request
from quire.runner.params import SamplingParams


class Socket:
    """Hands out what is in it, and then a Shutdown."""

    def __init__(self, *messages: wire.ToEngine):
        self.messages = [*messages]
        self.sent: list[wire.FromEngine] = []

    def poll(self, timeout: int | None) -> None:
        if not self.messages:
            self.messages.append(wire.Shutdown())

    def recv(self, flags: int) -> bytes:
        if not self.messages:
            raise zmq.Again
        return wire.encode(self.messages.pop(0))


def test_it_serves_requests_until_it_is_told_to_stop() -> None:
    engine, _ = null_engine._build(0.0, 1 << 16)
    socket = Socket(wire.Add(request=Request(id="a", tokens=[1, 2], sampling=SamplingParams(max_tokens=3))))
    assert serve(engine, socket, socket.sent.append) == 0  # type: ignore[arg-type]
    events = [e for message in socket.sent if isinstance(message, wire.Events) for e in message.events]
    assert [len(e.tokens) for e in events] == [1, 1, 1]
    assert events[-1].finish == "length"
