"""Random workloads against the real scheduler and the real tree, with a device that checks every KV read.

One run is one seed: a pool, a budget, a mix of requests, arrivals, aborts and faults. After every step each page must be
in exactly one place; at the end each request's tokens, logprobs and finish must be those of a naive recompute.

    python -m tests.null.fuzz --runs 20000 [--first 0] [--depth 0 1 2]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import quire.cache.groups
import quire.cache.keys
import quire.cache.loading
import quire.cache.pages
import quire.cache.prefix_tree
import quire.cache.sealed
import quire.cache.tiers
import quire.engine.limits
import quire.engine.loads
import quire.engine.policy
import quire.engine.scheduler
import quire.engine.sequence
import quire.engine.spans
import quire.runner.spans
from quire.engine.hooks import NoAdapters
from quire.engine.types import Event, Request
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob, Plan, Result
from quire.runner.speculate import open_proposer
from tests.null.device import STATE, VOCAB, Caught, Device, choose, expect, grow, logprob, start_of
from tests.null.spans import seen, with_pictures
from tests.null.tier import DevicePages, FakeTier, Follower, Manners, Time

PAGE = 4
DRAWN = 1234567  # the seed of requests without one


@dataclass
class Parts:
    """The code under test; a planted fault replaces one of these."""

    pages: ModuleType | Any = quire.cache.pages
    tree: ModuleType | Any = quire.cache.prefix_tree
    groups: ModuleType | Any = quire.cache.groups
    scheduler: ModuleType | Any = quire.engine.scheduler
    keys: ModuleType | Any = quire.cache.keys
    sealed: ModuleType | Any = quire.cache.sealed
    loading: ModuleType | Any = quire.cache.loading
    loads: ModuleType | Any = quire.engine.loads
    tiers: bool = False  # every run has a tier and a listener, and not one in four
    seals: bool = True  # False: the tier's bytes are taken as they come
    ids: ModuleType | Any = quire.engine.spans  # what stands for a span in the tree
    spans: ModuleType | Any = quire.runner.spans
    policy: ModuleType | Any = quire.engine.policy
    limits: ModuleType | Any = quire.engine.limits
    check: bool = True  # False: leave out the checks of the books, so that the device has to notice


@dataclass
class Answer:
    """What a request should get, or got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: str | None = None
    stop_id: int | None = None
    receipt: Any = None


@dataclass
class Report:
    """What a batch of runs went through: a harness that never preempts proves nothing about preemption."""

    runs: int = 0
    steps: int = 0
    reads: int = 0
    preemptions: int = 0
    evictions: int = 0
    hits: int = 0
    stale: int = 0  # rows that came back for a sequence gone or preempted
    rewritten: int = 0  # page rows changed below their end
    forgotten: int = 0  # times that a running sequence was seen to have let pages go
    hollow: int = 0  # hits on prefixes with pages missing in front
    carried: int = 0  # times that a running sequence was seen to carry a state ...
    kept: int = 0  # ... and to have one to keep besides
    restored: int = 0  # sequences that began from a state that was kept
    drafted: int = 0  # draft tokens that were verified
    right: int = 0  # ... and kept
    tiers: int = 0  # runs with a tier and a listener
    told: int = 0  # events that a listener heard
    loads: int = 0  # begun
    loaded: int = 0  # ... tokens of those that ended well
    late: int = 0  # times that a sequence waited for a load in vain, because it was late ...
    orphans: int = 0  # steps in which a load went on that nobody waited for
    joined: int = 0  # steps in which several sequences waited for one load
    spoiled: int = 0  # pages that came with other bytes than they were stored with, or were never stored
    pictures: int = 0  # spans of requests that were added
    cut: int = 0  # chunks that end inside of one
    looked_up: int = 0  # prefixes of waiting sequences
    full: int = 0  # ... that had no room
    shared: int = 0  # plans in which a long prompt left tokens to later ones
    held: int = 0  # times that a sequence was seen to wait for another
    grouped: int = 0  # runs with more than one kind of layer, or none that sees everything
    finishes: dict[str, int] = field(default_factory=dict)


def rng_of(seed: int) -> random.Random:
    """For what is newer than the seeds: it takes nothing from the stream that they were found with."""
    return random.Random(~seed)


def naive(request: Request, context: int) -> Answer:
    """The whole answer, computed one token at a time with nothing shared."""
    params = request.sampling
    seed = quire.engine.sequence.mix_seed(DRAWN if params.seed is None else params.seed, request.index)
    stops = frozenset((() if params.ignore_eos else request.eos_ids) + params.stop_token_ids)
    prefix, answer = start_of(request.namespace), Answer()
    for i, token in enumerate(seen(request.tokens, request.spans)):
        if i and params.prompt_logprobs is not None:
            answer.prompt_logprobs.append(logprob(prefix, token))
        prefix = grow(prefix, token)
    room = context - len(request.tokens)
    most = room if params.max_tokens is None else min(room, params.max_tokens)
    while answer.finish is None:
        early = len(answer.tokens) < params.min_tokens
        token = choose(prefix, seed, stops if early else frozenset())
        if params.logprobs is not None:
            answer.logprobs.append(logprob(prefix, token))
        answer.tokens.append(token)
        prefix = grow(prefix, token)
        if token in stops and not early:
            answer.finish, answer.stop_id = "stop", token
        elif len(answer.tokens) == most:
            answer.finish = "length"
    return answer


def workload(rng: random.Random, context: int, turns: dict[str, str]) -> list[Request]:
    """Requests that share prompts, whole or in part, within and across namespaces, or go on from another's answer.

    The last kind is noted in `turns`, with the request it goes on from.
    """
    base = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))] for _ in range(3)]
    priorities = rng.choice([[0], [0, 0, 1], [-1, 0, 5]])
    namespaces = rng.choice([[""], ["", "tenant"]])
    requests: list[Request] = []
    for i in range(rng.randint(3, 14)):
        again = rng.choice(requests) if requests and rng.random() < 0.4 else None
        if again is None:
            tokens = rng.choice(base) + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        elif rng.random() < 0.5 or len(again.tokens) >= context:
            tokens = list(again.tokens)  # the same prompt
        else:  # the next turn of a conversation
            turns[f"r{i}"] = again.id
            tokens = (
                again.tokens + naive(again, context).tokens + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))]
            )
        most = rng.choice([None, *range(1, 13), 16, 20, 24])
        params = SamplingParams(
            seed=rng.choice([None, 7, 7, -3]),
            max_tokens=most,
            min_tokens=rng.randint(0, min(4, most or 4)) if rng.random() < 0.4 else 0,
            ignore_eos=rng.random() < 0.2,
            stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.2 else (),
            logprobs=0 if rng.random() < 0.3 else None,
            prompt_logprobs=0 if rng.random() < 0.15 else None,
        )
        requests.append(
            Request(
                id=f"r{i}",
                tokens=tokens,
                sampling=params,
                eos_ids=(3,) if most is None or rng.random() < 0.5 else (),
                index=rng.choice([0, 0, 1]),
                priority=rng.choice(priorities),
                namespace=again.namespace if again and rng.random() < 0.7 else rng.choice(namespaces),
                follows=again.id if again and rng.random() < 0.6 else ("r99" if rng.random() < 0.05 else None),
            )
        )
    return requests


def crowd(rng: random.Random, context: int) -> list[Request]:
    """Long prompts and short ones that have nothing in common: they meet in a step."""
    requests: list[Request] = []
    for i in range(rng.randint(6, 14)):
        length = min(context - 2, rng.choice([2, 3, 5, 9, 30, 60, 90]))
        params = SamplingParams(max_tokens=rng.choice([1, 2, 6, 12]), seed=i)
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        requests.append(Request(id=f"r{i}", tokens=tokens, sampling=params, priority=rng.choice([0, 0, 0, 1])))
    return requests


def groups(seed: int, pages: int, budget: int) -> list[tuple[int, int]]:
    """Kinds of layers, as pages of the pool and tokens seen; of most seeds, two in five have the one kind that sees everything.
    Every eighth has layers that carry a state.

    A pool for a window holds little more than a sequence needs, or less: then it bounds the context as a full one does.
    """
    rng = random.Random(-seed - 1)

    def window() -> tuple[int, int]:
        width = rng.choice([1, 2, 3, 4, 5, 7, 8, 9, 12, 17])
        need = -(-(width + budget) // PAGE) + 2
        return max(3, need + rng.choice([-3, -1, 0, 0, 1, 2, 4, 8, 20])), width

    def state() -> tuple[int, int]:
        return 2 + rng.choice([0, 0, 1, 2, 3, 5, 9, 20]), STATE

    if seed % 8 == 7:
        return [(pages, 0), *([window()] if rng.random() < 0.25 else []), state()]
    kinds = rng.choice([[0], [0], [0], [0], [0, 1], [0, 1], [1], [1, 0], [0, 1, 1], [0, 0]])
    return [window() if kind else (pages + rng.choice([0, 0, 3]) if i else pages, 0) for i, kind in enumerate(kinds)]


class Order:
    """Watches who is planned: nobody starves, nobody is overtaken who waits for pages, and nothing is looked up for nothing."""

    def __init__(self, scheduler: Any, free: bool, fair: bool) -> None:
        """`free`: no limit but the budget holds anybody back; `fair`: prompts share steps."""
        self.scheduler, self.free, self.fair = scheduler, free, free and fair
        self.lookups: list[int] = []  # in this plan: ids of the tokens
        self.accounts: dict[int, list[int]] = {}  # of first prompts, by key: what they had, and later ones meanwhile
        self.spoiled: set[int] = set()  # keys of these
        self.failed: dict[int, int] = {}  # by key: pages given back when there was no room for it
        match = scheduler.tree.match

        def counted(namespace: str, tokens: list[int], upto: int | None = None) -> Any:
            self.lookups.append(id(tokens))
            return match(namespace, tokens, upto)

        scheduler.tree.match = counted

    def before(self) -> None:
        scheduler = self.scheduler
        self.lookups.clear()
        self.preemptions = scheduler.stats().preemptions
        self.running = bool(scheduler._running)
        loads = scheduler._admission.loads._flights if scheduler._admission.loads else []
        self.settles = any(flight.load.ended or flight.load.late for flight in loads)  # which may give pages back
        self.returned = scheduler.tree.returned
        self.left = {s.key: s.left for s in scheduler._running if not s.sampling and s.left > 1}
        running = [scheduler._keys[key] for key in self.left]
        self.begun = {
            s.key: (s.whole - s.left if s.whole else 0, s.lent) for s in running
        }  # when they took their slots
        self.first = next((s for s in scheduler._running if s.key in self.left), None)
        waiting = [s for s in scheduler._keys.values() if s.status == "waiting" and s.waits_for is None]
        self.waiting = {id(s.tokens): s for s in waiting}
        self.head = min(waiting, key=lambda s: s.order, default=None)
        self.blocked = self.head if self.head is not None and self.head.no_room is not None else None

    def after(self, plan: Plan | None, report: Report) -> None:
        scheduler = self.scheduler
        report.looked_up += len(self.lookups)
        report.full += sum(self.waiting[i].no_room is not None for i in self.lookups if i in self.waiting)
        for seq in (self.waiting[i] for i in self.lookups if i in self.waiting):
            again = self.failed.get(seq.key) == self.returned and self.running and not self.settles
            expect(not again, "looked up again, though no page has come back", seq.key)
        self.failed = {
            s.key: scheduler.tree.returned for s in self.waiting.values() if s.no_room and id(s.tokens) in self.lookups
        } | {key: n for key, n in self.failed.items() if n == scheduler.tree.returned}
        if plan is None or scheduler.stats().preemptions != self.preemptions:
            return
        head = self.blocked
        if head is not None and self.free and head.status == "waiting" and head.waits_for is None:
            taken = [scheduler._keys[w.key] for w in plan.work if w.slot in {new.slot for new in plan.opened}]
            expect(all(s.order < head.order for s in taken), "who waits for pages was overtaken", head.key)
        if self.first is not None and self.fair:
            self.shares(self.first, plan, report)

    def shares(self, first: Any, plan: Plan, report: Report) -> None:
        """The first of the running prompts, and the others of its rank."""
        keys = self.scheduler._keys
        given = {w.key: w.n for w in plan.work if w.start >= 0}
        if any(keys[key].prompt_rows for key in given):
            return  # these are bounded otherwise
        total, own = sum(given.values()), given.get(first.key, 0)
        others = [left for key, left in self.left.items() if key != first.key and keys[key].order[0] == first.order[0]]
        urgent = any(keys[key].order < first.order for key in given)
        enough = min(self.left[first.key], max(1, total // 5) if total > 4 else 0)
        expect(own >= enough, "the first of the prompts has less than a fifth", own, total)
        account = self.accounts.setdefault(first.key, list(self.begun[first.key]))
        if urgent or first.preemptions:
            self.spoiled.add(first.key)  # what others had before it is no longer what was lent alone
        clean = first.key not in self.spoiled
        owed = account[0] / 4 > account[1] + 1  # later ones have had less than a fifth so far
        account[1] += total - own
        most = max(account[0] / 4 + self.left[first.key] / 8, (account[0] + own) / 4) + 3
        expect(not clean or own == self.left[first.key] or account[1] <= most, "too much was lent", account, most)
        account[0] += own
        left = [s for s in self.waiting.values() if s.status == "waiting" and s.waits_for is None]
        if len(self.scheduler._slots) > 1 and not any(s.no_room for s in left):
            others += [s.left for s in left if s.order[0] == first.order[0]]
        if (
            others and owed and clean and not self.scheduler._budget.left
        ):  # with tokens left over it was room that they lacked
            expect(total - own >= min(total // 5, sum(others)), "later prompts have less than a fifth", own, total)
            report.shared += 1

    def held(self) -> int:
        """Nobody waits for a sequence that is gone, or whose prompt is computed. How many wait for one."""
        keys, count = self.scheduler._keys, 0
        for seq in keys.values():
            if seq.waits_for is not None:
                leader = keys.get(seq.waits_for)
                if leader is None or leader.prompt_done:
                    raise Caught("waits for a sequence that has come", seq.key)
                ahead = leader.status == "running" or seq.request.follows == leader.request.id
                expect(ahead, "waits for a sequence that has no slot", seq.key)
                count += 1
        return count


class Run:
    """One seed at one depth."""

    def __init__(self, seed: int, depth: int, parts: Parts, report: Report) -> None:
        self.rng = rng = random.Random(seed)
        self.depth, self.report, self.check = depth, report, parts.check
        pages = rng.randint(6, 14) if rng.random() < 0.6 else rng.randint(12, 40)
        self.budget, self.slots, self.drafts = rng.randint(3, 24), rng.randint(1, 6), rng.choice([0, 0, 2, 3])
        self.rows = rng.choice([1, 3, 8, 64])
        crowded = seed % 9 == 4
        if crowded:
            self.rows, self.budget, self.slots = 64, rng_of(seed).randint(5, 14), max(3, self.slots)
        pools = groups(seed, pages, self.budget)
        if any(w == STATE for _, w in pools):
            self.drafts = 0  # what is folded into a state cannot be taken back
        kinds = [
            parts.groups.State(3 * PAGE) if w == STATE else parts.groups.Window(w) if w else parts.groups.Full()
            for _, w in pools
        ]
        lent = [(kind, parts.pages.Pool(n)) for kind, (n, _) in zip(kinds, pools, strict=True)]
        self.tree = parts.tree.PrefixTree(lent[0][1], PAGE, lent[0][0], lent[1:])
        self.pools, self.report.grouped = pools, report.grouped + (pools != [(pages, 0)])
        self.scheduler = parts.scheduler.Scheduler(
            self.tree,
            slots=self.slots,
            budget=self.budget,
            context=rng.choice([24, 40, 400]),
            draw=lambda: DRAWN,
            limits=parts.limits.standard(
                self.rows,
                PAGE,
                (rng_of(seed).choice([1, 4, 64]), self.budget) if self.drafts and seed % 4 == 1 else None,
            ),
            drafts=self.drafts,
            prefix_cache=rng.random() < 0.9,
            policy=parts.policy.FairShare() if seed % 5 else parts.policy.FirstCome(),
        )
        self.order = Order(self.scheduler, free=self.rows == 64, fair=seed % 5 > 0)
        fail = 0.02 if rng.random() < 0.15 else 0.0
        self.device = Device(pools, PAGE, self.slots, rng, fail, rng.choice([0.3, 0.6, 0.95]))
        self.context = self.scheduler.context
        if self.drafts and seed % 2:
            self.device.proposer = open_proposer("ngram", max_seqs=self.slots, max_context=self.context)
        expect(self.context <= min((n * PAGE for n, w in pools if not w), default=400), "a context that cannot fit")
        self.time, self.loader, self.follower = Time(), None, Follower()
        if parts.tiers or seed % 4 == 2:
            self.attach(parts, rng_of(seed))
        self.turns: dict[str, str] = {}
        made = crowd(rng_of(seed), self.context) if crowded else workload(rng, self.context, self.turns)
        self.requests = {r.id: r for r in with_pictures(seed, made)}
        self.hooks = parts.ids.SpanHooks(NoAdapters(), width=1)
        self.device.spans = parts.spans
        self.answers: dict[str, Answer] = {}
        self.keys: dict[int, str] = {}

    def attach(self, parts: Parts, rng: random.Random) -> None:
        """Give it a tier, which is told of pages by a listener that begins at some time."""
        self.report.tiers += 1
        self.patience = rng
        pages = DevicePages(self.device, self.time, rng, rng.choice([0.0, 0.0, 0.1]))
        self.tier = FakeTier(self.time, rng, Manners.of(rng))
        sealed = parts.sealed.Sealed(self.tier) if parts.seals else self.tier

        def keep(event: Any) -> None:
            bytes_of = pages.read_pages(event.group, [event.page])
            sealed.store([quire.cache.tiers.Part(event.group, [event.key], bytes_of)])

        self.follower.keep = keep
        self.begins = rng.choice([0, 0, 10])  # to listen
        fingerprint = parts.keys.fingerprint({"weights": "null"})
        self.keys_of = parts.keys.Keys(fingerprint, PAGE, lambda namespace: f"salt of {namespace}".encode())
        loader = parts.loading.Loader(self.tree, pages, lambda: self.time.now, rng.choice([2, 8, 30]))
        loader.tier = sealed
        self.loader = loader
        self.scheduler._admission.loads = parts.loads.Loads(self.tree, loader, rng.choice([1, self.slots]))

    def pass_time(self, steps: int) -> None:
        """What goes on beside the steps."""
        self.time.tick()
        if self.loader is None:
            return
        if steps == self.begins:
            self.tree.listen(self.follower)
        if steps == 1:
            self.tree.name_pages(self.keys_of)
        self.loader.advance()
        expect(self.tier.asked_well, "a tier was asked for what it had said it has not")
        flights = self.flights()
        self.report.orphans += sum(not f.waiting for f in flights)
        self.report.joined += sum(len(f.waiting) > 1 for f in flights)
        self.report.late += sum(f.load.late and not f.load.ended for f in flights if f.waiting)

    def flights(self) -> list[Any]:
        """The loads under way."""
        return [] if self.loader is None else self.scheduler._admission.loads._flights

    def go(self) -> None:
        """Run it to the end, checking as it goes."""
        rng, scheduler = self.rng, self.scheduler
        arriving = deque(self.requests.values())
        aborts = rng.choice([0.0, 0.05, 0.15])
        flight: deque[tuple[Plan, Result]] = deque()
        steps = 0
        while arriving or scheduler.has_work or flight:
            for _ in range(rng.randint(0, 3)):
                if arriving and self.ready(arriving[0]):
                    self.add(arriving.popleft())
            if rng.random() < aborts and (live := [i for i, a in self.answers.items() if a.finish is None]):
                self.take(scheduler.abort(rng.choice(live)))
            self.pass_time(steps)
            if self.flights() and self.patience.random() < 0.1:  # they can go, too
                waiting = [seq.request.id for flight in self.flights() for seq in flight.waiting.values()]
                self.take([event for name in waiting[:1] for event in scheduler.abort(name)])
            self.order.before()
            plan = scheduler.plan()
            self.order.after(plan, self.report)
            if plan is not None:
                self.look(plan)
                flight.append((plan, self.device.launch(plan, self.namespaces(plan))))
            elif not flight:
                expect(
                    not scheduler.has_work or bool(scheduler._admission.loads),
                    "work, but nothing planned and nothing in flight",
                )
            if flight and (plan is None or len(flight) > self.depth):
                plan, result = flight.popleft()
                self.report.stale += sum(1 for w in plan.work if self.stale(w.key, w.epoch))
                self.take(scheduler.commit(plan, result))
            self.report.held += self.order.held()
            leases = [seq.lease for seq in scheduler._keys.values() if seq.lease is not None]
            if self.check:
                self.tree.check([*leases, *(f.lease for f in self.flights())])
                self.bounded(leases)
                if self.loader is not None and steps >= max(1, self.begins):
                    self.follower.compare(self.tree)
            steps += 1
            expect(steps < 5000, "livelock")
        self.finish(steps)

    def ready(self, request: Request) -> bool:
        """The next turn of a conversation mostly comes once its answer is there."""
        turn = self.answers.get(self.turns.get(request.id, ""))
        return turn is None or turn.finish is not None or self.rng.random() < 0.05

    def add(self, request: Request) -> None:
        self.answers[request.id] = Answer()
        try:
            self.keys[self.scheduler.add(self.hooks.on_request(request))] = request.id
            self.report.pictures += len(request.spans)
        except BadRequest:
            expect(len(request.tokens) + 1 > self.context, "refused, but it fits", request.id)
            del self.answers[request.id], self.requests[request.id]

    def namespaces(self, plan: Plan) -> dict[int, str]:
        return {w.key: self.requests[self.keys[w.key]].namespace for w in plan.work}

    def stale(self, key: int, epoch: int) -> bool:
        seq = self.scheduler._keys.get(key)
        return seq is None or seq.epoch != epoch

    def look(self, plan: Plan) -> None:
        """What a plan must keep to, whatever is in it."""
        expect(0 < plan.tokens <= self.budget, "over the token budget", plan.tokens)
        rows = sum(w.prompt_logits + (1 + w.drafts if w.sample else 0) for w in plan.work)
        expect(rows <= self.rows, "over the logit rows", rows, self.rows)
        expect(all(w.n > 0 and w.drafts <= self.drafts for w in plan.work), "an empty row, or too many drafts")
        waited = {self.requests[self.keys[k]].follows for k in (w.key for w in plan.work)} - {None}
        for name in waited & self.answers.keys():
            leader = self.scheduler._ids.get(name)
            expect(leader is None or leader.prompt_done, "a follower ran before its leader's prompt was done", name)
        for seq in (self.scheduler._keys[w.key] for w in plan.work):
            expect(seq.computed + seq.in_flight < seq.max_len, "computed past the longest length", seq.key)
        for w in plan.work:
            slot = self.device.slots[w.slot]
            spans = self.requests[self.keys[w.key]].spans
            self.report.cut += any(s.start < w.start + w.n < s.end for s in spans)
            if w.page_from == 0 and w.start > 0 and any(w.slot == new.slot for new in plan.opened):
                self.report.restored += any(window == STATE for _, window in self.pools)
            self.report.hollow += w.page_from == 0 and bool(w.pages) and min(map(min, [w.pages, *w.more])) < 0
            if w.pages and slot is not None and w.slot not in plan.closed and w.page_from < len(slot.rows[0]):
                self.report.rewritten += 1

    def bounded(self, leases: list[Any]) -> None:
        """No sequence holds more of a group than what it sees and what it may have in flight."""
        for g, (_, window) in enumerate(self.pools):
            if window == STATE:
                for lease in leases:
                    row = lease.rows[g]
                    held = sum(page >= 0 for i, page in enumerate(row) if i not in lease.checkpoints)
                    expect(held <= 2 + self.depth, "more states than there are ends of steps", held)
                    self.report.kept += any(page >= 0 for i, page in enumerate(row[:-1]) if i in lease.checkpoints)
                    self.report.carried += 1
            elif window:
                most = -(-(window + (self.depth + 1) * self.budget) // PAGE) + 1
                for lease in leases:
                    held = sum(page >= 0 for page in lease.rows[g])
                    expect(held <= most, "more of a window than is seen", held, window)
                    self.report.forgotten += lease.low[g] > 0

    def take(self, events: list[Event]) -> None:
        for event in events:
            answer = self.answers[event.id]
            expect(answer.finish is None, "news of a finished request", event.id)
            expect(bool(event.tokens or event.finish or event.prompt_logprobs), "an event that says nothing", event.id)
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs
            expect(not (answer.prompt_logprobs and event.prompt_logprobs), "prompt logprobs sent twice", event.id)
            answer.prompt_logprobs += event.prompt_logprobs
            answer.finish, answer.stop_id, answer.receipt = event.finish, event.stop_id, event.receipt
            expect((event.finish is None) == (event.receipt is None), "a receipt comes with the finish", event.id)
            expect((event.finish == "error") == (event.error is not None), "an error says why", event.id)

    def finish(self, steps: int) -> None:
        """Everything is over: compare with the naive answers, and look for leaks."""
        report = self.report
        while self.loader is not None and self.scheduler._admission.loads:  # some go on when nobody waits any more
            self.time.tick()
            self.loader.advance()
            self.scheduler.plan()
            steps += 1
            expect(steps < 5000, "a load that never ends")
        for name, request in self.requests.items():
            got, want = self.answers[name], naive(request, self.context)
            cut = got.finish in ("abort", "error")
            expect(cut or got.finish == want.finish, "wrong finish", name, got.finish, want.finish)
            if cut:
                del want.tokens[len(got.tokens) :], want.logprobs[len(got.tokens) :]
                want.prompt_logprobs = want.prompt_logprobs if got.prompt_logprobs else []
            expect(got.tokens == want.tokens, "wrong tokens", name, got.tokens, want.tokens)
            expect(got.logprobs == want.logprobs, "wrong logprobs", name)
            expect(got.prompt_logprobs == want.prompt_logprobs, "wrong prompt logprobs", name)
            expect(cut or got.stop_id == want.stop_id, "wrong stop id", name)
            expect(got.receipt.output_tokens == len(got.tokens), "wrong receipt", name)
            drafted, right = got.receipt.drafted_tokens, got.receipt.accepted_tokens
            expect(right <= min(drafted, len(got.tokens)), "more drafts were right than there were", name)
            report.drafted += drafted
            report.right += right
            report.finishes[str(got.finish)] = report.finishes.get(str(got.finish), 0) + 1
        stats = self.scheduler.stats()
        if self.check:
            self.tree.check([])
            expect(stats.pages_used == stats.running == stats.waiting == 0, "something was left behind", stats)
        if self.loader is not None:
            report.told += self.follower.heard
            report.loads += self.tier.loads
            report.loaded += stats.loaded_tokens
            report.spoiled += self.tier.lied + self.tier.spoiled
        report.runs += 1
        report.steps += steps
        report.reads += self.device.reads
        report.preemptions += stats.preemptions
        report.evictions += stats.evictions
        report.hits += stats.prefix_hits


def fuzz(first: int, count: int, depths: tuple[int, ...] = (0, 1, 2), parts: Parts | None = None) -> Report:
    """Run seeds first .. first + count - 1 at each depth. The first fault found is raised, with its seed."""
    report = Report()
    for seed in range(first, first + count):
        for depth in depths:
            try:
                Run(seed, depth, parts or Parts(), report).go()
            except Exception as e:
                e.add_note(
                    f"seed {seed}, depth {depth}: python -m tests.null.fuzz --first {seed} --runs 1 --depth {depth}"
                )
                raise
    return report


def main() -> None:
    """As many runs as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=6000, help="over all depths")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--depth", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    began = time.perf_counter()
    report = fuzz(args.first, -(-args.runs // len(args.depth)), tuple(args.depth))
    print(f"{time.perf_counter() - began:.1f} s, no fault found: {report}")


if __name__ == "__main__":
    main()
