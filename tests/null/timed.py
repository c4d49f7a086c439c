"""A device whose steps take as long as a law says, for the scheduler with a budget in time. The clock is the law's own.

`Timed` drives requests through the real scheduler at any depth, notes what each step took and who decoded in it, and tells the
scheduler late, as an engine does. Noise, a slow phase and a clock that stands still are part of the law.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import quire.engine.limits
import quire.engine.pacing
import quire.observe.costs
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.types import Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result, Row


@dataclass(frozen=True)
class Law:
    """Seconds of a step. `slow`: steps between these two numbers take so many times longer; `still`: the clock tells 0."""

    fixed: float = 0.008
    row: float = 0.0002
    token: float = 0.0007
    position: float = 2e-7  # that a row attends to
    pair: float = 1.5e-7
    noise: float = 0.03  # half of the width
    slow: tuple[int, int, float] = (0, 0, 1.0)
    still: bool = False
    stalls: float = 0.0  # how often a step takes ten times as long, because the process stood still


@dataclass
class Taken:
    """A step: how long it took, how many decoded in it, and what of prompts it computed."""

    seconds: float
    rows: int
    tokens: int


@dataclass
class Parts:
    """The code under test; a planted fault replaces one of these."""

    costs: ModuleType | Any = quire.observe.costs
    pacing: ModuleType | Any = quire.engine.pacing
    limits: ModuleType | Any = quire.engine.limits


@dataclass
class Timed:
    """A scheduler and its device."""

    law: Law = field(default_factory=Law)
    bound: float | None = 0.1
    depth: int = 0
    parts: Parts = field(default_factory=Parts)
    seed: int = 0
    budget: int = 512

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.costs = self.parts.costs.Costs()
        self.pace = self.parts.pacing.Pace(self.costs, self.bound)
        own = self.parts.limits.StepTime(self.budget, self.pace) if self.bound != 0 else self.budget
        self.scheduler = Scheduler(
            PrefixTree(Pool(20_000), 16),
            slots=64,
            budget=own,
            context=1 << 20,
            draw=lambda: 1,
            limits=standard(4096, 16),
        )
        self.length: dict[int, int] = {}  # of sequences that decode, by key: what the device knows
        self.taken: list[Taken] = []
        self.first: dict[str, float] = {}  # when the first token was there
        self.held: dict[str, int] = {}
        self.clock = 0.0
        self.flight: deque[Plan] = deque()
        self.count = 0

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def add(self, prompt: int | list[int], answer: int = 1, **more: Any) -> str:
        self.count += 1
        name = f"r{self.count}"
        tokens = self.tokens(prompt) if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens=answer)
        self.scheduler.add(Request(id=name, tokens=tokens, sampling=sampling, **more))
        return name

    def seconds(self, plan: Plan) -> Taken:
        law, rows, tokens, seconds = self.law, 0, 0, self.law.fixed
        for w in plan.work:
            if w.start < 0:
                rows += 1
                seconds += law.row + law.position * self.length[w.key]
                self.length[w.key] += 1
            else:
                tokens += w.n
                seconds += law.token * w.n + law.pair * w.n * (w.start + w.n / 2)
                self.length[w.key] = w.start + w.n
        seconds *= self.rng.uniform(1 - law.noise, 1 + law.noise)
        if law.slow[0] <= len(self.taken) < law.slow[1]:
            seconds *= law.slow[2]
        return Taken(seconds, rows, tokens)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan is not None:
            self.held = self.scheduler.told(plan)[2]
            self.flight.append(plan)
        if self.flight and (plan is None or len(self.flight) > self.depth):
            plan = self.flight.popleft()
            taken = self.seconds(plan)
            self.taken.append(taken)
            self.clock += taken.seconds
            told = taken.seconds * (10 if self.rng.random() < self.law.stalls else 1)
            self.scheduler.learn(plan, 0.0 if self.law.still else told)
            rows = [Row(w.n, [7] if w.sample else []) for w in plan.work]
            for event in self.scheduler.commit(plan, Result(rows)):
                if event.tokens:
                    self.first.setdefault(event.id, self.clock)
        return self.scheduler.has_work

    def until(self, done: Callable[[], bool], most: int = 20_000) -> None:
        for _ in range(most):
            if done():
                return
            self.step()
        raise AssertionError(f"not after {most} steps")

    def streams(self, count: int) -> None:
        """So many that decode from now on, and 50 steps of that."""
        names = [self.add(20, 1 << 18) for _ in range(count)]
        self.until(lambda: all(name in self.first for name in names))
        for _ in range(50):
            self.step()

    def prompt(self, tokens: int | list[int]) -> tuple[float, list[float]]:
        """A prompt beside them: how long it took, and the steps meanwhile in which somebody decoded."""
        began, at, name = self.clock, len(self.taken), self.add(tokens)
        self.until(lambda: name in self.first)
        return self.first[name] - began, [t.seconds for t in self.taken[at:] if t.rows]


def late(steps: list[float], share: float = 0.99) -> float:
    """What 99 of 100 steps stay below."""
    return sorted(steps)[min(len(steps) - 1, int(share * len(steps)))]
