"""Limits: what may keep a sequence from computing all the tokens it could in this step. One object each.

The scheduler asks every limit how much a sequence may compute, takes the least, and tells all of them what was
planned. It never learns why: a feature with a bound of its own adds a class here and an entry to the list. A limit
must grant something to the first sequence it is asked about in a fresh plan, or that sequence never moves; `Follows`
may refuse because what it waits for is itself moving.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from quire.engine.pacing import Pace
from quire.engine.sequence import RUNNING, Sequence
from quire.observe.steps import STEP_TIME, TOKENS
from quire.runner.plan import Plan

SHORT = 64  # tokens of a prompt that is alone: so few are not timed
EVERY, SELDOM = 64, 8  # steps of decoding that are learned from: the first of them all, later every eighth


class Limit(Protocol):
    """Asked in the order of planning. A class that names this one as its base gets what is below: no bound at all."""

    admission_only: bool  # asked only whether a waiting sequence may start; never charged
    reason: str = "limit"  # a word for why it cuts a grant, told with the step; may change from one grant to the next

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        """A new plan starts; `live` are all unfinished sequences by request id, and so many of them run. What a plan costs must
        not depend on how many wait, so `live` is for looking some up, never for going through it."""

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        """The number of the n tokens from position `start` that may be computed in this step; 0: none."""
        return n

    def waits_for(self, seq: Sequence) -> tuple[Sequence, int] | None:
        """Why `grant` has just said 0 to a waiting sequence, if that is because of another one: that one, and how many of its
        tokens must be computed before it is worth asking again. None: it is asked again in the next plan."""
        return None

    def charge(self, seq: Sequence, start: int, n: int) -> None:
        """Count n tokens of a sequence that were planned."""

    def passes(self, count: int) -> bool:
        """Whether any `count` running sequences may compute a token each in this step, and sample the next. If every limit says
        so, none is asked about one by one, and `passed` says how many it were."""
        return True

    def passed(self, count: int) -> None:
        """Count `count` sequences that were planned with a token each."""

    def arrives(self, seq: Sequence) -> None:
        """Note that a sequence is about to wait for a slot. Raises QuireError to refuse it, and then notes nothing: `ended` is not
        called for it."""

    def opened(self, seq: Sequence) -> None:
        """Note that a sequence has taken a slot."""

    def ended(self, seq: Sequence) -> None:
        """Note that a sequence is finished."""

    def learn(self, plan: Plan, seconds: float) -> None:
        """Learn how long a step took: from the completion of the step before it, or from its own start if that was later."""


class TokenBudget(Limit):
    """At most `most` tokens in a step."""

    __slots__ = ("left", "most", "reason")
    admission_only = False
    bound = 0.0  # seconds that a step may take beside sequences that decode; 0: as long as it does

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"a budget of {most} tokens: a step computes at least one")
        self.most = self.left = most
        self.reason = TOKENS

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        self.left = self.most

    def rest(self, first: Sequence) -> None:
        """Leave what is left of the step to prompts: all that decode are planned, and `first` is the first prompt."""

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        return n if n < self.left else self.left

    def charge(self, seq: Sequence, start: int, n: int) -> None:
        self.left -= n

    def passes(self, count: int) -> bool:
        return count <= self.left

    def passed(self, count: int) -> None:
        self.left -= count


class StepTime(TokenBudget):
    """At most `most` tokens in a step, and of prompts no more than fit into the time that it may take: how many, `Pace` says
    (pacing.py). Sequences that decode are never held back."""

    __slots__ = ("_alone", "_decoded", "_keys", "_own", "_pace", "_rows", "_timed")

    def __init__(self, most: int, pace: Pace) -> None:
        super().__init__(most)
        self._pace = pace
        self._keys: dict[int, Sequence] = {}  # that have had a slot
        self._own: dict[int, Sequence] = {}  # ... and have an inter-token bound of their own
        self._decoded = 0  # steps in which everybody decoded
        self._rows = 0  # tokens of this step that no prompt has
        self._alone = self._timed = False

    @property
    def bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._pace.bound

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        self.left, self.reason, self._rows = self.most, TOKENS, 0
        self._alone, self._timed = len(live) == 1, False

    def rest(self, first: Sequence) -> None:
        if not self._rows and self._alone and first.left <= SHORT:
            return  # it is over soon, and nobody waits for it
        left = self._pace.begin(self._rows, self._own.values(), first, self.left)
        self._timed = True
        if left < self.left:
            self.left, self.reason = left, STEP_TIME

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        n = min(n, self.left)
        if not self._timed:
            return n
        fits = self._pace.fit(start, n)
        if fits < n:
            self.reason = STEP_TIME
        return fits

    def charge(self, seq: Sequence, start: int, n: int) -> None:
        self.left -= n
        if self._timed:
            self._pace.charge(start, n)
        elif start >= len(seq.tokens) - 1:
            self._rows += n

    def passed(self, count: int) -> None:
        self.left -= count
        self._rows += count

    def opened(self, seq: Sequence) -> None:
        self._keys[seq.key] = seq
        if seq.request.itl:
            self._own[seq.key] = seq

    def ended(self, seq: Sequence) -> None:
        self._keys.pop(seq.key, None)
        self._own.pop(seq.key, None)

    def learn(self, plan: Plan, seconds: float) -> None:
        """Note a step for the cost model. Of steps in which everybody decodes there are many: later, each eighth is enough."""
        work, tokens, pairs = plan.work, 0, 0.0
        if work[-1].start < 0:
            self._decoded += 1
            if self._decoded > EVERY and self._decoded % SELDOM:
                return
        rows = context = 0
        for w in work:
            if w.start < 0:
                rows += w.n
                seq = self._keys.get(w.key)
                context += 0 if seq is None else seq.computed
            else:
                tokens += w.n
                pairs += w.n * (w.start + 0.5 * (w.n + 1))
        self._pace.seen.append(((rows, context, tokens, pairs), seconds))


class LogitRows(Limit):
    """At most `most` rows of logits in a step: they are as wide as the vocabulary.

    A token that is sampled or verified takes a row, and so does each prompt position whose logprobs are wanted.
    """

    __slots__ = ("left", "most")
    admission_only = False
    reason = "logit_rows"

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"a bound of {most} logit rows: a step needs at least one")
        self.most = self.left = most

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        self.left = self.most

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        left = self.left
        if start < seq.prompt_rows or start >= len(seq.tokens) - 1:
            return n if n < left else left  # every token takes a row
        if start + n >= len(seq.tokens) and not left:
            return n - 1  # all but the one that would sample
        return n

    def charge(self, seq: Sequence, start: int, n: int) -> None:
        known = len(seq.tokens)
        if start >= known - 1:
            self.left -= n
            return
        if start < seq.prompt_rows:
            self.left -= min(start + n, seq.prompt_rows) - start
        if start + n >= known:
            self.left -= 1

    def passes(self, count: int) -> bool:
        return count <= self.left

    def passed(self, count: int) -> None:
        self.left -= count


class Drafts(Limit):
    """At most `most` draft tokens in a step, as many for each running sequence, and never what others need of the budget.

    Draft tokens pay while rows are cheap; in a large batch they are not, and each of them is a row that may be in vain.
    """

    __slots__ = ("_budget", "_each", "_most")
    admission_only = False
    reason = "draft_tokens"

    def __init__(self, most: int, budget: int) -> None:
        self._most, self._budget, self._each = most, budget, 0

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        running = max(1, running)
        self._each = max(0, min(self._most, self._budget // 2 - running)) // running

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        sure = max(1, len(seq.tokens) - start)
        return n if n <= sure else min(n, sure + self._each)


class WholePrompts(Limit):
    """A prompt is computed in one step or not at all: for models in which every row sees every other, and nothing is cached.

    The token budget must hold the longest prompt. What a step computes goes by the budget that is left, which is counted here,
    too: a waiting sequence is asked about before it is known how many tokens it would get.
    """

    __slots__ = ("_left", "_most")
    admission_only = False

    def __init__(self, budget: int, longest: int) -> None:
        if budget < longest:
            raise ValueError(f"a step of {budget} tokens cannot hold a text of {longest}")
        self._most = self._left = budget

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        self._left = self._most

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        whole = len(seq.tokens) - start
        return n if whole <= (self._left if seq.lease is None else n) else 0

    def charge(self, seq: Sequence, start: int, n: int) -> None:
        self._left -= n

    def passed(self, count: int) -> None:
        self._left -= count


class Follows(Limit):
    """A sequence that asked to share another's prompt waits until that prompt is computed, or its owner is gone.

    Only an earlier arrival is waited for, so nobody waits in a circle.
    """

    __slots__ = ("_live",)
    admission_only = True
    reason = "follows"

    def __init__(self) -> None:
        self._live: Mapping[str, Sequence] = {}

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        self._live = live

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        name = seq.request.follows
        if name is None:
            return n
        leader = self._live.get(name)
        return n if leader is None or leader.prompt_done or leader.key >= seq.key else 0

    def waits_for(self, seq: Sequence) -> tuple[Sequence, int] | None:
        leader = self._live[seq.request.follows or ""]
        return leader, leader.prompt_len


class SamePrompt(Limit):
    """A sequence does not compute what a running one is computing just now: it waits, and then finds it in the cache.

    It waits where that saves it half of its prompt or more, and for no longer than the other's prompt takes. A prompt is
    known by its first page, so a running sequence with another beginning costs one look.
    """

    __slots__ = ("_awaited", "_leaders", "_size")
    admission_only = True
    reason = "same_prompt"

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._awaited: tuple[Sequence, int] | None = None  # of the sequence that was refused last
        self._leaders: dict[tuple[str, tuple[int, ...]], Sequence] = {}

    def begin(self, live: Mapping[str, Sequence], running: int) -> None:
        if self._leaders:
            self._leaders = {name: seq for name, seq in self._leaders.items() if _computing(seq)}

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        leader = self._leaders.get(self._name(seq)) if self._leaders else None
        if leader is None or leader is seq or not _computing(leader):
            return n
        ready = leader.computed // self._size * self._size  # that much is in the cache already
        both = min(common(leader.tokens, seq.tokens), seq.reusable) // self._size * self._size
        if 2 * (both - ready) < len(seq.tokens) - ready:
            return n
        self._awaited = leader, 2 * both - len(seq.tokens) + 1
        return 0

    def waits_for(self, seq: Sequence) -> tuple[Sequence, int] | None:
        return self._awaited

    def opened(self, seq: Sequence) -> None:
        if len(seq.tokens) > self._size and not seq.prompt_done:
            self._leaders.setdefault(self._name(seq), seq)

    def _name(self, seq: Sequence) -> tuple[str, tuple[int, ...]]:
        return seq.request.namespace, tuple(seq.tokens[: self._size])


class Watcher(Protocol):
    """What is told of the sequences that have a constraint: that one has taken a slot, and that one is finished."""

    def opened(self, seq: Sequence) -> None: ...
    def ended(self, seq: Sequence) -> None: ...


class OneInFlight(Limit):
    """A sequence with a constraint has one step in flight that samples, and no draft tokens: what its next token may be depends on
    its last one. A watcher is told of these sequences, and of no others.
    """

    __slots__ = ("_keys", "_watcher")
    admission_only = False
    reason = "constraint"

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._keys: set[int] = set()  # of those that have had a slot

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        if seq.request.constraint is None:
            return n
        if seq.sampling:
            return 0
        return min(n, max(1, len(seq.tokens) - start))  # no drafts

    def passes(self, count: int) -> bool:
        return not self._keys

    def opened(self, seq: Sequence) -> None:
        if seq.request.constraint is not None:
            self._keys.add(seq.key)
            self._watcher.opened(seq)

    def ended(self, seq: Sequence) -> None:
        if seq.request.constraint is not None:
            self._keys.discard(seq.key)
            self._watcher.ended(seq)


def _computing(seq: Sequence) -> bool:
    return seq.status == RUNNING and not seq.prompt_done


def common(a: list[int], b: list[int]) -> int:
    """The number of leading tokens that two sequences share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # the same up to low, not up to high
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def standard(
    logit_rows: int | None = None, prefix_pages: int | None = None, drafts: tuple[int, int] | None = None
) -> tuple[Limit, ...]:
    """The limits of an engine, besides its token budget.

    `prefix_pages` is the page size of its prefix cache, if it has one; `drafts` the draft tokens and all tokens of a step.
    """
    limits: list[Limit] = [Follows()]
    if prefix_pages is not None:
        limits.append(SamePrompt(prefix_pages))
    if logit_rows is not None:
        limits.append(LogitRows(logit_rows))
    if drafts is not None:
        limits.append(Drafts(*drafts))
    return tuple(limits)
