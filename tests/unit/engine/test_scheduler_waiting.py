"""What waits costs a plan nothing: operations are counted, with one waiting sequence and with ten thousand, behind short prefixes and long."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from quire.cache.groups import Window
from quire.cache.pages import Pool
from quire.cache.prefix_tree import Lease, PrefixTree
from quire.engine.admission import LOOKED_UP
from quire.engine.limits import Limit, standard
from quire.engine.policy import FirstCome, Policy
from quire.engine.scheduler import PASSED, Scheduler
from quire.engine.sequence import Sequence
from quire.engine.types import Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result, Row

P = 16


class Counted(PrefixTree):
    """Notes every lookup, by the pages of its prompt."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lookups: list[int] = []

    def match(self, namespace: str, tokens: Any, upto: int | None = None) -> Lease:
        self.lookups.append(len(tokens) // P)
        return super().match(namespace, tokens, upto)


class Asked(Limit):
    """Is asked last, and counts how often the scheduler asks for a grant."""

    admission_only = True

    def __init__(self) -> None:
        self.times = 0

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        self.times += 1
        return n


def lines(call: Callable[[], Any]) -> int:
    """How many lines of Python a call runs, here and in all that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Bench:
    """A scheduler whose sequences sample 7s for ever."""

    def __init__(
        self, pages: int, *, slots: int = 16, budget: int = 512, rows: int = 1024, policy: Policy | None = None
    ) -> None:
        self.tree = Counted(Pool(pages), P)
        self.asked = Asked()
        self.scheduler = Scheduler(
            self.tree,
            slots=slots,
            budget=budget,
            context=1 << 20,
            draw=lambda: 1,
            limits=(*standard(rows, P), self.asked),
            policy=policy,
        )
        self.plans = 0

    def add(self, name: str, tokens: list[int], follows: str | None = None, **options: Any) -> int:
        return self.scheduler.add(
            Request(id=name, tokens=tokens, sampling=SamplingParams(**options), follows=follows),
        )

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def commit(self, plan: Plan) -> None:
        self.scheduler.commit(plan, Result([Row(w.n, [7] if w.sample else []) for w in plan.work]))

    def step(self) -> Plan:
        plan = self.plan()
        self.commit(plan)
        return plan

    def decoders(self, count: int = 8) -> None:
        for i in range(count):
            self.add(f"d{i}", [1000 + i] * 3)
        self.step()

    def steady(self) -> tuple[int, int, int]:
        """The most that one of some plans in a row costs: lines, lookups, and questions to a limit."""
        most = 0
        for _ in range(3):  # whatever is new is looked at once
            self.step()
        self.tree.lookups.clear()
        self.asked.times = 0
        for _ in range(P + 1):  # in some of them decoders need a page
            made: list[Plan] = []
            most = max(most, lines(lambda made=made: made.append(self.plan())))
            self.commit(made[0])
        return most, len(self.tree.lookups), self.asked.times


def blocked(prefix: int, waiting: int, decoders: int = 8) -> Bench:
    """Decoders, and one request behind a cached prefix that needs a few pages more than there are, and others behind it."""
    bench = Bench(prefix // P + 54)
    bench.add("cached", [5] * prefix, max_tokens=1)
    while bench.scheduler.has_work:
        bench.step()
    bench.decoders(decoders)
    for i in range(waiting):
        bench.add(f"w{i}", [i + 10] * 40 if i else [5] * prefix + [9] * 800)
    return bench


@pytest.mark.parametrize("prefix", [1024, 65536])
def test_a_plan_costs_the_same_behind_any_prefix(prefix: int) -> None:
    """Without a waiting sequence, with one and with ten thousand, a plan is the work of its decoders."""
    free = blocked(prefix, 0).steady()[0]
    for waiting in (1, 100, 10_000):
        cost, lookups, asked = blocked(prefix, waiting).steady()
        assert (lookups, asked) == (0, 0)
        assert cost <= free + 35, "the head of the queue is looked at, and remembered"


def test_who_did_not_fit_is_looked_up_once() -> None:
    bench = blocked(4096, 3)
    bench.tree.lookups.clear()
    for _ in range(20):
        bench.step()
    assert len(bench.tree.lookups) == 1


def test_who_did_not_fit_goes_when_pages_come_back() -> None:
    """Not in the plan after, nor a hundred plans later: in the first one that has them."""
    bench = Bench(80)
    bench.add("cached", [5] * 1024, max_tokens=1)
    while bench.scheduler.has_work:
        bench.step()
    bench.add("d", [6] * 100)  # seven pages, and more while it goes on
    bench.step()
    key = bench.add("w", [5] * 1024 + [9] * 200)
    assert key not in [w.key for w in bench.step().work]
    bench.tree.lookups.clear()
    assert key not in [w.key for w in bench.step().work]
    bench.scheduler.abort("d")
    assert [(w.key, w.start) for w in bench.step().work] == [(key, 1024)] and len(bench.tree.lookups) == 1


def test_pages_that_come_back_for_nothing_do_not_look_up_a_long_prefix_each_time() -> None:
    """Others that share its prefix go one by one: their pages are then free, and needed. That is found out now and then."""
    prefix, sharers = 16384, 12
    bench = Bench(prefix // P + 200, slots=32)
    bench.add("cached", [5] * prefix, max_tokens=1)
    while bench.scheduler.has_work:
        bench.step()
    bench.decoders(2)
    for i in range(sharers):
        bench.add(f"s{i}", [5] * (prefix - P * i * 20) + [50 + i] * 40)
        bench.step()
    bench.add("w", [5] * prefix + [9] * 16 * 190)
    bench.step()
    bench.tree.lookups.clear()
    plans = 0
    for i in range(sharers):
        bench.scheduler.abort(f"s{i}")
        for _ in range(4):
            bench.step()
            plans += 1
    assert sum(bench.tree.lookups) <= 2 * (prefix // P + 200) + LOOKED_UP * plans


@pytest.mark.parametrize("waiting", [1, 100, 10_000])
def test_no_slot_is_free(waiting: int) -> None:
    bench, free = Bench(4096, slots=8), Bench(4096, slots=8)
    bench.decoders()
    free.decoders()
    for i in range(waiting):
        bench.add(f"w{i}", [i] * 20)
    cost, lookups, asked = bench.steady()
    assert (lookups, asked) == (0, 0) and cost <= free.steady()[0] + 12


@pytest.mark.parametrize("waiting", [1, 100, 10_000])
@pytest.mark.parametrize("kind", ["follows", "same"])
def test_who_waits_for_a_long_prompt_is_asked_once(kind: str, waiting: int) -> None:
    """Followers, and requests with the same prompt: they are out of the queue until the prompt is computed."""
    bench = Bench(256, slots=64, budget=2)  # it takes a while
    bench.add("long", [3] * 2048)
    bench.step()
    free = bench.steady()[0]
    for i in range(waiting):
        if kind == "follows":
            bench.add(f"w{i}", [3, 4, i], follows="long")
        else:
            bench.add(f"w{i}", [3] * 1024)
    for _ in range(waiting // PASSED + 2):  # each is asked about once, some in every plan
        bench.asked.times = 0
        bench.step()
        assert bench.asked.times <= 8
    cost, lookups, asked = bench.steady()
    assert lookups == 0 and asked == 0
    assert cost <= free + 25
    assert bench.scheduler.stats().waiting == waiting
    bench.scheduler.abort("long")
    plan = bench.plan()
    assert len(plan.work) == min(waiting, 1 if kind == "same" else 2)


@pytest.mark.parametrize("waiting", [100, 1000])
def test_who_has_no_rows_in_this_step_is_passed_and_not_forgotten(waiting: int) -> None:
    """Prompt logprobs take a row each, and there are none left. What asks for none goes by; a plan asks a bounded number."""
    bench = Bench(8192, slots=64, rows=8)
    bench.decoders(8)
    for i in range(waiting):
        bench.add(f"p{i}", [i + 10] * 40, prompt_logprobs=0, max_tokens=1)
    key = bench.add("plain", [2] * 40, max_tokens=1)
    for _ in range(waiting // PASSED + 3):
        made: list[Plan] = []
        assert lines(lambda made=made: made.append(bench.plan())) < 90 * PASSED
        bench.commit(made[0])
        if key in [w.key for w in made[0].work]:
            break
    else:
        pytest.fail("it never had its turn")
    for i in range(8):
        bench.scheduler.abort(f"d{i}")
    for _ in range(8 * waiting):
        if not bench.scheduler.has_work:
            return
        bench.step()
    pytest.fail("some of them wait for ever")


def test_windows_do_not_look_up_again_either() -> None:
    """In a group with a window, decoders give pages back all the time: that is not room for a prompt."""
    tree = Counted(Pool(1024 + 40), P, None, [(Window(64), Pool(140))])
    scheduler = Scheduler(tree, slots=16, budget=512, context=1 << 20, draw=lambda: 1)

    def step() -> None:
        plan = scheduler.plan()
        assert plan is not None
        scheduler.commit(plan, Result([Row(w.n, [7] if w.sample else []) for w in plan.work]))

    scheduler.add(Request(id="cached", tokens=[5] * 16384, sampling=SamplingParams(max_tokens=1)))
    while scheduler.has_work:
        step()
    for i in range(4):
        scheduler.add(Request(id=f"d{i}", tokens=[i + 10] * 40, sampling=SamplingParams()))
    step()
    scheduler.add(Request(id="w", tokens=[5] * 16384 + [8] * 600, sampling=SamplingParams()))
    step()
    tree.lookups.clear()
    for _ in range(100):
        step()
    assert scheduler.stats().waiting == 1 and len(tree.lookups) <= 2


def test_first_come_costs_no_more() -> None:
    bench = Bench(2000, policy=FirstCome())
    bench.add("long", [3] * 25_000)
    bench.step()
    free = bench.steady()[0]
    for i in range(1000):
        bench.add(f"w{i}", [i] * 20)
    assert bench.steady()[0] <= free + 30
