"""The figures of `quire bench`: statistics beside numpy, and an engine whose clock moves by what it computes."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.measure import (
    Round,
    Run,
    Shape,
    Span,
    Trace,
    drive,
    greedy,
    latency_round,
    percentile,
    summarize,
    synthetic,
    token_ids,
)
from quire.engine.types import Event, Receipt, Request, Stats
from quire.observe.errors import QuireError
from quire.runner.plan import Plan
from tests.unit.engine.fake_engine import POISON, VOCAB, CountingRunner, make

PREFILL, DECODE = 0.001, 0.010  # seconds that a prompt token and a sampled row take


@dataclass
class Watch:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class TimedRunner(CountingRunner):
    """Takes the time that its work is worth: each prompt token and each row that decodes has a price."""

    watch: Watch = field(default_factory=Watch)

    def forward(self, plan: Plan) -> Any:
        for work in plan.work:
            decodes = work.tokens is None or (work.start >= 0 and work.n == 1)
            self.watch.now += DECODE if decodes else PREFILL * work.n
        return super().forward(plan)


def timed(max_seqs: int = 8, budget: int = 512, pages: int = 512) -> tuple[Engine, TimedRunner]:
    runner = TimedRunner()
    return make(EngineConfig(path="", max_seqs=max_seqs, max_batch_tokens=budget), runner, pages=pages), runner


# ---- statistics


@pytest.mark.parametrize("n", [1, 2, 3, 5, 10, 99, 100, 101, 1000])
def test_a_summary_is_what_numpy_says(n: int) -> None:
    rng = random.Random(n)
    sample = [rng.lognormvariate(0, 2) for _ in range(n)]
    s = summarize(sample)
    assert s is not None and s.n == n
    assert s.mean == pytest.approx(np.mean(sample))
    assert s.sd == pytest.approx(np.std(sample, ddof=1) if n > 1 else 0.0)
    assert (s.min, s.max) == (np.min(sample), np.max(sample))
    for percent, ours in ((50, s.p50), (90, s.p90), (99, s.p99)):
        assert ours == pytest.approx(np.percentile(sample, percent))


@pytest.mark.parametrize("percent", [0, 1, 33.3, 100])
def test_percentiles_at_the_ends(percent: float) -> None:
    sample = sorted([3.0, 1.0, 2.0, 10.0])
    assert percentile(sample, percent) == pytest.approx(np.percentile(sample, percent))


def test_an_empty_sample_says_nothing() -> None:
    assert summarize([]) is None


def test_gaps_of_tokens_that_come_together() -> None:
    assert Trace(1, 0.0, [1.0, 3.0, 4.0]).gaps == [2.0, 1.0]
    # Three tokens from one step, six seconds after the one before: two seconds each.
    assert Trace(1, 0.0, [1.0, 7.0, 7.0, 7.0, 8.0]).gaps == [2.0, 2.0, 2.0, 1.0]
    assert Trace(1, 0.0, [1.0]).gaps == Trace(1, 0.0).gaps == []


# ---- driving


@dataclass
class Scripted:
    """Answers each request with one token a step, after as many steps as its prompt is long; counts who is inside."""

    left: dict[str, list[int]] = field(default_factory=dict)
    most: int = 0
    finish: str = "length"
    watch: Watch = field(default_factory=Watch)

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def add(self, request: Request) -> None:
        self.left[request.id] = [len(request.tokens), request.sampling.max_tokens or 1]
        self.most = max(self.most, len(self.left))

    def step(self) -> list[Event]:
        self.watch.now += 1.0
        events = []
        for name, state in list(self.left.items()):
            if state[0] > 1:
                state[0] -= 1
                continue
            state[1] -= 1
            over = state[1] == 0
            events.append(Event(id=name, tokens=[1], finish=self.finish if over else None, receipt=Receipt(steps=3)))
            if over:
                del self.left[name]
        return events

    def stats(self) -> Stats:
        return Stats()


def test_times_are_those_of_the_steps() -> None:
    engine = Scripted()
    run = drive(engine, [greedy("a", [1, 1, 1], 2), greedy("b", [1], 3)], Run(), clock=engine.watch)
    assert run.traces["a"].times == [103.0, 104.0] and run.traces["b"].times == [101.0, 102.0, 103.0]
    assert (run.began, run.ended, run.output_tokens) == (100.0, 104.0, 5)
    assert run.complete and len(run.done) == run.asked == 2


@pytest.mark.parametrize("concurrency", [1, 2, 3, None])
def test_no_more_than_asked_are_inside_at_once(concurrency: int | None) -> None:
    engine = Scripted()
    work = [greedy(str(i), [1] * (1 + i % 3), 1 + i % 4) for i in range(10)]
    run = drive(engine, work, Run(), concurrency=concurrency, clock=engine.watch)
    assert engine.most == (concurrency or 10) and run.complete
    sent = [t.sent for t in run.traces.values()]
    assert sent == sorted(sent) and list(run.traces) == [r.id for r in work]
    assert (len(set(sent)) == 1) is (concurrency is None)


def test_a_run_can_be_read_after_an_interrupt() -> None:
    engine, run = Scripted(), Run()

    def stop(run: Run) -> None:
        if run.output_tokens >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(engine, [greedy("a", [1], 2), greedy("b", [1], 9)], run, clock=engine.watch, on_step=stop)
    assert not run.complete and len(run.done) == 1 and run.output_tokens == 4 and run.ended == 102.0


def test_a_request_that_ends_otherwise_is_an_error() -> None:
    engine = Scripted(finish="stop")
    with pytest.raises(QuireError, match="ended with 'stop' after 2 tokens"):
        drive(engine, [greedy("a", [1], 2)], Run(), clock=engine.watch)
    real, runner = timed()
    with pytest.raises(QuireError, match="poison"):
        drive(real, [greedy("a", [POISON], 2)], Run(), clock=runner.watch)


# ---- latency


def measure(engine: Engine, runner: TimedRunner, shape: Shape, name: str = "round", seed: int = 0) -> Round:
    return latency_round(engine, shape, name, seed=seed, vocab_size=VOCAB - 400, page_size=16, clock=runner.watch)


@pytest.mark.parametrize("prompt", [1, 5, 512, 700])
def test_one_stream_gives_the_prices(prompt: int) -> None:
    engine, runner = timed()
    found = measure(engine, runner, Shape(prompt, 9))
    price = DECODE if prompt == 1 else PREFILL * prompt
    assert found.first == pytest.approx([price])
    assert found.prefill == pytest.approx(prompt / price)
    assert found.gaps == pytest.approx([DECODE] * 8)
    assert found.decode == pytest.approx(1 / DECODE)
    assert found.cached == 0


def test_rounds_share_nothing_through_the_cache() -> None:
    engine, runner = timed()
    rounds = [measure(engine, runner, Shape(200, 40), f"round {i}") for i in range(4)]
    assert [r.cached for r in rounds] == [0] * 4
    assert len({round(r.prefill, 6) for r in rounds}) == 1
    # And a round that did would be found out, not reported.
    with pytest.raises(QuireError, match="192 prompt tokens came from the cache and 0 should have"):
        measure(engine, runner, Shape(200, 40), "round 2")


@pytest.mark.parametrize("depth", [16, 100, 1000])
def test_depth_is_there_already_and_costs_nothing(depth: int) -> None:
    engine, runner = timed(pages=2000)
    whole = depth // 16 * 16
    for i in range(3):
        runner.plans.clear()
        found = measure(engine, runner, Shape(64, 3, depth), f"round {i}")
        computed = depth + 64 - whole
        assert found.cached == whole
        assert found.first == pytest.approx([computed * PREFILL])
        assert found.prefill == pytest.approx(1 / PREFILL)
        prompts = sum(w.n for p in runner.plans for w in p.work if w.n > 1)
        assert prompts - computed <= (depth if i == 0 else 16)  # later rounds find it, all but its last page


def test_a_batch_counts_all_streams() -> None:
    engine, runner = timed()
    found = measure(engine, runner, Shape(100, 11, batch=4))
    # One step takes the four prompts; then ten steps of four rows.
    assert found.first == pytest.approx([400 * PREFILL] * 4)
    assert found.prefill == pytest.approx(1 / PREFILL)
    assert found.decode == pytest.approx(4 / (4 * DECODE))
    assert len(found.gaps) == 40 and found.gaps == pytest.approx([4 * DECODE] * 40)


def test_prefill_lasts_until_the_last_stream_has_begun() -> None:
    engine, runner = timed(budget=100)
    found = measure(engine, runner, Shape(100, 21, batch=3))
    # Later prompts have a fifth of the first step: the first prompt ends in the second step, the others beside rows of streams.
    assert found.first[0] == pytest.approx(200 * PREFILL)
    assert found.first[2] > found.first[1] > found.first[0] + 50 * PREFILL
    assert found.prefill == pytest.approx(300 / found.first[2])
    assert found.decode is not None and found.decode == pytest.approx(
        1 / DECODE, rel=0.06
    )  # the ends are not both full


def test_one_token_has_no_decode() -> None:
    engine, runner = timed()
    found = measure(engine, runner, Shape(10, 1))
    assert found.decode is None and found.gaps == []


# ---- workloads


def test_prompts_follow_from_the_seed() -> None:
    def prompts(seed: int) -> list[list[int]]:
        return [r.tokens for r in synthetic(6, Span(4, 40), Span(1, 9), 32, seed, 500)]

    assert prompts(0) == prompts(0) and prompts(0) != prompts(1)
    # Written down: the same prompts on every machine and Python, or records cannot be compared.
    assert token_ids("0 request 0", 8, 49152) == [3357, 11722, 5027, 44532, 10293, 9695, 5894, 22075]


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    work = synthetic(20, Span(16, 48), Span(2, 6), 32, 3, 500)
    shared = {tuple(r.tokens[:32]) for r in work}
    assert len(shared) == 1
    assert {len(r.tokens) for r in work} <= set(range(48, 81)) and len({len(r.tokens) for r in work}) > 5
    assert {r.sampling.max_tokens for r in work} <= set(range(2, 7))
    for a, b in itertools.combinations(work, 2):
        assert a.tokens[32:40] != b.tokens[32:40]
    assert all(0 <= t < 500 for r in work for t in r.tokens)
    assert all(r.sampling.temperature == 0 and r.sampling.ignore_eos for r in work)


def test_a_span_draws_all_of_its_sizes() -> None:
    rng = random.Random(1)
    assert {Span(3, 5).draw(rng) for _ in range(100)} == {3, 4, 5}
    assert Span(7, 7).draw(rng) == 7 and (str(Span(7, 7)), str(Span(3, 5))) == ("7", "3:5")
