"""The scheduler: the only place that decides. It touches no tensor, no clock and no I/O, and names no feature.

plan() says what the next step computes, commit() takes its results. Any number of plans may be in flight in between, as
long as they are executed and committed in order. What the device has sampled it is never told: it knows a sequence's last
token and true length, and while steps are in flight the scheduler knows an upper bound.

  * running sequences come first: those with one token to compute (nobody waits behind a long prompt), then chunks of
    prompts; then waiting ones are admitted, each group in `order` (policy, then arrival)
  * no pages left: the last running sequence in that order is preempted, which may be the one that asked. So the first
    always moves, and since one sequence alone fits the pools, all of them finish
  * a waiting sequence never preempts a running one, whatever its priority: it is next when a slot or pages come free.
    (Taking them by force can throw work away and still not make enough room.)
  * stale work (sequence gone, or an older epoch) is dropped, never delivered; only verified KV is published
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import Limit, TokenBudget, standard
from quire.engine.sequence import FINISHED, RUNNING, WAITING, Sequence, mix_seed
from quire.engine.types import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Event, Request, Stats
from quire.observe.errors import BadRequest
from quire.runner.plan import Logprob, Open, Plan, Result, Row, Work

_order = attrgetter("order")


def by_priority(request: Request) -> int:
    """The default policy: lower priority values first. Equals go by arrival, as under any policy."""
    return request.priority


class Scheduler:
    """Decides for one engine.

    `slots`   sequences that can run at once            `budget`  tokens in a step
    `context` longest sequence; cut to what the pools hold, and told in `self.context`
    `draw`    gives a seed to a request without one     `drafts`  tokens a step may guess ahead for each sequence
    `limits`  what else bounds a step                   `policy`  sorts requests: what it ranks lowest goes first
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        slots: int,
        budget: int,
        context: int,
        draw: Callable[[], int],
        limits: Iterable[Limit] | None = None,
        drafts: int = 0,
        prefix_cache: bool = True,
        policy: Callable[[Request], Any] = by_priority,
    ) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots: at least one sequence must be able to run")
        if drafts and not tree.rewinds:
            raise ValueError(f"{drafts} drafts: layers that carry a state cannot take back a guess that was wrong")
        self.tree = tree
        self._fits = tree.longest(budget)  # alone; None: any sequence
        self.context = context if self._fits is None else min(context, self._fits)
        self.admitted: list[str] = []  # ids that took a slot for the first time in the newest plan
        self._budget = TokenBudget(budget)
        self._limits: tuple[Limit, ...] = (self._budget, *(standard() if limits is None else limits))
        self._step_limits = tuple(limit for limit in self._limits if not limit.admission_only)
        self._draw = draw
        self._drafts = drafts
        self._prefix_cache = prefix_cache
        self._policy = policy
        self._waiting: list[Sequence] = []  # both lists sorted by order
        self._running: list[Sequence] = []
        self._ids: dict[str, Sequence] = {}
        self._keys: dict[int, Sequence] = {}
        self._slots = list(range(slots - 1, -1, -1))
        self._closed: list[int] = []  # slots left since the last plan
        self._arrivals = 0
        self._planned = 0
        self._committed = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._computed_prompt_tokens = 0
        self._output_tokens = 0
        self._drafted = 0
        self._guessed = 0

    @property
    def has_work(self) -> bool:
        """Some request is not finished."""
        return bool(self._keys)

    @property
    def idle(self) -> bool:
        """No request is left."""
        return not self._keys

    def stats(self) -> Stats:
        """A snapshot."""
        tree = self.tree
        return Stats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=tree.pool.size,
            pages_used=tree.pool.size - tree.available(),
            page_size=tree.page_size,
            steps=self._planned,
            prompt_tokens=self._prompt_tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            output_tokens=self._output_tokens,
            prefix_queries=tree.queries,
            prefix_hits=tree.hits,
            preemptions=self._preemptions,
            evictions=tree.evictions,
            drafted_tokens=self._drafted,
            accepted_tokens=self._guessed,
        )

    # ---- requests come and go

    def add(self, request: Request) -> int:
        """Queue a request; returns its key in plans. Raises BadRequest for one that could never run."""
        prompt, sampling = len(request.tokens), request.sampling
        if request.id in self._ids:
            raise BadRequest(f"request id {request.id!r} is in use", param="id", cure="wait for it, or choose another")
        if not prompt:
            raise BadRequest("the prompt has no tokens: there is nothing to continue", param="tokens")
        if prompt + 1 > self.context:
            held = -(-self.context // self.tree.page_size)
            why = f", which is all that the KV pool holds ({held} pages)" if self._fits == self.context else ""
            raise BadRequest(
                f"the prompt has {prompt} tokens, and with at least one for the answer that is {prompt + 1}: "
                f"the context is {self.context}{why}",
                param="tokens",
                code="context_length_exceeded",
            )
        if sampling.max_tokens is not None and sampling.max_tokens < 1:
            raise BadRequest(f"max_tokens is {sampling.max_tokens}: it must be at least 1", param="max_tokens")
        seed = self._draw() if sampling.seed is None else sampling.seed
        seq = Sequence.of(request, self._arrivals, self._policy(request), seed, self.context)
        self._arrivals += 1
        self._ids[request.id] = self._keys[seq.key] = seq
        insort(self._waiting, seq, key=_order)
        return seq.key

    def abort(self, request_id: str) -> list[Event]:
        """Let a request go now, with its pages. Its work in flight is dropped when it comes back."""
        seq = self._ids.get(request_id)
        return [] if seq is None else [self._finish(seq, FINISH_ABORT)]

    def _finish(self, seq: Sequence, reason: str, **news: Any) -> Event:
        if seq.status == RUNNING:
            self._leave(seq)
        else:
            _take(self._waiting, seq)
        seq.status = FINISHED
        del self._ids[seq.request.id], self._keys[seq.key]
        return Event(id=seq.request.id, finish=reason, receipt=seq.receipt(), **news)

    def _leave(self, seq: Sequence) -> None:
        """A running sequence gives up its lease and its slot."""
        _take(self._running, seq)
        if seq.lease is not None:
            self.tree.release(seq.lease)
        self._closed.append(seq.slot)
        self._slots.append(seq.slot)
        seq.lease, seq.slot, seq.again = None, -1, None
        seq.computed = seq.in_flight = seq.sampling = 0
        seq.sampled_here = False

    def _preempt(self, seq: Sequence) -> None:
        """Back to waiting, in its place. What it has published is still cached: resuming is a hit."""
        self._leave(seq)
        seq.epoch += 1
        seq.preemptions += 1
        self._preemptions += 1
        seq.status = WAITING
        insort(self._waiting, seq, key=_order)

    # ---- the next step

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute before the next commit."""
        self.admitted = []
        for limit in self._limits:
            limit.begin(self._ids)
        budget, preemptions = self._budget, self._preemptions
        work: list[Work] = []
        for seq in self._ones(work):
            if not budget.left:
                break
            if seq.status == RUNNING:
                self._compute(seq, work)
        opened: list[Open] = []
        if self._preemptions != preemptions:  # planned, then preempted by a chunk of a better one; no room for more
            work = [w for w in work if self._keys[w.key].epoch == w.epoch]
        elif self._waiting and self._slots and budget.left:
            self._admit(work, opened)
        if not work:
            return None
        plan = Plan(step=self._planned, work=work, opened=opened, closed=self._closed)
        self._planned += 1
        self._closed = []
        return plan

    def _ones(self, work: list[Work]) -> list[Sequence]:
        """Plan the running sequences that have one token to compute. Returns those that have more.

        Nearly all go on as in the step before: the device knows their token, and where it goes; no limit minds. Such a one gets
        the same Work again, after a look at the bounds.
        """
        running, budget, size, chunks, again = self._running, self._budget, self.tree.page_size, list[Sequence](), 0
        free = not self._drafts and all(limit.passes(len(running)) for limit in self._step_limits)
        for seq in running:  # preemption takes from the end, so this stays in step
            at, same, lease = seq.computed + seq.in_flight, seq.again, seq.lease
            # The device knows its token, and the runner its page; and it does not end here.
            if free and same and lease and at < lease.dirty * size and at < seq.max_len - 1:
                seq.in_flight += 1
                seq.sampling += 1
                work.append(same)
                again += 1
                continue
            if not budget.left:
                break
            if seq.sampling or at >= len(seq.tokens) - 1:
                self._compute(seq, work)
            else:
                chunks.append(seq)
        if again:
            for limit in self._step_limits:
                limit.passed(again)
        return chunks

    def _compute(self, seq: Sequence, work: list[Work]) -> None:
        """Plan what a running sequence can compute now, making room by preemption if it must."""
        start = seq.computed + seq.in_flight  # an upper bound when the device knows better
        on_device = seq.sampling > 0 or seq.sampled_here
        if on_device:
            n = min(1 + self._drafts, seq.max_len - 1 - start)  # the last token's own KV is never needed
            if n <= 0:
                return
        else:
            n = len(seq.tokens) - start
        for limit in self._step_limits:
            n = limit.grant(seq, start, n)
            if n <= 0:
                return
        lease = seq.held
        upto = start + n
        if on_device and n > 1 and upto > lease.room and not self.tree.extend(lease, upto):
            n, upto = 1, start + 1  # nobody gives way to a guess
        if upto > lease.room:
            while not self.tree.extend(lease, upto):
                if self._drafts and on_device and seq.in_flight > seq.sampling:
                    return  # `start` counts drafts in flight: nobody gives way to these, either
                victim = self._running[-1]
                if victim is seq and seq.in_flight:
                    return  # what it has in flight may let pages go when it comes back; if not, the next plan decides
                self._preempt(victim)
                if victim is seq:
                    return
        for limit in self._step_limits:
            limit.charge(seq, start, n)
        page_from, pages, more = lease.changes()
        sample = on_device or upto == len(seq.tokens)
        seq.in_flight += n
        if sample:
            seq.sampling += 1
        made = Work(
            key=seq.key,
            epoch=seq.epoch,
            slot=seq.slot,
            n=n,
            start=-1 if on_device else start,
            tokens=None if on_device else seq.tokens[start:upto],
            drafts=n - 1 if on_device else 0,
            sample=sample,
            prompt_logits=min(upto, seq.prompt_rows) - start if start < seq.prompt_rows else 0,
            page_from=page_from,
            pages=pages,
            more=more,
        )
        if on_device and n == 1 and not pages:
            seq.again = made
        work.append(made)

    def _admit(self, work: list[Work], opened: list[Open]) -> None:
        """Waiting sequences take slots, in order. One that a limit holds back is passed; one without room is not."""
        tree, waiting, running, size = self.tree, self._waiting, self._running, self.tree.page_size
        # Pages that running sequences still need for the tokens they have and the next one: not to be given away.
        promised, one = [0] * len(tree.pools), [1] * len(tree.pools)
        for seq in running:
            self._promise(seq, promised)
        passed: list[Sequence] = []
        i = 0
        while i < len(waiting) and self._slots and self._budget.left and tree.fits(promised, one):
            seq = waiting[i]
            if not all(limit.grant(seq, 0, 1) for limit in self._limits):
                passed.append(seq)
                i += 1
                continue
            reusable = seq.reusable if self._prefix_cache else 0
            seq.lease = lease = tree.match(seq.request.namespace, seq.tokens, reusable)
            if not tree.fits(promised, self._short(seq)):
                tree.release(lease)
                seq.lease = None
                break
            i += 1
            seq.computed, seq.slot = lease.shared * size, self._slots.pop()
            insort(running, seq, key=_order)
            before = len(work)
            self._compute(seq, work)
            if len(work) == before:  # a limit holds it back after all
                _take(running, seq)
                tree.release(lease)
                self._slots.append(seq.slot)
                seq.lease, seq.slot, seq.computed = None, -1, 0
                passed.append(seq)
                continue
            self._promise(seq, promised)
            self._opened(seq, reusable, lease.shared * size, opened)
        if i > len(passed):
            waiting[:i] = passed

    def _short(self, seq: Sequence) -> list[int]:
        """Pages of each group that it still needs for the tokens it has and the next one."""
        wanted = seq.wanted
        return self.tree.short(seq.lease, wanted, max(1, min(self._budget.most, wanted - seq.computed)))

    def _promise(self, seq: Sequence, promised: list[int]) -> None:
        for g, pages in enumerate(self._short(seq)):
            promised[g] += pages

    def _opened(self, seq: Sequence, reusable: int, found: int, opened: list[Open]) -> None:
        """Note a sequence that has just taken a slot."""
        seq.status = RUNNING
        for limit in self._limits:
            limit.opened(seq)
        request = seq.request
        if not seq.admitted:
            seq.admitted = True
            seq.cached = found
            self.admitted.append(request.id)
            self._prompt_tokens += seq.prompt_len
            self.tree.count(reusable, found)
        opened.append(
            Open(
                slot=seq.slot,
                sampling=request.sampling,
                seed=mix_seed(seq.seed, request.index),
                tokens=seq.tokens.copy(),
                prompt_len=seq.prompt_len,
                stop_ids=list(seq.stop_ids),
                adapter=request.adapter,
            )
        )

    # ---- its results

    def commit(self, plan: Plan, result: Result) -> list[Event]:
        """Take a step's results, in the order of plans. Returns the news of every request that has any."""
        if plan.step != self._committed:
            raise RuntimeError(f"step {plan.step} committed, but step {self._committed} is next")
        if len(plan.work) != len(result.rows):
            raise RuntimeError(f"step {plan.step} has {len(plan.work)} rows of work and {len(result.rows)} of results")
        self._committed += 1
        events: list[Event] = []
        keys, output = self._keys, 0
        for work, row in zip(plan.work, result.rows, strict=True):
            seq = keys.get(work.key)
            if seq is None or seq.epoch != work.epoch:
                continue  # gone, or preempted since: nobody wants this
            seq.in_flight -= work.n
            seq.steps += 1
            if row.error is not None:
                events.append(self._finish(seq, FINISH_ERROR, error=row.error))
                continue
            seq.computed += row.accepted
            if work.start >= 0:
                self._count_prompt(seq, work)
            finish, taken, sampled = None, 0, row.tokens
            if work.sample:
                seq.sampling -= 1
                seq.sampled_here = True
                tokens, taken = seq.tokens, len(sampled)
                tokens.extend(sampled)
                if len(tokens) >= seq.max_len or not seq.stop_ids.isdisjoint(sampled):
                    finish, taken = self._ended(seq, taken)
                output += taken
                if row.drafted:
                    self._count_drafts(seq, row.drafted, min(row.accepted - 1, taken))
            lease, verified = seq.lease, seq.computed
            if lease and verified >= lease.due:
                if self._prefix_cache:
                    self.tree.publish(lease, seq.tokens, verified)  # no further than the tokens kept
                self.tree.forget(lease, verified)
            if finish is not None or work.prompt_logits:
                events += self._news(seq, work, row, finish, taken)
            elif taken:
                events.append(Event(id=seq.request.id, tokens=sampled, logprobs=row.logprobs or ()))
        self._output_tokens += output
        return events

    def _count_prompt(self, seq: Sequence, work: Work) -> None:
        """Some of these tokens may be the prompt's."""
        if work.start < seq.prompt_len:
            seq.chunks += 1
            self._computed_prompt_tokens += min(work.start + work.n, seq.prompt_len) - work.start

    def _count_drafts(self, seq: Sequence, drafted: int, right: int) -> None:
        """So many tokens were guessed, and so many of these are in the answer."""
        seq.drafted += drafted
        seq.guessed += right
        self._drafted += drafted
        self._guessed += right

    def _ended(self, seq: Sequence, new: int) -> tuple[str | None, int]:
        """Cut the `new` tokens at its end behind the one that ends the sequence. Why it ends, if it does; how many are left."""
        tokens = seq.tokens
        for at in range(len(tokens) - new, len(tokens)):
            stops = tokens[at] in seq.stop_ids and at >= seq.min_len
            if stops or at + 1 >= seq.max_len:
                taken = new - (len(tokens) - at - 1)
                del tokens[at + 1 :]
                return FINISH_STOP if stops else FINISH_LENGTH, taken
        return None, new

    def _news(self, seq: Sequence, work: Work, row: Row, finish: str | None, taken: int) -> list[Event]:
        """The event of a row that ends a sequence or computed part of its prompt's logprobs, if there is one."""
        prompt, have = tuple[Logprob, ...](), seq.prompt_logprobs
        if work.prompt_logits and len(have) < seq.prompt_rows:
            have += row.prompt_logprobs[len(have) - work.start :]  # after a preemption some come again
            if len(have) == seq.prompt_rows:
                prompt = tuple(have)
        tokens, logprobs = row.tokens, row.logprobs
        if finish is None:
            event = Event(id=seq.request.id, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt)
            return [event] if tokens or prompt else []
        if taken < len(tokens):
            tokens, logprobs = tokens[:taken], logprobs[:taken]
        stop = tokens[-1] if finish == FINISH_STOP else None
        return [self._finish(seq, finish, tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt, stop_id=stop)]


def _take(sequences: list[Sequence], seq: Sequence) -> None:
    """Remove a sequence from a list sorted by order."""
    i = bisect_left(sequences, seq.order, key=_order)
    if i == len(sequences) or sequences[i] is not seq:
        raise RuntimeError(f"sequence {seq.key} is {seq.status}, but not where such sequences are")
    del sequences[i]
