"""The server's promise of a first token: a request that cannot have its own in time is refused when it comes, and not later.

What is predicted is when the request's prompt is computed: the prompts before it at the rates that were learned, its own without
what the cache has of it, what streams take of each step meanwhile, and the wait for a slot where all are taken. It is an estimate, and
errs to the side of the client: nothing is refused before anything is known. Requests that said they can wait (a priority above 0, such
as the lines of batches) and those that share another's prompt are never refused.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.engine.limits import Limit
from quire.engine.pacing import Pace
from quire.engine.policy import AHEAD, PARTS
from quire.engine.sequence import Sequence
from quire.observe.costs import Shape
from quire.observe.errors import BadRequest, Busy
from quire.runner.plan import Plan

CLASSES = 24  # powers of two of a prompt's length
CODE = "first_token_target"


class FirstToken(Limit):
    """Refuses a request whose first token is predicted to come after `target` seconds. It bounds no step."""

    __slots__ = (
        "_cached",
        "_due",
        "_ended",
        "_every",
        "_pace",
        "_rows",
        "_running",
        "_slots",
        "_step",
        "_work",
        "target",
    )
    admission_only = True

    def __init__(self, target: float, pace: Pace, slots: int, step: int, cached: Callable[[Sequence], int]) -> None:
        """`cached`: how many of a sequence's tokens the prefix cache has."""
        self.target = target
        self._pace = pace
        self._slots = slots
        self._step = step
        self._cached = cached
        self._due: dict[int, tuple[int, float, int]] = {}  # by key: class, seconds for each token, tokens that are left
        self._work = [0.0] * CLASSES  # seconds of prompts that are not computed, by the class of their length
        self._running: set[int] = set()
        self._rows = 0  # that decoded in the newest step
        self._every = 0.0  # seconds of steps between two requests that end, where many do
        self._ended = 0.0  # seconds since the last one did

    def predict(self, own: int, pages: int = 0) -> float:
        """Seconds until the first token of a prompt of `own` tokens of which the cache has `pages`. 0.0: nothing is known."""
        costs = self._pace.costs
        work = costs.prefill(own - pages, pages, self._step)
        if not work:
            return 0.0
        size = min(CLASSES - 1, own.bit_length())
        work += sum(self._work[: size + 1])
        longer = sum(self._work[size + 1 :])
        if longer > 0:  # see FairShare: short ones go ahead, others have a fifth
            work = work * PARTS / (PARTS - 1) if work <= longer / AHEAD else min(work * PARTS, work + longer)
        bound = self._pace.bound
        if self._rows and bound:
            alone = min(costs.seconds(Shape(self._rows, 0)), 0.9 * bound)
            work *= bound / (bound - alone)
        waiting = len(self._due) - len(self._running & self._due.keys())
        return work + (self._every * (waiting + 1) if len(self._running) >= self._slots else 0.0)

    def arrives(self, seq: Sequence) -> None:
        request = seq.request
        cached = min(self._cached(seq), seq.prompt_len - 1)
        if request.priority <= 0 and request.follows is None and not request.vector:
            seconds = self.predict(seq.prompt_len, cached)
            if seconds > self.target:
                self._refuse(seconds, self._pace.costs.prefill(seq.prompt_len - cached, cached, self._step))
        left = seq.prompt_len - cached
        each = self._pace.costs.prefill(left, cached, self._step) / left
        if request.follows is None:
            self._note(seq.key, (min(CLASSES - 1, seq.prompt_len.bit_length()), each, left))

    def _refuse(self, seconds: float, alone: float) -> None:
        told = f"its first token would come in about {seconds:.1f} s, and is promised within {self.target:g} s"
        if alone > self.target:
            raise BadRequest(
                f"{told}: the prompt alone takes {alone:.1f} s", cure="send a shorter prompt", param="prompt"
            )
        raise Busy(told, retry_after=seconds - self.target, cure="try again later", code=CODE)

    def _note(self, key: int, now: tuple[int, float, int] | None) -> None:
        was = self._due.pop(key, None)
        if was is not None:
            self._work[was[0]] = max(0.0, self._work[was[0]] - was[1] * was[2])
        if now is not None and now[2] > 0:
            self._work[now[0]] += now[1] * now[2]
            self._due[key] = now

    def opened(self, seq: Sequence) -> None:
        self._running.add(seq.key)

    def ended(self, seq: Sequence) -> None:
        self._note(seq.key, None)
        if seq.key in self._running:
            self._running.discard(seq.key)
            self._every += 0.1 * (self._ended - self._every)
            self._ended = 0.0

    def learn(self, plan: Plan, seconds: float) -> None:
        """Take the prompt tokens of a step off what is left."""
        self._ended += seconds
        rows = len(plan.work)
        for work in reversed(plan.work):
            if work.start < 0:
                break
            rows -= 1
            due = self._due.get(work.key)
            if due is not None:
                self._note(work.key, (due[0], due[1], due[2] - work.n))
        self._rows = rows
