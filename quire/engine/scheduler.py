"""The scheduler: the only place that decides. It touches no tensor, no clock and no I/O, and names no feature.

plan() says what the next step computes, commit() takes its results. Any number of plans may be in flight in between, as
long as they are executed and committed in order. What the device has sampled it is never told: it knows a sequence's last
token and true length, and while steps are in flight the scheduler knows an upper bound.

  * running sequences come first: those with one token to compute (nobody waits behind a long prompt), then chunks of
    prompts; then waiting ones are admitted, each group in `order` (policy, then arrival)
  * the first prompt that could use all that is left of a step leaves a share to those behind it: see policy.py
  * what a plan costs does not depend on what waits: who takes a slot is admission.py's to say, and limits are asked about few
  * no pages left: the last running sequence in that order is preempted, which may be the one that asked. So the first
    always moves, and since one sequence alone fits the pools, all of them finish
  * stale work (sequence gone, or an older epoch) is dropped, never delivered; only verified KV is published
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from quire.cache.prefix_tree import PrefixTree
from quire.engine.admission import FEW, FULL, HELD_BACK, TAKEN, Admission, opening
from quire.engine.limits import Limit, TokenBudget, standard
from quire.engine.loads import Source
from quire.engine.policy import FairShare, Policy, Share
from quire.engine.sequence import FINISHED, RUNNING, Sequence
from quire.engine.types import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Event, Request, Stats
from quire.observe.errors import BadRequest
from quire.runner.plan import Logprob, Open, Plan, Result, Row, Work

PASSED = 32  # waiting sequences that limits may hold back in one plan, before it stops asking
_left = attrgetter("left")


class Scheduler:
    """Decides what one engine computes in each step.

    `slots`   sequences that can run at once            `budget`  tokens in a step, or what counts them
    `context` longest sequence; cut to what the pools hold, and told in `self.context`
    `draw`    gives a seed to a request without one     `drafts`  draft tokens of a sequence in a step
    `limits`  what else bounds a step                   `policy`  the order of requests, and how prompts share a step
    `vectors` requests may want a vector of their tokens in place of an answer
    """

    def __init__(
        self,
        tree: PrefixTree,
        *,
        slots: int,
        budget: int | TokenBudget,
        context: int,
        draw: Callable[[], int],
        limits: Iterable[Limit] | None = None,
        drafts: int = 0,
        prefix_cache: bool = True,
        vectors: bool = False,
        policy: Policy | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots: at least one sequence must be able to run")
        if drafts and not tree.rewinds:
            raise ValueError(
                f"{drafts} drafts: layers that carry a state cannot take back a draft token that was rejected"
            )
        self.tree = tree
        self._budget = TokenBudget(budget) if isinstance(budget, int) else budget
        self._fits = tree.longest(self._budget.most)  # alone; None: any sequence
        self.context = context if self._fits is None else min(context, self._fits)
        self.admitted: list[str] = []  # ids that took a slot for the first time in the newest plan
        self._limits: tuple[Limit, ...] = (self._budget, *(standard() if limits is None else limits))
        self._step_limits = tuple(limit for limit in self._limits if not limit.admission_only)
        self._learning = [limit for limit in self._limits if type(limit).learn is not Limit.learn]
        self._arriving = [limit for limit in self._limits if type(limit).arrives is not Limit.arrives]
        self._draw = draw
        self._drafts = drafts
        self._prefix_cache = prefix_cache
        self._vectors = vectors
        self._policy = FairShare() if policy is None else policy
        self._admission = Admission(tree, self._limits, self._budget, slots, prefix_cache)
        self._queue, self._running, self._slots = self._admission.queue, self._admission.running, self._admission.slots
        self._ids: dict[str, Sequence] = {}
        self._keys: dict[int, Sequence] = {}
        self._arrivals = 0
        self._planned = 0
        self._committed = 0
        self._prompt_tokens = 0
        self._computed_prompt_tokens = 0
        self._output_tokens = 0
        self._drafted = 0
        self._accepted = 0

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return bool(self._keys)

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self._keys

    def stats(self) -> Stats:
        """A snapshot."""
        tree, loads = self.tree, self._admission.loads
        loading = len(loads or ())
        return Stats(
            running=len(self._running),
            waiting=len(self._queue) + loading,
            loading=loading,
            pages_total=tree.pool.size,
            pages_used=tree.pool.size - tree.available(),
            page_size=tree.page_size,
            steps=self._planned,
            prompt_tokens=self._prompt_tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            output_tokens=self._output_tokens,
            prefix_queries=tree.queries,
            prefix_hits=tree.hits,
            loaded_tokens=0 if loads is None else loads.loaded,
            preemptions=self._admission.preemptions,
            evictions=tree.evictions,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            step_bound=self._budget.bound,
        )

    def load_from(self, source: Source) -> None:
        """Let waiting sequences wait, from now on, for pages that the source has and the tree has not."""
        self._admission.load_from(source)

    # ---- requests come and go

    def add(self, request: Request) -> int:
        """Queue a request; returns its key in plans. Raises BadRequest for one that could never run."""
        prompt, sampling = len(request.tokens), request.sampling
        if request.id in self._ids:
            raise BadRequest(f"request id {request.id!r} is in use", param="id", cure="wait for it, or choose another")
        if not prompt:
            raise BadRequest("the prompt has no tokens: there is nothing to continue", param="tokens")
        if request.vector and not self._vectors:
            raise BadRequest("this model generates: it makes no embeddings and no scores", cure="load it with --task")
        if prompt + (not request.vector) > self.context:
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
        seq = Sequence.of(request, self._arrivals, self._policy.rank(request), seed, self.context)
        for limit in self._arriving:
            limit.arrives(seq)
        self._arrivals += 1
        self._ids[request.id] = self._keys[seq.key] = seq
        self._queue.add(seq)
        return seq.key

    def abort(self, request_id: str) -> list[Event]:
        """Let a request go now, with its pages. Its work in flight is dropped when it comes back."""
        seq = self._ids.get(request_id)
        return [] if seq is None else [self._finish(seq, FINISH_ABORT)]

    def _finish(self, seq: Sequence, reason: str, **news: Any) -> Event:
        self._admission.leave(seq)
        seq.status = FINISHED
        del self._ids[seq.request.id], self._keys[seq.key]
        self._queue.come(seq)
        for limit in self._limits:
            limit.ended(seq)
        return Event(id=seq.request.id, finish=reason, receipt=seq.receipt(), **news)

    # ---- the next step

    def plan(self) -> Plan | None:
        """The next step, or None when there is nothing to compute before the next commit."""
        self.admitted = []
        admission = self._admission
        admission.begin(self._planned)
        for limit in self._limits:
            limit.begin(self._ids, len(self._running))
        work: list[Work] = []
        opened: list[Open] = []
        preemptions = admission.preemptions
        chunks = self._single(work)
        first = chunks[0] if chunks else self._queue.first() if self._queue and self._slots else None
        if self._budget.left and first is not None:
            self._budget.rest(first)
            # where something gave way there is no room for more
            self._prompts(chunks, work, opened, admission.preemptions == preemptions)
        if admission.preemptions != preemptions:  # planned, then preempted by a chunk of a better one
            work = [w for w in work if self._keys[w.key].epoch == w.epoch]
            slots = {w.slot for w in work}
            for new in [
                new for new in opened if new.slot not in slots
            ]:  # they came and went, and no device heard of them
                opened.remove(new)
                admission.closed.remove(new.slot)
        if not work:
            return None
        plan = Plan(step=self._planned, work=work, opened=opened, closed=admission.closed)
        self._planned += 1
        admission.closed = []
        return plan

    def _single(self, work: list[Work]) -> list[Sequence]:
        """Plan the running sequences that have one token to compute. Returns those that have more.

        For nearly all of them nothing has changed since the step before: the device knows their token and their pages, and no
        limit holds them back. Such a sequence gets the same Work again, once its bounds are checked.
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

    def _prompts(self, chunks: list[Sequence], work: list[Work], opened: list[Open], admits: bool) -> None:
        """Give the tokens that are left to prompts: to running ones, then to waiting ones, in order."""
        admission, done = self._admission, set[int]()  # by key: what the later ones got
        preemptions = admission.preemptions
        for i, seq in enumerate(chunks):
            if not self._budget.left:
                return
            if seq.status != RUNNING or seq.key in done:
                continue
            admits = admits and admission.preemptions == preemptions
            if i + 1 < len(chunks) or (admits and self._queue and self._slots):
                done |= self._share(seq, chunks[i + 1 :], work, opened, admits)
            if seq.status == RUNNING:
                self._compute(seq, work)
        if admits and admission.preemptions == preemptions:
            self._admit(work, opened)

    def _share(
        self, first: Sequence, running: list[Sequence], work: list[Work], opened: list[Open], admits: bool = True
    ) -> set[int]:
        """Give the prompts behind one that could use all the tokens that are left their share of them.

        Returns the keys of the `running` ones that are planned."""
        budget = self._budget
        left = budget.left
        share = self._policy.share(first, left)
        if not (share.any or share.short) or self._granted(first) <= left - max(share.any, 1):
            return set()
        done = self._later(first, running, work, opened, share, admits)
        self._policy.shared(first, left, left - budget.left)
        return done

    def _granted(self, seq: Sequence) -> int:
        """How many of the known tokens of a running sequence its limits allow in this step."""
        start = seq.computed + seq.in_flight
        n = len(seq.tokens) - start
        for limit in self._step_limits:
            n = limit.grant(seq, start, n)
        return n

    def _later(
        self,
        first: Sequence,
        running: list[Sequence],
        work: list[Work],
        opened: list[Open],
        share: Share,
        admits: bool,
    ) -> set[int]:
        """Plan prompts behind `first`, the shortest first, and of their share alone."""
        admission, budget, rank, left = self._admission, self._budget, first.order[0], self._budget.left
        preemptions = admission.preemptions
        rest = sorted((seq for seq in running if seq.order[0] == rank), key=_left, reverse=True)
        done: set[int] = set()
        tried: set[int] = set()
        used = 0
        while used < left:
            while rest and rest[-1].status != RUNNING:
                rest.pop()
            seq, waits = rest[-1] if rest else None, False
            if admits and self._slots and len(tried) < PASSED and admission.preemptions == preemptions:
                short = max(share.any, (share.short - used) // FEW)
                other = admission.overtaking(first, None if seq is None else seq.left, short, tried)
                seq, waits = (seq, False) if other is None else (other, True)
            if seq is None:
                break
            most = max(share.any, share.most) if seq.left <= share.short - used else share.any
            budget.left = room = min(left, most) - used
            if room <= 0:
                break
            if waits:
                tried.add(seq.key)
                how = admission.take(seq)
                if how == TAKEN:
                    self._start(seq, work, opened)
                admits = how != FULL
            else:
                done.add(seq.key)
                self._compute(rest.pop(), work)
            used += room - budget.left
        budget.left = left - used
        return done

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
            granted = limit.grant(seq, start, n)
            if granted < n:
                n = granted
                self._admission.cut(limit.reason)
                if n <= 0:
                    return
        lease = seq.held
        upto = start + n
        if on_device and n > 1 and upto > lease.room and not self.tree.extend(lease, upto):
            n, upto = 1, start + 1  # nobody gives way to draft tokens
        if upto > lease.room:
            self._admission.promised = None
            while not self.tree.extend(lease, upto):
                if self._drafts and on_device and seq.in_flight > seq.sampling:
                    return  # `start` counts drafts in flight: nobody gives way to these, either
                victim = self._running[-1]
                if victim is seq and seq.in_flight:
                    return  # what it has in flight may let pages go when it comes back; if not, the next plan decides
                self._admission.preempt(victim)
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
            vector=seq.request.vector,
            second=seq.request.second,
        )
        if on_device and n == 1 and not pages:
            seq.again = made
        work.append(made)

    def _admit(self, work: list[Work], opened: list[Open]) -> None:
        """Give slots to waiting sequences, in order. One that a limit holds back is passed over; one without room ends it."""
        queue, budget, passed = self._queue, self._budget, 0
        while self._slots and budget.left and passed < PASSED and (seq := queue.first()) is not None:
            how = self._admission.take(seq)
            if how == TAKEN:
                if queue and self._slots and budget.left > 1:  # it must start itself
                    self._share(seq, [], work, opened)
                how = self._start(seq, work, opened)
            if how == FULL:
                break
            passed += how != TAKEN
            if how == HELD_BACK:
                queue.step_aside(seq)
        if passed < PASSED:  # else those behind them are asked about in the next plan
            queue.step_back(2 * PASSED)

    def _start(self, seq: Sequence, work: list[Work], opened: list[Open]) -> str:
        """Plan the first tokens of a sequence that has just taken a slot. It gives it back if a limit holds it back after all."""
        admission, planned, found = self._admission, len(work), seq.computed
        promised = admission.starting(seq)
        self._compute(seq, work)
        if len(work) == planned:
            admission.back(seq)
            return HELD_BACK
        admission.started(seq, promised)
        if not seq.admitted:
            seq.admitted = True
            seq.cached = found
            self.admitted.append(seq.request.id)
            self._prompt_tokens += seq.prompt_len
            self.tree.count(admission.reusable(seq), found)
        opened.append(opening(seq))
        return TAKEN

    def told(self, plan: Plan) -> tuple[list[tuple[str, int]], int, dict[str, int]]:
        """The newest plan in numbers: its sequences and their tokens, how many have no slot, and what holds others back."""
        keys = self._keys
        rows = [(keys[work.key].request.id, work.n) for work in plan.work]
        return rows, *self._admission.told()

    def learn(self, plan: Plan, seconds: float) -> None:
        """Tell the limits how long a step took."""
        for limit in self._learning:
            limit.learn(plan, seconds)

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
            if work.start >= 0:
                self._queue.come(seq, seq.computed)
            if finish is not None or work.prompt_logits:
                events += self._news(seq, work, row, finish, taken)
            elif taken:
                events.append(Event(id=seq.request.id, tokens=sampled, logprobs=row.logprobs or ()))
            elif work.vector and work.sample:
                events.append(self._finish(seq, FINISH_STOP, vector=row.vector))
        self._output_tokens += output
        return events

    def _count_prompt(self, seq: Sequence, work: Work) -> None:
        """Count the tokens of the prompt among those that a step computed."""
        if work.start < seq.prompt_len:
            seq.chunks += 1
            self._computed_prompt_tokens += min(work.start + work.n, seq.prompt_len) - work.start

    def _count_drafts(self, seq: Sequence, drafted: int, right: int) -> None:
        """Count the draft tokens that were verified, and those of them that were accepted."""
        seq.drafted += drafted
        seq.accepted += right
        self._drafted += drafted
        self._accepted += right

    def _ended(self, seq: Sequence, new: int) -> tuple[str | None, int]:
        """Cut the `new` tokens of a sequence behind the one that ends it. Gives why it ends, if it does, and how many are left."""
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
