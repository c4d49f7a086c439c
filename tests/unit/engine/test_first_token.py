"""The promise of a first token: who is refused, with what, and how near what is predicted comes to what a device that follows a law does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.first_token import CODE, FirstToken
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.types import EngineInfo, Request
from quire.observe.errors import BadRequest, Busy
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result, Row
from tests.null.timed import Law, Timed

LAW = Law(noise=0.0)


def promised(target: float, taught: bool = True, slots: int = 64) -> tuple[Timed, FirstToken]:
    timed = Timed(LAW, None)
    limit = FirstToken(target, timed.pace, slots, 512, lambda seq: 0)
    scheduler: Any = timed.scheduler
    scheduler._limits = (*scheduler._limits, limit)
    scheduler._admission._limits = scheduler._limits
    scheduler._arriving.append(limit)
    scheduler._learning.append(limit)
    if taught:
        limit.target = 1e9
        timed.prompt(3000)
        timed.prompt(4000)
        limit.target = target
    return timed, limit


def test_nothing_is_refused_before_anything_is_known() -> None:
    timed, _ = promised(0.001, taught=False)
    timed.add(5000)


def test_a_queue_that_is_too_long_is_told_with_the_time_to_come_back() -> None:
    timed, limit = promised(8.0)
    work = 2000 * LAW.token
    added = 0
    with pytest.raises(Busy) as refused:
        for _ in range(100):
            timed.add(2000)
            added += 1
    assert 8.0 / work * 0.7 <= added <= 8.0 / work, "prompts of 1.4 s and some attention"
    assert refused.value.code == CODE and refused.value.status == 429
    seconds = limit.predict(2000) - 8.0
    assert refused.value.retry_after == pytest.approx(seconds) and 0 < seconds < 3
    assert "8 s" in refused.value.message
    assert timed.scheduler.stats().waiting == added, "who was refused is not in the queue"
    at = timed.clock
    while timed.clock < at + 1.05 * seconds:
        timed.step()
    timed.add(2000)


def test_a_prompt_that_alone_takes_longer_is_not_told_to_come_back() -> None:
    timed, _ = promised(2.0)
    with pytest.raises(BadRequest, match="alone takes"):
        timed.add(6000)
    timed.add(1000)


def test_a_short_prompt_is_not_refused_for_a_long_one_that_it_overtakes() -> None:
    timed, limit = promised(1.0)
    limit.target = 100.0
    timed.add(19_000)
    limit.target = 1.0
    with pytest.raises(Busy):
        timed.add(1200)
    came, name = timed.clock, timed.add(100)
    timed.until(lambda: name in timed.first)
    assert timed.first[name] - came < 1.0


def test_what_can_wait_and_what_shares_a_prompt_is_not_refused() -> None:
    timed, limit = promised(0.5)
    timed.add(5000, priority=1)
    timed.add(5000, follows="r3")
    assert limit.predict(100) < 1.0


@pytest.mark.parametrize("streams", [0, 1, 4])
def test_what_is_predicted_is_what_comes(streams: int) -> None:
    timed, limit = promised(1e9)
    timed.streams(streams)
    timed.prompt(1000)
    for _ in range(3):
        timed.add(3000)
    seconds, came, name = limit.predict(3000), timed.clock, timed.add(3000)
    timed.until(lambda: name in timed.first)
    assert seconds == pytest.approx(timed.first[name] - came, rel=0.3)


def test_its_books_are_empty_when_all_is_done() -> None:
    timed, limit = promised(1e9)
    for i in range(20):
        name = timed.add(300 * (1 + i % 7), 3)
        if i % 3 == 0:
            timed.scheduler.abort(name)
        timed.step()
    timed.until(lambda: not timed.scheduler.has_work)
    assert not limit._due and not limit._running and max(limit._work) < 1e-9


def test_all_slots_are_taken_and_the_wait_for_one_counts() -> None:
    timed, limit = promised(1e9, slots=2)
    for _ in range(8):
        timed.add(20, 100)
    timed.until(lambda: timed.scheduler.stats().running <= 2)
    free = limit.predict(20)
    timed.add(20, 100)
    timed.add(20, 100)
    for _ in range(3):
        timed.step()
    assert limit.predict(20) > free + 0.1


class Echo:
    """A runner that computes nothing."""

    def forward(self, plan: Plan) -> Plan:
        return plan

    def sample(self, pending: Plan, masks: Any = None) -> Any:
        self.plan = pending
        return self

    def result(self) -> Result:
        return Result([Row(w.n, [7] if w.sample else []) for w in self.plan.work])

    def close(self) -> None:
        pass


def test_a_client_is_told_as_it_is_of_a_full_queue() -> None:
    timed, _ = promised(3.0)
    engine = Engine(timed.scheduler, Echo())
    told: Any = EngineInfo(
        model="m",
        architecture="a",
        vocab_size=9,
        context=9000,
        max_seqs=9,
        max_batch_tokens=512,
        pages=9,
        page_size=16,
        backend="b",
        weight_bytes=1,
        kv_bytes=1,
    )

    async def ask(tokens: int) -> None:
        request = Request(id="x", tokens=[1] * tokens, sampling=SamplingParams(max_tokens=1))
        async for _ in client.generate(request):
            pass

    async def both() -> None:
        await client.start()
        with pytest.raises(Busy) as refused:
            engine_is_full()
            await ask(2000)
        assert refused.value.code == CODE and refused.value.retry_after > 0
        await client.close()

    def engine_is_full() -> None:
        """As if there were work for 5 seconds."""
        limit = next(own for own in timed.scheduler._limits if isinstance(own, FirstToken))
        limit._work[12] += 5.0

    client = InProcessClient(EngineConfig(path=""), build=lambda *_, **__: (engine, told))
    asyncio.run(both())
