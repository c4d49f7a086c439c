"""The loop: plan, forward, sample, collect. One for CPU and GPU, in whatever process or thread a client runs it.

`depth` is how many steps may be in flight when the next one is planned: 0 is exact and traceable, more overlaps host work
with the device. The engine owns the clock (the scheduler has none): it stamps receipts and enforces deadlines.
It decides nothing else, knows no feature, and keeps going when a step fails: that step's requests end in errors.

    add ──► scheduler.plan ──► runner.forward ──► runner.sample ──► [ticket, ticket]  ──► scheduler.commit ──► events
       └ hold ┘                       └ masks.masks ┘                up to `depth`

A MaskProvider may hold a request back until it is prepared, and says which tokens may come while the forward runs.
RequestHooks see a request first, may change how it is run, and are told when it ends. Both name the fields of a request that they
are about, and are not asked about a request without.
"""

from __future__ import annotations

import gc
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from quire.engine.hooks import NoAdapters, RequestHooks
from quire.engine.pages import Pages
from quire.engine.types import FINISH_ABORT, FINISH_ERROR, Event, Receipt, Request, Stats, Vocabulary
from quire.observe.errors import Busy, QuireError
from quire.observe.steps import KEPT, StepInfo
from quire.runner.plan import Plan, Result, Row
from quire.runner.sampler import Masks

WAIT = 0.02  # seconds to wait for a request that is being prepared, when there is nothing else to do
PAGES_WAIT = 0.005  # seconds to wait for pages on their way, when there is nothing else to do
STALL = 8  # steps in a row without a plan, a result or an event: no scheduler needs that many to sort itself out

NO_ADAPTERS = NoAdapters()  # where nobody asked for other hooks

log = logging.getLogger("quire.engine")


class Ticket(Protocol):
    """A step whose results are on their way."""

    def result(self) -> Result:
        """Wait for the results, and give them."""
        ...


class Steps(Protocol):
    """The methods of a runner that the loop uses."""

    def forward(self, plan: Plan) -> Any: ...
    def sample(self, pending: Any, masks: Masks | None = None) -> Ticket: ...
    def close(self) -> None: ...


class Schedules(Protocol):
    """The methods of a scheduler that the loop uses."""

    admitted: list[str]  # ids that are in a plan for the first time, in the newest one

    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> int: ...
    def abort(self, request_id: str) -> list[Event]: ...
    def plan(self) -> Plan | None: ...
    def commit(self, plan: Plan, result: Result) -> list[Event]: ...
    def stats(self) -> Stats: ...
    def told(self, plan: Plan) -> tuple[list[tuple[str, int]], int, dict[str, int]]: ...
    def learn(self, plan: Plan, seconds: float) -> None: ...


class MaskProvider(Protocol):
    """What may hold a request back until it is prepared, and says which tokens may be sampled. Only `hold` raises."""

    field: str  # of a request: where it is None, there is nothing to hold or to mask

    @property
    def holding(self) -> bool:
        """Whether some request is held back, so that `ready` will give it later."""
        ...

    @property
    def masking(self) -> bool:
        """Whether some sequence may need a mask."""
        ...

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Take the bytes of the tokens."""
        ...

    def hold(self, request: Request) -> bool:
        """Hold a request back if it must be prepared first: then it comes back from `ready`. Raises QuireError to refuse it."""
        ...

    def drop(self, request_id: str) -> bool:
        """Forget a request, and say whether it was held back."""
        ...

    def ready(self, seconds: float) -> list[tuple[Request, QuireError | None]]:
        """The requests that are prepared by now, or refused. Waits `seconds` at most for the first."""
        ...

    def masks(self, plan: Plan) -> tuple[Masks | None, list[tuple[str, str, str | None]]]:
        """The tokens that the rows of a plan may sample, by index in plan.work; and requests that cannot go on, with the reason
        and the field of the request that it is about, if it is about one."""
        ...


@dataclass(slots=True)
class _Times:
    """The times at which a request arrived, was admitted and got its first token; -1: not yet."""

    arrived: float
    hooked: bool  # hooks have seen it
    admitted: float = -1.0
    first: float = -1.0


class _Told(NamedTuple):
    """The facts about a step that are noted when it is planned."""

    began: float
    rows: list[tuple[str, int]]
    waiting: int
    held: dict[str, int]


class Engine:
    """Runs a scheduler and a runner, one `step` at a time. Used from one thread."""

    def __init__(
        self,
        scheduler: Schedules,
        runner: Steps,
        depth: int | None = None,
        *,
        masks: MaskProvider | None = None,
        hooks: RequestHooks = NO_ADAPTERS,
        idle: Callable[[], bool] | None = None,
        pages: Pages | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.depth = depth or 0
        self._scheduler = scheduler
        self._runner = runner
        self._masks = masks
        self._masked_field = "" if masks is None else masks.field
        self.hooks = hooks
        self._hooked_fields = hooks.fields
        self._idle = idle
        self.pages = pages  # what others may know of the cache; None: there is none
        self._clock = clock
        self._flight: deque[tuple[Plan, Ticket, _Told]] = deque()
        self._completed = clock()  # when the newest step was that has come back
        self._steps: deque[StepInfo] = deque(maxlen=KEPT)  # the newest that have come back
        self._times: dict[str, _Times] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._idle_steps = 0
        self._owed: list[Event] = []  # made outside of step

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._owed or self._flight) or self._scheduler.has_work or self._holding

    @property
    def _holding(self) -> bool:
        return self._masks is not None and self._masks.holding

    def stats(self) -> Stats:
        """A snapshot."""
        return self._scheduler.stats()

    def steps(self, most: int = KEPT) -> list[StepInfo]:
        """The newest steps that have come back, in their order."""
        return list(self._steps)[-most:] if most > 0 else []

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The bytes of the tokens."""
        if self._masks is not None:
            self._masks.set_vocabulary(vocabulary)

    def add(self, request: Request) -> None:
        """Queue a request. One that cannot be honoured gets its error event from the next step."""
        if request.id in self._times:
            # Not an event: it would end the other request of that name.
            log.error("request id %r is already running: the second one is ignored", request.id)
            return
        now, hooked = self._clock(), any(getattr(request, field) for field in self._hooked_fields)
        masks = None if self._masks is None or getattr(request, self._masked_field) is None else self._masks
        try:
            if hooked:
                request = self.hooks.on_request(request)
            if masks is None or not masks.hold(request):
                self._scheduler.add(request)
        except QuireError as e:
            if masks is not None:
                masks.drop(request.id)
            if hooked:
                self.hooks.on_end(request.id)
            self._owed.append(_refused(request, e))
            return
        self._times[request.id] = _Times(now, hooked)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.id))

    def _prepared(self, masks: MaskProvider) -> None:
        """Queue the requests that are prepared now. It waits only when the loop would have nothing else to do."""
        for request, error in masks.ready(0.0 if self._flight or self._owed or self._scheduler.has_work else WAIT):
            try:
                if error is not None:
                    raise error
                self._scheduler.add(request)
            except QuireError as e:
                masks.drop(request.id)
                self._owed += self._stamp([_refused(request, e)])

    def abort(self, request_id: str, error: str | None = None) -> None:
        """Let a request go; its last event comes from the next step. Unknown ids have finished already."""
        if request_id not in self._times:
            return
        if self._masks is not None and self._masks.drop(request_id):
            events = [Event(id=request_id, finish=FINISH_ABORT)]
        else:
            events = self._scheduler.abort(request_id)
        if error is not None:
            events = [msgspec.structs.replace(e, error=error) if e.finish == FINISH_ABORT else e for e in events]
        self._owed += self._stamp(events)

    def close(self) -> None:
        """Stop the runner. Whatever was still running is dropped."""
        if self.pages is not None:
            self.pages.close()
        self._runner.close()
        gc.unfreeze()

    def settle(self) -> None:
        """Exempt everything that is in memory now from garbage collection until `close`: looking through it would stop a step
        for a tenth of a second."""
        gc.freeze()

    def idle(self) -> bool:
        """Do a little of what a later step would wait for, while there is nothing else to do. False: nothing of that is left."""
        return self._idle is not None and self._idle()

    def step(self) -> list[Event]:
        """One iteration: start a step if one can be planned, finish one if it is time to."""
        self._expire()
        if self.pages is not None and self.pages.wanted:
            self.pages.advance()
        if self._masks is not None and self._masks.holding:
            self._prepared(self._masks)
        events, self._owed = self._owed, []
        plan = self._scheduler.plan()
        if plan is not None:
            self._start(plan, events)
        if self._flight and (plan is None or len(self._flight) > self.depth):
            events += self._collect()
        elif plan is None and not events and self._scheduler.has_work:
            if self.pages is not None and self.pages.wait(PAGES_WAIT):
                return events
            self._idle_steps += 1
            if self._idle_steps >= STALL:
                return self._stalled()
            return events
        self._idle_steps = 0
        return events

    def _start(self, plan: Plan, events: list[Event]) -> None:
        """Launch a step. One that cannot be launched ends its requests in errors."""
        now = self._clock()
        told = _Told(now, *self._scheduler.told(plan))
        if self._scheduler.admitted:
            for request_id in self._scheduler.admitted:
                self._times[request_id].admitted = now
        lost: list[tuple[str, str, str | None]] = []
        try:
            pending, masks = self._runner.forward(plan), None
            if self._masks is not None and self._masks.masking:  # while the forward runs, where it does so by itself
                masks, lost = self._masks.masks(plan)
            ticket = self._runner.sample(pending) if masks is None else self._runner.sample(pending, masks)
        except Exception as e:
            # Commits are in order: what is in flight comes before the failure.
            while self._flight:
                events += self._collect()
            events += self._stamp(self._scheduler.commit(plan, _failed(plan, e)))
            return
        self._flight.append((plan, ticket, told))
        for request_id, why, param in lost:  # their rows were computed with the others; nobody will see them
            events += self._fail(request_id, why, param)

    def _collect(self) -> list[Event]:
        """Finish the oldest step in flight."""
        plan, ticket, told = self._flight.popleft()
        try:
            result = ticket.result()
        except Exception as e:
            result = _failed(plan, e)
        self._took(plan, told)
        return self._stamp(self._scheduler.commit(plan, result))

    def _took(self, plan: Plan, told: _Told) -> None:
        """Note how long a step took. With others in flight beside it, its time begins where the one before it was complete, so that
        the times of steps add up to the time that the engine was busy."""
        now = self._clock()
        seconds = now - max(told.began, self._completed)
        self._completed = now
        self._scheduler.learn(plan, seconds)
        self._steps.append(StepInfo(plan.step, seconds, now, told.rows, told.waiting, told.held))

    def _stalled(self) -> list[Event]:
        """End every request in an error: there is work, but no plan and nothing in flight, which is a fault in the scheduler."""
        log.error("the scheduler has work and plans nothing: failing %d requests", len(self._times))
        events: list[Event] = []
        for request_id in list(self._times):
            events += self._fail(request_id, "the engine could not make progress with this request")
        return events

    def _fail(self, request_id: str, why: str, param: str | None = None) -> list[Event]:
        """End a request that the scheduler has, in an error."""
        ended = self._scheduler.abort(request_id)
        return self._stamp([msgspec.structs.replace(e, finish=FINISH_ERROR, error=why, param=param) for e in ended])

    def _expire(self) -> None:
        """Abort what is past its deadline."""
        while self._deadlines and (self._deadlines[0][1] not in self._times or self._deadlines[0][0] <= time.time()):
            self.abort(heapq.heappop(self._deadlines)[1], "deadline passed")

    def _stamp(self, events: list[Event]) -> list[Event]:
        """Put times on receipts. They are differences of the same four readings, so they add up."""
        now = self._clock()
        for i, event in enumerate(events):
            times = self._times.get(event.id)
            if times is None:
                continue
            if event.tokens and times.first < 0:
                times.first = now
            if event.finish is None:
                continue
            del self._times[event.id]
            if times.hooked:
                self.hooks.on_end(event.id)
            admitted = times.admitted if times.admitted >= 0 else now
            first = times.first if times.first >= 0 else now
            receipt = msgspec.structs.replace(
                event.receipt or Receipt(),
                queue_seconds=admitted - times.arrived,
                prefill_seconds=first - admitted,
                decode_seconds=now - first,
            )
            events[i] = msgspec.structs.replace(event, receipt=receipt)
        return events


def _refused(request: Request, error: QuireError) -> Event:
    """The only event of a request that never ran."""
    receipt = Receipt(prompt_tokens=len(request.tokens))
    if isinstance(error, Busy):
        return Event(
            id=request.id,
            finish=FINISH_ERROR,
            error=str(error),
            busy=error.code,
            retry_after=error.retry_after,
            receipt=receipt,
        )
    return Event(id=request.id, finish=FINISH_ERROR, error=str(error), param=error.param, receipt=receipt)


def _failed(plan: Plan, error: Exception) -> Result:
    """The result of a step that failed as a whole."""
    log.error("step %d failed", plan.step, exc_info=error)
    text = f"the step that computed this request failed: {type(error).__name__}: {error}"
    return Result(rows=[Row(accepted=0, error=text) for _ in plan.work])
