"""The in-process client over the counting engine: many loops, early exits, a full queue, closing."""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.types import Event, Request
from quire.observe.errors import BadModelFile, BadRequest, Busy, EngineDead, NotFound, QuireError, Unavailable
from quire.runner.params import SamplingParams
from tests.unit.engine.fake_engine import build


def client(path: str = "", **options: object) -> InProcessClient:
    return InProcessClient(EngineConfig(path=path, **options), build=build)  # type: ignore[arg-type]


def request(name: str, start: int, max_tokens: int | None = 3) -> Request:
    return Request(id=name, tokens=[start], sampling=SamplingParams(max_tokens=max_tokens))


async def collect(c: InProcessClient, r: Request) -> list[Event]:
    return [event async for event in c.generate(r)]


def tokens(events: list[Event]) -> list[int]:
    return [t for e in events for t in e.tokens]


async def until(check: object, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not check():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen"
        await asyncio.sleep(0.005)


async def test_many_requests_at_once() -> None:
    c = client(max_seqs=4)
    assert c.info is None
    assert not c.alive
    info = await c.start()
    assert (info, c.alive) == (c.info, True)
    answers = await asyncio.gather(*(collect(c, request(f"r{i}", i, i + 1)) for i in range(20)))
    for i, events in enumerate(answers):
        assert tokens(events) == [i + 1 + k for k in range(i + 1)]
        assert events[-1].finish == "length"
        assert events[-1].receipt is not None
    assert c.stats().output_tokens == sum(range(1, 21))
    await c.close()
    assert not c.alive


async def test_loops_in_several_threads_share_it() -> None:
    c = client("slow=0.002", max_seqs=8)
    await c.start()
    answers: dict[int, list[int]] = {}

    def other(i: int) -> None:
        answers[i] = tokens(asyncio.run(collect(c, request(f"t{i}", 10 * i, 20))))

    threads = [threading.Thread(target=other, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    mine = tokens(await collect(c, request("mine", 500, 20)))
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert mine == list(range(501, 521))
    assert answers == {i: list(range(10 * i + 1, 10 * i + 21)) for i in range(4)}
    await c.close()


async def test_leaving_early_aborts_within_a_step() -> None:
    c = client("slow=0.01")
    await c.start()
    stream = c.generate(request("a", 1, None))
    async for event in stream:
        assert event.tokens == [2]
        break
    await stream.aclose()
    left_at = c.stats().steps
    await until(lambda: c.stats().running == 0)
    assert c.stats().pages_used == 0
    assert c.stats().steps <= left_at + 2
    # The name is free again at once.
    assert tokens(await collect(c, request("a", 5))) == [6, 7, 8]
    await c.close()


async def test_cancelling_the_reader_aborts() -> None:
    c = client("slow=0.01")
    await c.start()
    task = asyncio.create_task(collect(c, request("a", 1, None)))
    await until(lambda: c.stats().running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: c.stats().running == 0)
    await c.close()


async def test_abort_by_name_ends_the_stream() -> None:
    c = client("slow=0.01")
    await c.start()
    events = []
    async for event in c.generate(request("a", 1, None)):
        events.append(event)
        if len(events) == 2:
            c.abort("a")
    assert events[-1].finish == "abort"
    assert len(events) <= 5
    c.abort("a")  # no longer there: nothing happens
    await c.close()


async def test_a_full_queue_says_when_to_come_back() -> None:
    c = client("slow=0.005", max_seqs=2, max_waiting=3)
    await c.start()
    tasks = [asyncio.create_task(collect(c, request(f"r{i}", i, 30))) for i in range(5)]
    await asyncio.sleep(0)
    with pytest.raises(Busy) as caught:
        await collect(c, request("one more", 1))
    assert 1 <= caught.value.retry_after <= 60
    assert "5 requests" in str(caught.value)
    for i, task in enumerate(tasks):
        assert len(tokens(await task)) == 30, i
    assert tokens(await collect(c, request("one more", 1))) == [2, 3, 4]
    await c.close()


async def test_a_name_in_use_is_refused() -> None:
    c = client("slow=0.01")
    await c.start()
    task = asyncio.create_task(collect(c, request("a", 1, 10)))
    await asyncio.sleep(0)
    with pytest.raises(BadRequest, match="already running"):
        await collect(c, request("a", 50))
    assert tokens(await task) == list(range(2, 12))
    await c.close()


async def test_a_bad_request_ends_in_an_error_event() -> None:
    c = client()
    await c.start()
    (event,) = await collect(c, Request(id="a", tokens=[1] * 5000))
    assert event.finish == "error"
    assert "context" in (event.error or "")
    await c.close()


async def test_loading_errors_are_the_real_ones() -> None:
    with pytest.raises(BadModelFile, match="byte 12"):
        await client("bad-model").start()
    with pytest.raises(QuireError, match="ZeroDivisionError: a bug") as caught:
        await client("bug").start()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


async def test_before_start_and_after_close() -> None:
    c = client()
    with pytest.raises(Unavailable, match="not been started"):
        await collect(c, request("a", 1))
    await c.start()
    await c.close()
    await c.close()
    with pytest.raises(Unavailable, match="closed"):
        await collect(c, request("a", 1))


async def test_close_aborts_what_runs() -> None:
    c = client("slow=0.01")
    await c.start()
    task = asyncio.create_task(collect(c, request("a", 1, None)))
    await until(lambda: c.stats().running == 1)
    await asyncio.wait_for(c.close(), 20)  # all of it would take twice as long
    assert (await task)[-1].finish == "abort"


async def test_close_drains_when_asked() -> None:
    c = client("slow=0.01")
    await c.start()
    task = asyncio.create_task(collect(c, request("a", 1, 20)))
    await until(lambda: c.stats().running == 1)
    closing = asyncio.create_task(c.close(drain_seconds=10))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        await collect(c, request("late", 1))
    await closing
    assert tokens(await task) == list(range(2, 22))


async def test_closing_while_it_loads_waits_for_the_next_weights_alone() -> None:
    loading, taken = threading.Event(), 0

    def endless(config: EngineConfig, env: object, progress: Callable[[int, int], None]):  # type: ignore[no-untyped-def]
        nonlocal taken
        for taken in range(1000):
            progress(taken, 1000)
            loading.set()
            time.sleep(0.01)
        return build(config, env)  # type: ignore[arg-type]

    c = InProcessClient(EngineConfig(path=""), build=endless)
    start = asyncio.create_task(c.start())
    await asyncio.to_thread(loading.wait)
    await c.close()
    assert taken < 500
    with pytest.raises(Unavailable, match="before it had loaded"):
        await start


async def test_a_fault_in_the_loop_fails_the_requests_and_the_client() -> None:
    from tests.unit.engine.fake_engine import CountingRunner, make

    def faulty(config: EngineConfig, env: object, progress: object = None):  # type: ignore[no-untyped-def]
        engine, info = build(config, env)  # type: ignore[arg-type]
        engine = make(config, CountingRunner())
        engine._scheduler.commit = None  # type: ignore[method-assign, assignment]
        return engine, info

    c = InProcessClient(EngineConfig(path=""), build=faulty)
    await c.start()
    with pytest.raises(EngineDead, match="TypeError"):
        await collect(c, request("a", 1))
    assert not c.alive
    with pytest.raises(EngineDead):
        await collect(c, request("b", 1))


async def test_idle_costs_nothing() -> None:
    c = client()
    await c.start()
    await collect(c, request("a", 1))
    before = resource.getrusage(resource.RUSAGE_SELF)
    await asyncio.sleep(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 0.05  # a thread that looks around all the time uses all of it
    await c.close()


async def test_who_stops_waiting_for_an_adapter_harms_nobody(tmp_path: Path) -> None:
    release = tmp_path / "release"
    c = client("slow=0.05")
    await c.start()
    running = asyncio.create_task(collect(c, request("a", 1, 8)))
    await until(lambda: c.stats().running == 1)
    early = asyncio.create_task(c.load_adapter("early", "x"))  # waits for a step to end
    await asyncio.sleep(0)
    early.cancel()
    late = asyncio.create_task(c.load_adapter("late", "release=" + str(release).replace("/", "|")))
    await until(release.with_suffix(".reached").exists)  # it is being loaded
    late.cancel()
    for task in (early, late):
        with pytest.raises(asyncio.CancelledError):
            await task
    release.touch()
    assert tokens(await running) == list(range(2, 10))
    await until(lambda: [a.name for a in c.adapters] == ["late"])  # as the engine has it
    await c.unload_adapter("late")
    with pytest.raises(NotFound):
        await c.unload_adapter("early")
    await c.close()


async def test_an_engine_that_fails_keeps_nobody_waiting_for_an_adapter() -> None:
    def failing(config: EngineConfig, env: object, progress: object = None):  # type: ignore[no-untyped-def]
        engine, info = build(config, env)  # type: ignore[arg-type]
        engine.add = None  # type: ignore[method-assign, assignment]
        return engine, info

    c = InProcessClient(EngineConfig(path=""), build=failing)
    await c.start()
    with c._wake:  # so that both are there when the thread looks
        c._inbox.append(request("a", 1))
        waiting = asyncio.create_task(c.load_adapter("x", "x"))
        await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="TypeError"):
        await asyncio.wait_for(waiting, 20)
    with pytest.raises(Unavailable):
        await c.load_adapter("y", "y")
