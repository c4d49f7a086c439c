"""Measuring an engine under a workload: when each token came, and the figures that follow.

Drives anything that steps like an Engine, from one thread, and reads one clock. Knows no model, no text and no terminal:
it is given sizes and a vocabulary, and makes its prompts of token ids that follow from a seed. Nothing is thrown away
here and nothing is rounded; what is warm-up and what counts is the caller's to say, and to tell.

  sent ─── first token ── token ── token ── … ── last        of each request; a token's time is when its step returned
  └ first ┘          └ gap ┘
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.types import FINISH_LENGTH, Event, Receipt, Request, Stats
from quire.observe.errors import QuireError
from quire.runner.params import SamplingParams

Clock = Callable[[], float]


class Driven(Protocol):
    """What can be measured: an engine that takes requests and is stepped."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Event]: ...
    def stats(self) -> Stats: ...


# ---- statistics


@dataclass(frozen=True, slots=True)
class Summary:
    """A sample in eight numbers. Percentiles lie on the straight line between the two nearest of the sample."""

    n: int
    mean: float
    sd: float  # of the sample; 0 for one
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of an ascending sample that is not empty."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(sample: Iterable[float]) -> Summary | None:
    """The figures of a sample; None for an empty one."""
    ordered = sorted(sample)
    n = len(ordered)
    if not n:
        return None
    mean = math.fsum(ordered) / n
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in ordered) / (n - 1)) if n > 1 else 0.0
    p50, p90, p99 = (percentile(ordered, p) for p in (50, 90, 99))
    return Summary(n, mean, sd, ordered[0], p50, p90, p99, ordered[-1])


# ---- driving


@dataclass(slots=True)
class Trace:
    """One request: when it was sent, when each of its tokens came, and its receipt once it is finished."""

    prompt: int  # tokens
    sent: float
    times: list[float] = field(default_factory=list)
    receipt: Receipt | None = None

    @property
    def gaps(self) -> list[float]:
        """Seconds between a token and the next. Tokens that came together share the wait for them."""
        gaps: list[float] = []
        last, i = 0, 1
        while i < len(self.times):
            together = 1
            while i + together < len(self.times) and self.times[i + together] == self.times[i]:
                together += 1
            gaps += [(self.times[i] - self.times[last]) / together] * together
            last, i = i, i + together
        return gaps


@dataclass(slots=True)
class Run:
    """A workload on its way through an engine; good to read at any moment, also after an interrupt."""

    asked: int = 0  # requests
    began: float = 0.0
    ended: float = 0.0  # when the last step so far returned
    traces: dict[str, Trace] = field(default_factory=dict)
    before: Stats = field(default_factory=Stats)
    after: Stats = field(default_factory=Stats)

    @property
    def done(self) -> list[Trace]:
        return [t for t in self.traces.values() if t.receipt is not None]

    @property
    def complete(self) -> bool:
        return self.asked > 0 and len(self.done) == self.asked

    @property
    def output_tokens(self) -> int:
        return sum(len(t.times) for t in self.traces.values())


def drive(
    engine: Driven,
    requests: Sequence[Request],
    run: Run,
    *,
    concurrency: int | None = None,
    clock: Clock = time.perf_counter,
    on_step: Callable[[Run], None] | None = None,
) -> Run:
    """Send the requests, at most `concurrency` of them unfinished at once, and step until all are done; fills `run`.

    A request that fails, or that ends before its last token, is an error: figures of it would mean nothing.
    """
    waiting = deque(requests)
    room = concurrency or len(waiting)
    run.asked = len(waiting)
    run.before = engine.stats()
    run.began = run.ended = clock()
    try:
        while waiting or engine.busy:
            while waiting and room:
                request = waiting.popleft()
                room -= 1
                run.traces[request.id] = Trace(len(request.tokens), clock())
                engine.add(request)
            events = engine.step()
            now = run.ended = clock()
            for event in events:
                room += _take(run, event, now)
            if on_step is not None:
                on_step(run)
    finally:
        run.after = engine.stats()
    return run


def _take(run: Run, event: Event, now: float) -> int:
    """Note an event; 1 when it ended its request."""
    trace = run.traces[event.id]
    trace.times += [now] * len(event.tokens)
    if event.finish is None:
        return 0
    if event.finish != FINISH_LENGTH:
        raise QuireError(
            f"request {event.id} ended with {event.finish!r} after {len(trace.times)} tokens, so nothing was measured: "
            f"{event.error or 'it should have gone on'}"
        )
    trace.receipt = event.receipt or Receipt()
    return 1


# ---- workloads


def token_ids(label: str, count: int, vocab_size: int) -> list[int]:
    """`count` ids that follow from `label`: the same on every machine, and unlike those of any other label."""
    return random.Random(label).choices(range(vocab_size), k=count)


def greedy(name: str, tokens: list[int], output: int, namespace: str = "") -> Request:
    """A request for exactly `output` tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=0)
    return Request(id=name, tokens=tokens, sampling=sampling, namespace=namespace)


@dataclass(frozen=True, slots=True)
class Span:
    """A size, or the sizes from `low` to `high`, each as likely."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def draw(self, rng: random.Random) -> int:
        return self.low if self.low == self.high else rng.randint(self.low, self.high)


def synthetic(count: int, prompt: Span, output: Span, shared: int, seed: int, vocab_size: int) -> list[Request]:
    """`count` requests whose prompts have `shared` tokens in common, then as many of their own as `prompt` says."""
    rng = random.Random(f"{seed} sizes")
    start = token_ids(f"{seed} shared", shared, vocab_size)
    requests: list[Request] = []
    for i in range(count):
        own = token_ids(f"{seed} request {i}", prompt.draw(rng), vocab_size)
        requests.append(greedy(str(i), start + own, output.draw(rng)))
    return requests


# ---- latency


@dataclass(frozen=True, slots=True)
class Shape:
    """A latency round: `batch` streams, each with `depth` tokens there already, `prompt` to compute, `output` to say."""

    prompt: int
    output: int
    depth: int = 0
    batch: int = 1

    @property
    def length(self) -> int:
        """Tokens of one stream when it is finished."""
        return self.depth + self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one latency round. Times in seconds, rates in tokens per second over all streams."""

    first: list[float]  # of each stream
    gaps: list[float]
    cached: int  # prompt tokens that were not computed
    prefill: float  # computed prompt tokens, up to the moment when every stream has its first token
    decode: float | None  # tokens from that moment on; None when none came

    @classmethod
    def of(cls, run: Run) -> Round:
        traces = run.done
        cached = sum(t.receipt.cached_tokens for t in traces if t.receipt)
        computed = sum(t.prompt for t in traces) - cached
        prefilled = max(t.times[0] for t in traces)
        rest = sum(at > prefilled for t in traces for at in t.times)
        return cls(
            first=[t.times[0] - t.sent for t in traces],
            gaps=[g for t in traces for g in t.gaps],
            cached=cached,
            prefill=computed / (prefilled - run.began),
            decode=rest / (run.ended - prefilled) if rest else None,
        )


def latency_round(
    engine: Driven, shape: Shape, name: str, *, seed: int, vocab_size: int, page_size: int, clock: Clock
) -> Round:
    """Run one latency round. Its prompts are new, so that the prefix cache has nothing of them but `depth` tokens.

    What is to be there already is computed first, outside of the figures, unless an earlier round left it.
    """
    starts = [token_ids(f"{seed} depth {i}", shape.depth, vocab_size) for i in range(shape.batch)]
    if shape.depth:
        drive(engine, [greedy(f"{name} depth {i}", start, 1) for i, start in enumerate(starts)], Run(), clock=clock)
    requests = [
        greedy(f"{name} {i}", start + token_ids(f"{seed} {name} {i}", shape.prompt, vocab_size), shape.output)
        for i, start in enumerate(starts)
    ]
    found = Round.of(drive(engine, requests, Run(), clock=clock))
    expected = shape.batch * (shape.depth // page_size * page_size)
    if found.cached != expected:
        raise QuireError(
            f"{found.cached} prompt tokens came from the cache and {expected} should have: nothing was measured",
            cure="give the KV pool more memory, or make batch or depth smaller",
        )
    return found
