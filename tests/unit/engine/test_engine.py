"""The loop, with the real scheduler over a scripted runner: order, depth, failures, times, deadlines."""

from __future__ import annotations

import gc
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from quire.config import EngineConfig
from quire.engine.engine import STALL, Engine
from quire.engine.hooks import NoAdapters
from quire.engine.transport import wire
from quire.engine.transport.process_main import serve
from quire.engine.types import Event, Request, Stats
from quire.runner.params import SamplingParams
from quire.runner.spans import Span
from tests.unit.engine.fake_engine import POISON, CountingRunner, Ticket, make


def config(**options: object) -> EngineConfig:
    return EngineConfig(path="", max_seqs=4, max_batch_tokens=32, **options)  # type: ignore[arg-type]


def request(name: str, tokens: list[int], max_tokens: int = 3, **options: object) -> Request:
    return Request(id=name, tokens=tokens, sampling=SamplingParams(max_tokens=max_tokens), **options)  # type: ignore[arg-type]


def run(engine: Engine, limit: int = 1000) -> dict[str, list[Event]]:
    news: dict[str, list[Event]] = {}
    for _ in range(limit):
        if not engine.busy:
            return news
        for event in engine.step():
            news.setdefault(event.id, []).append(event)
    raise AssertionError("the engine does not come to rest")


def tokens(events: list[Event]) -> list[int]:
    return [t for e in events for t in e.tokens]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_same_tokens_at_every_depth(depth: int) -> None:
    engine = make(config(depth=depth), CountingRunner())
    for i in range(7):  # more than there are slots
        engine.add(request(f"r{i}", [10 * i] * (i * 9 + 1), max_tokens=i + 1))
    news = run(engine)
    for i in range(7):
        assert tokens(news[f"r{i}"]) == [10 * i + 1 + k for k in range(i + 1)]
        assert [e.finish for e in news[f"r{i}"]][-1] == "length"
        assert all(e.finish is None for e in news[f"r{i}"][:-1])
    assert engine.stats().running == engine.stats().waiting == 0


class TracingRunner(CountingRunner):
    """Counts tickets that have not been collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open = 0
        self.most = 0
        self.order: list[int] = []

    def sample(self, pending):  # type: ignore[no-untyped-def, override]
        ticket = super().sample(pending)
        self.open += 1
        self.most = max(self.most, self.open)
        runner = self

        class Counted(Ticket):
            def result(self):  # type: ignore[no-untyped-def, override]
                runner.open -= 1
                runner.order.append(pending.step)
                return super().result()

        return Counted(ticket.rows)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_is_the_number_of_steps_in_flight(depth: int) -> None:
    runner = TracingRunner()
    engine = make(config(depth=depth), runner)
    engine.add(request("a", [1, 2, 3], max_tokens=10))
    while engine.busy:
        engine.step()
        assert runner.open <= depth
    assert runner.most == depth + 1
    assert runner.order == sorted(runner.order)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("where", ["forward", "result"])
def test_a_failing_step_fails_its_requests_and_no_others(depth: int, where: str) -> None:
    runner = CountingRunner(fail_at=where)
    engine = make(config(depth=depth), runner)
    engine.add(request("bad", [1, POISON]))
    news = run(engine)
    (last,) = news["bad"]
    assert last.finish == "error"
    assert "poison" in (last.error or "")
    assert last.receipt is not None
    engine.add(request("good", [5]))
    assert tokens(run(engine)["good"]) == [6, 7, 8]


def test_work_in_flight_before_a_failing_step_is_kept() -> None:
    engine = make(config(depth=1), CountingRunner())
    engine.add(request("good", [5], max_tokens=1))
    assert engine.step() == []  # in flight
    engine.add(request("bad", [POISON]))
    news = run(engine)
    assert tokens(news["good"]) == [6]
    assert news["good"][-1].finish == "length"
    assert news["bad"][-1].finish == "error"


class Clock:
    """Moves by one second each time it is read."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_times_add_up() -> None:
    clock = Clock()
    engine = make(config(), CountingRunner())
    engine._clock = clock
    before = clock.now
    for i in range(6):
        engine.add(request(f"r{i}", [i] * 40, max_tokens=3))
    seen = {}
    while engine.busy:
        for event in engine.step():
            if event.finish:
                seen[event.id] = event.receipt, clock.now
    assert len(seen) == 6
    for i, (receipt, end) in enumerate(seen[f"r{i}"] for i in range(6)):
        whole = receipt.queue_seconds + receipt.prefill_seconds + receipt.decode_seconds
        assert whole == pytest.approx(end - (before + 1 + i))
        assert receipt.queue_seconds > 0
        assert receipt.prefill_seconds > 0
        assert receipt.decode_seconds > 0
    assert seen["r5"][0].queue_seconds > seen["r0"][0].queue_seconds


def test_abort_answers_once_and_is_stamped() -> None:
    engine = make(config(), CountingRunner())
    engine.add(request("a", [1], max_tokens=1000))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never was")
    news = run(engine)
    (last,) = [e for e in news["a"] if e.finish]
    assert last.finish == "abort"
    assert last.error is None
    assert last.receipt is not None
    assert last.receipt.output_tokens == 1
    assert last.receipt.prefill_seconds > 0
    assert engine.stats().pages_used == 0


def test_a_request_that_was_never_admitted_spent_its_time_in_the_queue() -> None:
    engine = make(config(), CountingRunner())
    engine.add(request("a", [1]))
    engine.abort("a")
    (event,) = engine.step()
    assert event.receipt is not None
    assert event.receipt.queue_seconds > 0
    assert event.receipt.prefill_seconds == event.receipt.decode_seconds == 0


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(1000.0)
    monkeypatch.setattr("quire.engine.engine.time", SimpleNamespace(time=lambda: next(seconds)))
    engine = make(config(), CountingRunner())
    engine.add(request("late", [1], max_tokens=3000, deadline=1030.0))
    engine.add(request("past", [2], deadline=999.0))
    engine.add(request("fine", [3], max_tokens=20, deadline=1e9))
    news = run(engine)
    assert (news["late"][-1].finish, news["late"][-1].error) == ("abort", "deadline passed")
    assert 0 < len(tokens(news["late"])) < 100
    assert (news["past"][-1].finish, news["past"][-1].error) == ("abort", "deadline passed")
    assert tokens(news["past"]) == []
    assert news["fine"][-1].finish == "length"


def test_a_request_that_can_never_run_gets_an_error_event() -> None:
    engine = make(config(), CountingRunner(), context=64)
    engine.add(request("long", [1] * 64))
    engine.add(request("empty", []))
    assert engine.busy
    news = run(engine)
    assert "64" in (news["long"][-1].error or "")
    assert news["long"][-1].finish == news["empty"][-1].finish == "error"
    assert not engine.busy


def test_a_second_request_with_a_running_id_does_not_disturb_the_first() -> None:
    engine = make(config(), CountingRunner())
    engine.add(request("a", [1]))
    engine.add(request("a", [50]))
    assert tokens(run(engine)["a"]) == [2, 3, 4]


def test_a_scheduler_that_plans_nothing_does_not_make_the_loop_spin() -> None:
    class Stuck:
        admitted: list[str] = []

        def __init__(self) -> None:
            self.ids: list[str] = []

        @property
        def has_work(self) -> bool:
            return bool(self.ids)

        def add(self, request: Request) -> int:
            self.ids.append(request.id)
            return 0

        def abort(self, request_id: str) -> list[Event]:
            self.ids.remove(request_id)
            return [Event(id=request_id, finish="abort")]

        def plan(self) -> None:
            return None

        def commit(self, plan, result):  # type: ignore[no-untyped-def]
            raise AssertionError

        def stats(self) -> Stats:
            return Stats()

    engine = Engine(Stuck(), CountingRunner())
    engine.add(request("a", [1]))
    news = run(engine, limit=STALL + 1)
    assert news["a"][-1].finish == "error"
    assert "progress" in (news["a"][-1].error or "")


def test_what_can_be_done_while_idle_is_done_before_the_loop_sleeps() -> None:
    """And a message that comes meanwhile is taken in between two pieces."""
    left, order = [3], []

    def idle() -> bool:
        left[0] -= 1
        order.append("idle")
        return left[0] >= 0

    class Socket:
        def poll(self, _: int | None) -> None:
            order.append("sleep")

        def recv(self, _: int) -> bytes:
            if "sleep" in order:
                return wire.encode(wire.Shutdown())
            order.append("look")
            raise zmq.Again

    other = make(config(), CountingRunner())
    assert not other.idle()
    engine = Engine(other._scheduler, other._runner, idle=idle)
    socket: Any = Socket()
    assert serve(engine, socket, lambda _: None) == 0
    assert order == ["idle", "look"] * 3 + ["idle", "sleep"]


def test_what_was_loaded_is_left_alone_by_the_collector_until_the_end():
    engine = make(EngineConfig(path=""), CountingRunner())
    engine.settle()
    assert gc.get_freeze_count() > 0
    engine.close()
    assert gc.get_freeze_count() == 0


class Watching(NoAdapters):
    """Hooks about one field, which note what they see."""

    fields = ("adapter",)

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_request(self, request: Request) -> Request:
        self.seen.append(f"+{request.id}")
        return msgspec.structs.replace(request, adapter="")

    def on_end(self, request_id: str) -> None:
        self.seen.append(f"-{request_id}")


def test_hooks_see_the_requests_that_have_one_of_their_fields() -> None:
    engine = make(config(), CountingRunner())
    hooks = Watching()
    engine = Engine(engine._scheduler, engine._runner, hooks=hooks)
    engine.add(request("plain", [5]))
    engine.add(request("own", [5], adapter="x"))
    engine.add(request("too long", [5] * 10_000, adapter="x"))
    news = run(engine)
    assert {name: events[-1].finish for name, events in news.items()} == {
        "plain": "length",
        "own": "length",
        "too long": "error",
    }
    assert hooks.seen == ["+own", "+too long", "-too long", "-own"]


def test_an_engine_without_adapters_and_spans_refuses_both() -> None:
    engine = make(config(), CountingRunner())
    span = Span(start=0, length=1, kind="image", digest=bytes(16), rows=bytes(4))
    engine.add(request("adapter", [5], adapter="x"))
    engine.add(request("span", [5], spans=(span,)))
    news = run(engine)
    assert "not loaded" in (news["adapter"][-1].error or "") and "text alone" in (news["span"][-1].error or "")
