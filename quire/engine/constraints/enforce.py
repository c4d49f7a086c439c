"""Constraints at run time: a MaskProvider of the engine loop, with a Limit for its scheduler: neither hears of grammars.

    hold ──► compile, on a thread, once for each text ──► ready ──► the scheduler ──► opened: a matcher of its own
    plan ──► masks: the matcher takes in the tokens that were sampled since, and says what may come next

A sequence is held to one sampling step in flight: what may come next depends on what came last. A preempted one keeps its
matcher, because it keeps its tokens. Compiled constraints are kept by content, bounded in number and in bytes.
Every constrained row of a step has a mask, or its request fails: no token is ever sampled without one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.engine.constraints.grammar import (
    JSON_OBJECT,
    JSON_SCHEMA,
    Matcher,
    check,
    compile_matcher,
    plain,
    tokenizer_of,
)
from quire.engine.constraints.numbers import Digits, NumberWatch
from quire.engine.limits import OneInFlight
from quire.engine.sequence import Sequence
from quire.engine.types import Constraint, Request, Vocabulary
from quire.observe.errors import BadRequest, QuireError, Unavailable, Unsupported
from quire.runner.plan import Plan
from quire.runner.sampler import Masks

ENTRIES = 256  # compiled constraints that are kept
TEXT_BYTES = 8 << 20  # ... and bytes of text behind them; what is compiled is in proportion
SECONDS = 10.0  # for one compilation; the compiler's own limits end nearly all of them within one
WORKERS = 2
STACK = 512 << 20  # bytes, of which what is used counts: the compiler follows references and rules by recursion
OVERDUE = 4  # compilations past their time: a thread cannot be stopped, so their number is bounded

log = logging.getLogger("quire.engine")

Key = tuple[str, str, str | None]  # kind, text and blanks


@dataclass(slots=True)
class _Job:
    """A constraint on its way through the compiler, and the requests that wait for it."""

    constraint: Constraint
    waiting: list[Request] = field(default_factory=list)
    begun: float = -1.0  # -1: not yet


@dataclass(slots=True)
class _State:
    """One sequence's place in its grammar."""

    seq: Sequence
    matcher: Matcher | None  # None is a fault of ours: its request fails
    taken: int = 0  # output tokens that the matcher has seen
    numbers: NumberWatch | None = None  # of a JSON answer


class ConstraintMasks:
    """Holds requests until their constraint is compiled, and masks their tokens. Used from the engine's thread."""

    field = "constraint"

    def __init__(self, width: int, clock: Callable[[], float] = time.monotonic):
        self._width = width  # of the logits
        self._clock = clock
        self._vocabulary: Vocabulary | None = None
        self._ends: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self._tokenizer: Any = None
        self._digits: Digits | None = None
        self._building = threading.Lock()
        self._kept: OrderedDict[Key, Matcher] = OrderedDict()
        self._kept_bytes = 0
        self._jobs: dict[Key, _Job] = {}
        self._queue: deque[Key] = deque()  # jobs that no thread has begun
        self._done: SimpleQueue[tuple[Key, Matcher | QuireError]] = SimpleQueue()
        self._overdue = 0
        self._made: dict[str, Matcher] = {}  # by request id, until it has a slot
        self._states: dict[int, _State] = {}  # by key in plans
        self.limit = OneInFlight(self)  # for the scheduler
        self.holding = False  # somebody waits for a compilation; one that nobody waits for is taken in later
        self.masking = False  # some sequence has a state

    # ---- requests that are prepared before the scheduler has them

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """The bytes of the tokens. Known once; saying it again changes nothing."""
        if self._vocabulary is None:
            self._vocabulary = vocabulary
            self._ends = np.array([i for i in vocabulary.eos_ids if i < self._width], np.intp)

    def hold(self, request: Request) -> bool:
        constraint = request.constraint
        if constraint is None:
            return False
        check(constraint, request.sampling, request.eos_ids)
        if self._vocabulary is None:
            raise Unsupported(
                f"{constraint.param}: this engine was never told the bytes of its tokens", code="no_vocabulary"
            )
        if set(request.eos_ids) != set(self._vocabulary.eos_ids):
            raise BadRequest(f"{constraint.param} needs the model's own end tokens", param=constraint.param)
        key = constraint.kind, constraint.text, constraint.blanks
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._made[request.id] = kept
            return False
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(constraint)
            self._queue.append(key)
            self._begin()
        job.waiting.append(request)
        self.holding = True
        return True

    def drop(self, request_id: str) -> bool:
        self._made.pop(request_id, None)
        for job in self._jobs.values():
            for i, request in enumerate(job.waiting):
                if request.id == request_id:
                    del job.waiting[i]
                    self._count()
                    return True
        return False

    def ready(self, seconds: float) -> list[tuple[Request, QuireError | None]]:
        out: list[tuple[Request, QuireError | None]] = []
        try:
            self._settle(*self._done.get(timeout=seconds) if seconds > 0 else self._done.get_nowait(), out)
            while True:
                self._settle(*self._done.get_nowait(), out)
        except Empty:
            pass
        self._expire(out)
        self._begin()
        self._count()
        return out

    def _count(self) -> None:
        self.holding = any(job.waiting for job in self._jobs.values())

    def _begin(self) -> None:
        """Start what may be started. What is overdue does not count, until there is too much of it."""
        running = sum(job.begun >= 0 for job in self._jobs.values())
        while self._queue and running < WORKERS and self._overdue < OVERDUE:
            key = self._queue.popleft()
            job = self._jobs[key]
            job.begun = self._clock()
            if not self._start(key, job.constraint):
                self._done.put((key, Unavailable("the grammar compiler has no memory to run in", cure="try again")))
            running += 1

    def _start(self, key: Key, constraint: Constraint) -> bool:
        """A thread with a deep stack, or one that is still deeper than most where there is no room for that."""
        usual = threading.stack_size()
        try:
            for size in (STACK, STACK >> 3):
                threading.stack_size(size)
                thread = threading.Thread(
                    target=self._compile, args=(key, constraint), name="quire-grammar", daemon=True
                )
                try:
                    thread.start()
                    return True
                except RuntimeError:
                    continue
            return False
        finally:
            threading.stack_size(usual)

    def _compile(self, key: Key, constraint: Constraint) -> None:
        """Compile a grammar, on a thread of its own. llguidance lets go of the interpreter's lock while it works."""
        try:
            with self._building:
                if self._tokenizer is None and self._vocabulary is not None:
                    self._digits = Digits(self._vocabulary, self._width)
                    self._tokenizer = tokenizer_of(self._vocabulary, self._width)
            made: Matcher | QuireError = compile_matcher(constraint, self._tokenizer)
        except QuireError as error:
            made = error
        except BaseException as error:  # llguidance's panics are outside Exception's tree
            log.error("a constraint could not be compiled", exc_info=error)
            made = BadRequest(f"{constraint.param} cannot be compiled", param=constraint.param)
        self._done.put((key, made))

    def _settle(self, key: Key, made: Matcher | QuireError, out: list[tuple[Request, QuireError | None]]) -> None:
        job = self._jobs.get(key)
        if job is None or job.begun < 0:  # it was given up; whoever asks again finds it below
            self._overdue -= 1
        if not isinstance(made, QuireError):
            self._keep(key, made)
        if job is None:
            return
        if job.begun < 0:
            self._queue.remove(key)
        del self._jobs[key]
        for request in job.waiting:
            if isinstance(made, QuireError):
                out.append((request, made))
            else:
                self._made[request.id] = made
                out.append((request, None))

    def _keep(self, key: Key, made: Matcher) -> None:
        if key in self._kept:
            return
        self._kept[key] = made
        self._kept_bytes += len(key[1])
        while len(self._kept) > ENTRIES or self._kept_bytes > TEXT_BYTES:
            old, _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(old[1])

    def _expire(self, out: list[tuple[Request, QuireError | None]]) -> None:
        """Give up what takes too long. Its thread goes on, and is counted until it ends."""
        now = self._clock()
        for key, job in list(self._jobs.items()):
            if job.begun >= 0 and now - job.begun > SECONDS:
                del self._jobs[key]
                self._overdue += 1
                name = job.constraint.param
                slow = BadRequest(f"{name} takes over {SECONDS:g} s to compile", param=name, cure="make it simpler")
                out += [(request, slow) for request in job.waiting]
        if self._overdue >= OVERDUE and self._queue:
            for key in self._queue:
                waiting = self._jobs.pop(key).waiting
                busy = Unavailable("the grammar compiler is busy with constraints that take too long", cure="try again")
                out += [(request, busy) for request in waiting]
            self._queue.clear()

    # ---- sequences come and go, told by the limit

    def opened(self, seq: Sequence) -> None:
        """Give a sequence with a constraint that has taken a slot its own matcher."""
        constraint = seq.request.constraint
        if constraint is None or seq.key in self._states:  # the latter: it was preempted
            return
        made = self._made.pop(seq.request.id, None)
        digits = self._digits if constraint.kind in (JSON_OBJECT, JSON_SCHEMA) else None
        numbers = None if digits is None else NumberWatch(digits)
        self._states[seq.key] = _State(seq, None if made is None else made.deep_copy(), numbers=numbers)
        self.masking = True

    def ended(self, seq: Sequence) -> None:
        """Forget a sequence with a constraint that is finished."""
        self._states.pop(seq.key, None)
        self.masking = bool(self._states)
        self._made.pop(seq.request.id, None)  # it never had a slot

    # ---- masks: between logits and tokens

    def masks(self, plan: Plan) -> tuple[Masks | None, list[tuple[str, str, str | None]]]:
        masks: dict[int, npt.NDArray[np.bool_]] = {}
        lost: list[tuple[str, str, str | None]] = []
        for i, work in enumerate(plan.work):
            state = self._states.get(work.key) if work.sample else None
            if state is None:
                continue
            mask = self._mask(state)
            if isinstance(mask, tuple):
                lost.append((state.seq.request.id, *mask))
            else:
                masks[i] = mask
        return masks or None, lost

    def _mask(self, state: _State) -> npt.NDArray[np.bool_] | tuple[str, str | None]:
        """What may come next, or why nothing may, and the field that is to blame: none for a fault of ours."""
        seq, matcher, asked = state.seq, state.matcher, state.seq.request.constraint
        param = None if asked is None else asked.param
        if matcher is None:
            return "the constraint was never compiled", None
        try:
            new = seq.tokens[seq.prompt_len + state.taken :]
            if new:
                matcher.consume_tokens(new)
                state.taken += len(new)
                if state.numbers is not None:
                    state.numbers.take(new)
            packed = matcher.compute_bitmask()
            if matcher.is_error():
                why = f"{param} could not be enforced after {state.taken} tokens: {plain(matcher.get_error())}"
                return why[:400], param
            mask = np.unpackbits(np.frombuffer(packed, np.uint8), count=self._width, bitorder="little").view(np.bool_)
            if not matcher.is_accepting():
                mask[self._ends] = False  # a stopped matcher offers the end, whatever stopped it
            if not mask.any():
                return f"after {state.taken} tokens {param} allows nothing that this vocabulary can say", param
            return mask if state.numbers is None else state.numbers.narrow(mask)
        except Exception as error:  # the others in this step go on
            log.error("a mask could not be computed", exc_info=error)
            return f"the constraint could not be enforced: {type(error).__name__}", None
