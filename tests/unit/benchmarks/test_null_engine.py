"""The engine without a model does what the process around an engine asks of one."""

from __future__ import annotations

from typing import cast

import zmq

from benchmarks import null_engine
from quire.engine.engine import Engine
from quire.engine.transport import wire
from quire.engine.transport.process_main import serve
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams


def test_it_serves_requests_until_it_is_told_to_stop() -> None:
    engine, _ = null_engine._build(0.0, 1 << 16)
    events: list[Event] = []
    with zmq.Context() as context, context.socket(zmq.PAIR) as ours, context.socket(zmq.PAIR) as its:
        ours.bind("inproc://null-engine")
        its.connect("inproc://null-engine")

        def heard(message: wire.FromEngine) -> None:
            events.extend(message.events if isinstance(message, wire.Events) else ())
            if events and events[-1].finish:
                ours.send(wire.encode(wire.Shutdown()))

        request = Request(id="a", tokens=[1, 2], sampling=SamplingParams(max_tokens=3))
        ours.send(wire.encode(wire.Add(request=request)))
        assert serve(cast(Engine, engine), its, heard) == 0
    assert [len(e.tokens) for e in events] == [1, 1, 1]
    assert events[-1].finish == "length"
