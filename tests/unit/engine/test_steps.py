"""The ring of steps: who rode in each, how long it took, and what held the others back; read through every kind of client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.limits import Limit, standard
from quire.engine.policy import FirstCome
from quire.engine.scheduler import Scheduler
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.transport.process_client import ProcessClient
from quire.engine.types import Request
from quire.observe.errors import Unavailable
from quire.observe.steps import KEPT
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result, Row
from tests.unit.engine.fake_engine import build

BUILDER = "tests.unit.engine.fake_engine:build"


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A runner whose step takes a second for each token, one step after the other, while the host goes on."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free = clock.now

    def forward(self, plan: Plan) -> Plan:
        return plan

    def sample(self, pending: Plan, masks: Any = None) -> Slow.Ticket:
        self.free = max(self.free, self.clock.now) + pending.tokens
        return self.Ticket(self, pending, self.free)

    def close(self) -> None:
        pass

    class Ticket:
        def __init__(self, runner: Slow, plan: Plan, done: float) -> None:
            self.runner, self.plan, self.done = runner, plan, done

        def result(self) -> Result:
            self.runner.clock.now = max(self.runner.clock.now, self.done)
            return Result([Row(w.n, [7] if w.sample else []) for w in self.plan.work])


class Learns(Limit):
    """Is told what steps took."""

    admission_only = True

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def learn(self, plan: Plan, seconds: float) -> None:
        self.told.append((plan.tokens, seconds))


def make(depth: int = 0, pages: int = 64, slots: int = 8, rows: int = 64) -> tuple[Engine, Clock, Learns]:
    clock, learns = Clock(), Learns()
    scheduler = Scheduler(
        PrefixTree(Pool(pages), 4),
        slots=slots,
        budget=16,
        context=1000,
        draw=lambda: 1,
        limits=(*standard(rows, 4), learns),
        policy=FirstCome(),
    )
    return Engine(scheduler, Slow(clock), depth, clock=clock), clock, learns


def ask(name: str, prompt: int, first: int = 10, follows: str | None = None, **options: Any) -> Request:
    tokens = list(range(first, first + prompt))
    return Request(id=name, tokens=tokens, sampling=SamplingParams(**options), follows=follows)


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_takes_from_one_completion_to_the_next(depth: int) -> None:
    """Whatever is in flight beside it: the times of steps add up to the time that the engine was busy, and limits are told the same."""
    engine, clock, learns = make(depth)
    engine.add(ask("a", 20, max_tokens=4))
    engine.add(ask("b", 5, first=500, max_tokens=3))
    run(engine)
    steps = engine.steps()
    assert [s.seconds for s in steps] == [s.tokens for s in steps], "a second for each token"
    assert sum(s.seconds for s in steps) == clock.now - 100
    assert learns.told == [(s.tokens, s.seconds) for s in steps]
    assert [s.step for s in steps] == list(range(len(steps)))
    clock.now += 1000  # nothing to do
    engine.add(ask("c", 3, max_tokens=1))
    run(engine)
    assert engine.steps(1)[0].seconds == 3 and engine.steps(1)[0].ended == clock.now


def test_who_rode_and_what_held_the_others_back() -> None:
    engine, _, _ = make(slots=2)
    engine.add(ask("a", 24, max_tokens=9))
    engine.add(ask("f", 24, follows="a", max_tokens=1))
    engine.add(ask("same", 24, max_tokens=1))
    engine.add(ask("b", 9, first=500, max_tokens=9))
    for _ in range(3):
        engine.step()
    one, two, three = engine.steps()
    assert one.rows == [("a", 16)] and one.waiting == 3
    assert one.held == {"tokens": 1 + 3}, "it is cut, and nobody else is asked about"
    assert two.rows == [("a", 8), ("b", 8)]
    assert two.held == {"follows": 1, "same_prompt": 1, "tokens": 1} and two.waiting == 2
    assert three.rows == [("a", 1), ("b", 1)]
    assert three.held == {"slots": 2} and three.waiting == 2


def test_pages_and_rows_are_reasons() -> None:
    engine, _, _ = make(pages=8)
    engine.add(ask("a", 14, max_tokens=9))
    engine.step()
    engine.add(ask("wide", 16, first=500))
    engine.step()
    assert engine.steps(1)[0].held == {"pages": 1} and engine.steps(1)[0].waiting == 1
    engine, _, _ = make(rows=2)
    engine.add(ask("a", 9, prompt_logprobs=0, max_tokens=1))
    engine.step()
    assert engine.steps(1)[0].held == {"logit_rows": 1} and engine.steps(1)[0].rows == [("a", 2)]


def test_a_sequence_that_gives_way_is_told() -> None:
    engine, _, _ = make(pages=9)
    for i in range(3):
        engine.add(ask(f"s{i}", 7, first=100 * i, max_tokens=20))
    run(engine)
    assert engine.stats().preemptions > 0
    assert sum(s.held.get("pages", 0) > 0 for s in engine.steps()) >= engine.stats().preemptions


def test_a_step_that_fails_is_noted_with_its_time() -> None:
    engine, clock, _ = make(depth=1)
    engine.add(ask("a", 5))
    failing: Any = engine._runner.sample

    def sample(plan: Plan, masks: Any = None) -> Any:
        ticket = failing(plan, masks)

        def result() -> Result:
            clock.now += 7
            raise RuntimeError("no")

        ticket.result = result
        return ticket

    runner: Any = engine._runner
    runner.sample = sample
    run(engine)
    assert engine.steps()[0].rows == [("a", 5)] and engine.steps()[0].seconds == 7


def test_the_ring_is_bounded() -> None:
    engine, _, _ = make()
    engine.add(ask("a", 3, max_tokens=500))
    engine._scheduler.context = 1000  # type: ignore[attr-defined]
    for _ in range(KEPT + 50):
        engine.add(ask(f"r{_}", 2, max_tokens=1))
        engine.step()
    told = [step.step for step in engine.steps(1 << 30)]
    assert told == list(range(told[-1] - KEPT + 1, told[-1] + 1))
    assert [step.step for step in engine.steps(2)] == told[-2:]
    assert engine.steps(0) == engine.steps(-5) == []


def clients() -> list[Callable[[], Any]]:
    config = EngineConfig(path="nothing")
    return [
        lambda: InProcessClient(config, build=build),
        lambda: ProcessClient(config, builder=BUILDER),
    ]


@pytest.mark.parametrize("make_client", clients(), ids=["in process", "process"])
async def test_every_client_tells_them(make_client: Callable[[], Any]) -> None:
    client = make_client()
    await client.start()
    try:
        async for _ in client.generate(ask("mine", 5, max_tokens=3)):
            pass
        steps = await client.steps()
        assert steps and all(s.seconds >= 0 for s in steps)
        assert {name for s in steps for name, _ in s.rows} == {"mine"}
        assert len(await client.steps(1)) == 1 and await client.steps(0) == []
        many = await asyncio.gather(*(client.steps(2) for _ in range(20)))
        assert all(len(told) == 2 for told in many)
    finally:
        await client.close()
    with pytest.raises(Unavailable):
        await client.steps()
