"""Steps that are bounded in time, beside a device that follows a law: what streams feel, what prompts pay, and what the tests see."""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass
from types import ModuleType

import pytest

import quire.engine.limits
import quire.engine.pacing
import quire.observe.costs
from quire.engine.pacing import FLOOR, LEAST, NEWCOMER, TIMES, Pace
from quire.observe.costs import Costs, Shape, pairs
from quire.observe.steps import STEP_TIME
from tests.null.timed import Law, Parts, Timed, late

CPU = Law()
GPU = Law(fixed=0.006, row=2e-5, token=3e-5, position=1e-8, pair=2e-9)


def bounded(law: Law, parts: Parts, depth: int = 0, streams: int = 1, prompt: int = 6000, times: float = 6.0) -> None:
    """After one prompt that teaches, the next ones keep to the bound, and are slowed by no more than a quarter."""
    alone = law.fixed + streams * (law.row + 150 * law.position)
    bound = times * alone
    timed = Timed(law, bound, depth, parts, budget=512 if law.token > 1e-4 else 8192)
    timed.streams(streams)
    timed.prompt(prompt)
    seconds, steps = timed.prompt(prompt)
    assert late(steps) <= bound * 1.001, (late(steps), bound)
    work = law.token * prompt + law.pair * prompt * prompt / 2
    if times > 5:
        alone += law.position * streams * len(timed.taken)
        assert seconds <= 1.25 * (work + alone * work / (bound - alone)), "slowed by more than what the streams take"


@pytest.mark.parametrize("law", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("streams", [1, 8])
def test_streams_keep_their_bound_and_prompts_move(law: Law, depth: int, streams: int) -> None:
    bounded(law, Parts(), depth, streams)


def test_without_a_bound_a_prompt_takes_whole_steps() -> None:
    """What the bound is compared with."""
    timed = Timed(CPU, 0)
    timed.streams(1)
    _, steps = timed.prompt(6000)
    assert max(steps) > 0.4


@pytest.mark.parametrize("times", [5.0, 8.0, 20.0])
def test_a_prompt_pays_a_quarter_at_most(times: float) -> None:
    """Beside the time that it takes alone, with bounds of five steps of decoding and more."""
    alone = Timed(CPU, None)
    whole, _ = alone.prompt(6000)
    timed = Timed(CPU, times * (CPU.fixed + CPU.row))
    timed.streams(1)
    timed.prompt(2000)
    seconds, _ = timed.prompt(6000)
    # each step of decoding costs what it costs: a quarter is for the steps of the streams, and 12 % for the margin and whole tiles
    assert seconds <= 1.25 * whole * 1.12, seconds / whole


def test_nobody_decodes_and_a_step_is_what_a_newcomer_can_wait_for() -> None:
    timed = Timed(Law(token=0.004), None)
    timed.prompt(3000)
    timed.add(9000)
    for _ in range(12):
        timed.step()
    assert all(0.6 * NEWCOMER < t.seconds <= 1.05 * NEWCOMER for t in timed.taken[-8:]), timed.taken[-8:]


def test_the_bound_that_nobody_set() -> None:
    slow = Law(fixed=0.05, token=0.004)
    for law, bound in ((CPU, FLOOR), (slow, TIMES * (slow.fixed + slow.row))):
        timed = Timed(law, None)
        timed.streams(1)
        timed.prompt(2000)
        _, steps = timed.prompt(1500)
        assert late(steps) <= 1.03 * bound and timed.scheduler.stats().step_bound == pytest.approx(bound, rel=0.1)


def test_a_short_prompt_beside_a_long_one_that_a_slow_machine_computes() -> None:
    """100 tokens beside 19,000, 5 ms each: the first token within 2 s, and then half of the usual rate or more."""
    law = Law(fixed=0.05, token=0.005, pair=2e-7)
    timed = Timed(law, None)
    timed.streams(0)
    timed.add(19_000)
    while timed.clock < 10:
        timed.step()
    came, name = timed.clock, timed.add(100, 60)
    timed.until(lambda: name in timed.first)
    assert timed.first[name] - came < 2.0
    at = len(timed.taken)
    timed.until(lambda: timed.scheduler.stats().running == 1)
    steps = timed.taken[at:]
    assert sum(t.seconds for t in steps) / len(steps) <= 2.05 * law.fixed
    assert min(t.tokens for t in steps) >= LEAST, "the long one moves in each"


@pytest.mark.parametrize("bound", [0.0001, 0.1])
def test_a_clock_that_stands_still_and_a_bound_that_cannot_be_kept(bound: float) -> None:
    """Prompts move all the same, and finish."""
    for law in (Law(still=True), CPU):
        timed = Timed(law, bound)
        timed.streams(2)
        _, steps = timed.prompt(2000)
        assert len(steps) <= 2000 / LEAST + 2
        assert max(t.tokens for t in timed.taken[-10:]) <= (64 if law.still else 128)


def test_a_slow_phase_is_learned_in_a_few_steps_and_forgotten() -> None:
    law = Law(slow=(600, 1000, 2.5))
    timed = Timed(law, 0.1)
    timed.streams(1)
    while len(timed.taken) < 1200:
        timed.prompt(3000)
    assert sum(t.seconds > 0.1 for t in timed.taken[600:1000] if t.rows) <= 10
    before = [t.tokens for t in timed.taken[500:600] if t.tokens]
    after = [t.tokens for t in timed.taken[1100:1200] if t.tokens]
    assert sum(after) / len(after) > 0.8 * sum(before) / len(before)


def test_steps_in_which_the_process_stood_still_are_not_believed() -> None:
    timed = Timed(Law(stalls=0.005), 0.1)
    timed.streams(1)
    timed.prompt(6000)
    seconds, steps = timed.prompt(6000)
    plain = Timed(CPU, 0.1)
    plain.streams(1)
    plain.prompt(6000)
    assert late(steps) <= 0.1 and seconds < 1.35 * plain.prompt(6000)[0]


def test_a_request_may_have_a_bound_of_its_own() -> None:
    timed = Timed(CPU, 0.2)
    timed.streams(1)
    timed.prompt(3000)
    own = timed.add(20, 1 << 18, itl=0.04)
    timed.until(lambda: own in timed.first)
    timed.prompt(500)
    assert late(timed.prompt(2000)[1]) <= 0.04
    timed.scheduler.abort(own)
    assert late(timed.prompt(4000)[1]) > 0.12, "it is gone, and its bound with it"


def test_a_step_says_what_held_its_prompts_back() -> None:
    timed = Timed(CPU, 0.05)
    timed.streams(1)
    timed.prompt(1000)
    timed.add(4000)
    timed.step()
    assert timed.held == {STEP_TIME: 1}


def test_what_a_plan_costs_does_not_grow_with_the_queue() -> None:
    """Counted in questions to the budget, and not in seconds."""

    def asked(waiting: int) -> int:
        timed = Timed(CPU, 0.05)
        timed.streams(1)
        timed.prompt(1000)
        for _ in range(waiting):
            timed.add(3000)
        timed.step()
        calls: list[int] = []

        class Counted(Pace):
            def fit(self, start: int, n: int) -> int:
                calls.append(n)
                return super().fit(start, n)

        timed.scheduler._budget._pace = counted = Counted(timed.costs, 0.05)  # pyright: ignore
        counted.seen.extend(timed.pace.seen)
        for _ in range(20):
            timed.step()
        return len(calls)

    assert 0 < asked(2000) <= asked(100) + 20


# ---- the model by itself


def taught(law: Law, shapes: list[Shape], seed: int = 1) -> Costs:
    import random

    rng, costs = random.Random(seed), Costs()
    for shape in shapes:
        costs.learn(shape, true(law, shape) * rng.uniform(0.97, 1.03))
    return costs


def true(law: Law, s: Shape) -> float:
    return law.fixed + law.row * s.rows + law.token * s.tokens + law.position * s.context + law.pair * s.pairs


def test_one_long_prompt_and_one_stream_teach_what_others_cost() -> None:
    prompt = [Shape(0, 0, 512, pairs(at, 512)) for at in range(0, 8192, 512)]
    decode = [Shape(rows, rows * (100 + at), 0, 0) for at in range(60) for rows in (1, 2, 8)]
    costs = taught(CPU, prompt + decode)
    for shape in (Shape(1, 400, 512, pairs(3000, 512)), Shape(8, 900, 0, 0), Shape(0, 0, 256, pairs(12_000, 256))):
        assert costs.seconds(shape) == pytest.approx(true(CPU, shape), rel=0.15)
    whole = sum(true(CPU, Shape(0, 0, 512, pairs(at, 512))) for at in range(0, 19456, 512))
    assert costs.prefill(19456, step=512) == pytest.approx(whole, rel=0.1)
    rest = sum(true(CPU, Shape(0, 0, 512, pairs(at, 512))) for at in range(4096, 8192, 512))
    assert costs.prefill(4096, depth=4096, step=512) == pytest.approx(rest, rel=0.1)


def test_what_fits_fits_and_one_tile_more_does_not() -> None:
    costs = taught(CPU, [Shape(1, 300, n, pairs(at, n)) for at in range(0, 8000, 300) for n in (16, 64, 256)])
    for start in (0, 1000, 7000):
        n = costs.within(Shape(1, 300), start, 512, 0.1)
        assert costs.seconds(Shape(1, 300, n, pairs(start, n))) <= 0.1
        assert costs.seconds(Shape(1, 300, n + 16, pairs(start, n + 16))) > 0.1


def test_seconds_that_are_none_teach_nothing_and_the_same_steps_teach_the_same() -> None:
    costs = Costs()
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        costs.learn(Shape(1, 10), bad)
        costs.learn(Shape(0, 0, 10, 55), bad)
    assert not costs.known and costs.seconds(Shape(1, 10)) == 0.0 and costs.prefill(100) == 0.0
    shapes = [Shape(1, at, 32, pairs(at, 32)) for at in range(500)]
    assert taught(CPU, shapes).state() == taught(CPU, shapes).state()


def test_what_was_learned_can_be_kept() -> None:
    import json

    costs = taught(CPU, [Shape(1, at, 32 * (at % 2), pairs(at, 32 * (at % 2))) for at in range(300)])
    again = Costs.of(json.loads(json.dumps(costs.state())))
    for shape in (Shape(4, 900), Shape(1, 50, 200, pairs(9000, 200))):
        assert again.seconds(shape) == costs.seconds(shape)
    for broken in (
        {},
        {"form": 2},
        costs.state() | {"decode": {"cells": [[1, 2, 3]]}},
        costs.state() | {"spread": "x"},
    ):
        with pytest.raises(ValueError):
            Costs.of(broken)


def test_it_stays_small() -> None:
    costs = Costs()
    for at in range(20_000):
        n = 1 + at * 7919 % 8192
        costs.learn(Shape(at % 300, at * 31 % 100_000, n * (at % 3 > 0), pairs(at * 17 % 100_000, n)), 0.001 + at % 7)
    assert len(json_of(costs)) < 60_000


def json_of(costs: Costs) -> str:
    import json

    return json.dumps(costs.state())


# ---- planted faults


@dataclass
class Fault:
    name: str
    part: str
    old: str
    new: str


MODULES = {"costs": quire.observe.costs, "pacing": quire.engine.pacing, "limits": quire.engine.limits}
FAULTS = [
    Fault("what was seen is not learned", "pacing", "self.costs.learn(Shape(*shape), seconds)", "pass"),
    Fault("no margin", "pacing", "/ self.costs.spread", ""),
    Fault("depth is not looked at", "costs", "a + b * u + c * v) *", "a + b * u) *"),
    Fault("chunks that are not counted", "limits", "self._pace.charge(start, n)", "pass"),
    Fault("the bound of a newcomer beside streams", "pacing", "if not rows:", "if True:"),
    Fault("no chunk but a whole tile", "pacing", "(LEAST if rows else ALONE) - tokens", "0"),
    Fault("all that is left", "limits", "if left < self.left:", "if False:"),
]


def planted(fault: Fault) -> Parts:
    module = MODULES[fault.part]
    text = inspect.getsource(module)
    assert text.count(fault.old) == 1, fault.old
    made = ModuleType(module.__name__)
    import sys

    sys.modules[f"{module.__name__}_planted"] = made
    exec(compile(text.replace(fault.old, fault.new), f"<{fault.name}>", "exec"), made.__dict__)
    return Parts(**{fault.part: made})


def everything(parts: Parts) -> None:
    """What a fault must break."""
    bounded(CPU, parts)
    bounded(Law(fixed=0.006, row=2e-5, token=3e-5, position=1e-8, pair=2e-8), parts, 1, 8, prompt=60_000)
    two = Timed(CPU, 0.06, parts=parts)
    two.streams(1)
    two.prompt(3000)
    names = [two.add(3000), two.add(3500)]
    at = len(two.taken)
    two.until(lambda: all(name in two.first for name in names))
    assert late([t.seconds for t in two.taken[at:] if t.rows]) <= 0.06
    assert sum(t.tokens for t in two.taken[at:]) / len(two.taken[at:]) > 30
    deep = Timed(CPU, 0.06, parts=parts)  # a later prompt, far behind its cached beginning, whose tokens cost more
    begins = deep.tokens(12_000)
    deep.prompt(begins)
    deep.streams(1)
    deep.prompt(3000)
    at = len(deep.taken)
    names = [deep.add(4000), deep.add([*begins, *deep.tokens(600)])]
    deep.until(lambda: all(name in deep.first for name in names))
    assert late([t.seconds for t in deep.taken[at:] if t.rows], 0.95) <= 0.06
    assert deep.costs.seconds(Shape(0, 0, 256, pairs(12_000, 256))) == pytest.approx(0.65, rel=0.25)
    short = Timed(CPU, 0.06, parts=parts)
    short.streams(1)
    short.prompt(3000)
    short.add(15_000)
    short.step()
    came, name = short.clock, short.add(50)
    short.until(lambda: name in short.first)
    assert short.clock - came < 0.3
    tight = Timed(CPU, 0.0001, parts=parts)
    tight.streams(1)
    _, steps = tight.prompt(800)
    assert len(steps) <= 800 / LEAST + 2


def test_without_a_fault_everything_holds() -> None:
    everything(Parts())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_seen(fault: Fault) -> None:
    with pytest.raises((AssertionError, ArithmeticError)):
        everything(planted(fault))


def test_the_arithmetic_is_cheap() -> None:
    """A hundred times what it takes, so that no clock decides: it would be noticed if a plan went through all it has seen."""
    costs = taught(CPU, [Shape(1, 300, n, pairs(at, n)) for at in range(0, 8000, 100) for n in (16, 64, 256)])
    began = time.process_time()
    for at in range(200):
        costs.learn(Shape(1, 300, 64, pairs(at, 64)), 0.05)
        costs.within(Shape(1, 300), at, 512, 0.1)
    assert (time.process_time() - began) / 200 < 0.01
