"""The scheduler by example: one scenario for each rule. Pages hold 4 tokens; the "model" says what each test wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import Limit
from quire.engine.policy import FairShare, FirstCome
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import mix_seed
from quire.engine.types import Event, Request
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob, Plan, Result, Row, Work

P = 4


class Desk:
    """A scheduler, and a device that answers each sampled row with `say(work, tokens that its slot has computed then)`."""

    def __init__(
        self, pages: int = 64, say: Callable[[Work, int], list[int]] = lambda w, n: [7], **options: Any
    ) -> None:
        settings: dict[str, Any] = {"slots": 8, "budget": 64, "context": 1000, "draw": lambda: 42}
        self.tree = PrefixTree(Pool(pages), P)
        self.scheduler = Scheduler(self.tree, **(settings | options))
        self.say = say
        self.length: dict[int, int] = {}  # of each slot

    def add(self, name: str, prompt: int | list[int], first: int = 100, **options: Any) -> int:
        tokens = prompt if isinstance(prompt, list) else list(range(first, first + prompt))
        fields = {k: options.pop(k) for k in ("priority", "follows", "namespace", "eos_ids", "index") if k in options}
        return self.scheduler.add(Request(id=name, tokens=tokens, sampling=SamplingParams(**options), **fields))

    def answer(self, plan: Plan) -> Result:
        rows = []
        for work in plan.work:
            told = work.start >= 0
            before = work.start if told else self.length.get(work.slot, 0)
            tokens = self.say(work, before + (work.n if told else 1)) if work.sample else []
            rows.append(Row(work.n if told else len(tokens), tokens))
            self.length[work.slot] = before + rows[-1].accepted
        return Result(rows)

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.check()
        return plan

    def commit(self, plan: Plan) -> list[Event]:
        events = self.scheduler.commit(plan, self.answer(plan))
        self.check()
        return events

    def step(self) -> list[Event]:
        return self.commit(self.plan())

    def finish(self) -> list[Event]:
        events: list[Event] = []
        for _ in range(1000):
            if not self.scheduler.has_work:
                return events
            events += self.step()
        raise AssertionError("it never ends")

    def check(self) -> None:
        self.tree.check(s.lease for s in self.scheduler._keys.values() if s.lease is not None)


def shape(plan: Plan) -> list[tuple[int, int]]:
    """Who computes how much."""
    return [(w.key, w.n) for w in plan.work]


# ---- one request


def test_a_request_from_prompt_to_finish() -> None:
    desk = Desk(say=lambda w, n: [n])
    key = desk.add("a", 6, max_tokens=3)
    plan = desk.plan()
    work = plan.work[0]
    assert (work.key, work.n, work.start, work.sample) == (key, 6, 0, True)
    assert work.tokens == [100, 101, 102, 103, 104, 105]
    assert len(work.pages) == 2 and work.page_from == 0
    assert plan.opened[0].slot == work.slot and plan.opened[0].tokens == work.tokens
    assert desk.scheduler.admitted == ["a"]
    assert desk.commit(plan) == [Event(id="a", tokens=[6])]
    plan = desk.plan()
    assert (plan.opened, plan.closed, desk.scheduler.admitted) == ([], [], [])
    work = plan.work[0]  # the device has sampled its token, and is not told it
    assert (work.n, work.start, work.tokens, work.pages, work.sample) == (1, -1, None, [], True)
    assert desk.commit(plan) == [Event(id="a", tokens=[7])]
    plan = desk.plan()
    assert plan.work[0] is work  # nothing about it is new
    (last,) = desk.commit(plan)
    assert (last.tokens, last.finish, last.stop_id) == ([8], "length", None)
    assert last.receipt is not None
    assert (last.receipt.prompt_tokens, last.receipt.output_tokens, last.receipt.steps) == (6, 3, 3)
    assert (last.receipt.chunks, last.receipt.cached_tokens, last.receipt.seed) == (1, 0, 42)
    assert desk.scheduler.plan() is None and desk.scheduler.idle


def test_no_work_is_no_plan() -> None:
    desk = Desk()
    assert desk.scheduler.plan() is None
    assert desk.scheduler.idle and not desk.scheduler.has_work


def test_a_slot_is_closed_in_the_next_plan_and_can_be_taken_in_it() -> None:
    desk = Desk(slots=1)
    desk.add("a", 4, max_tokens=1)
    desk.add("b", 4, max_tokens=1)
    desk.step()
    plan = desk.plan()
    assert plan.closed == [0] and plan.opened[0].slot == 0


def test_the_device_is_told_seed_and_stop_ids() -> None:
    desk = Desk()
    desk.add("a", 3, seed=5, eos_ids=(2, 3), stop_token_ids=(9, 2))
    desk.add("b", 3, seed=5, eos_ids=(2,), ignore_eos=True, index=1)
    desk.add("c", 3)
    a, b, c = desk.plan().opened
    assert a.stop_ids == [2, 3, 9] and b.stop_ids == []
    assert a.seed == mix_seed(5, 0) and b.seed == mix_seed(5, 1) and c.seed == mix_seed(42, 0)
    assert len({a.seed, b.seed, c.seed}) == 3


def test_seed_mixing_is_pinned() -> None:
    """A stream must be the same in every version: these are splitmix64's first outputs for state 0 and -1."""
    assert mix_seed(0, 0) == 0xE220A8397B1DCDAF
    assert mix_seed(0, 1) == 0x6E789E6AA1B965F4
    assert mix_seed(-1, 0) == mix_seed(2**64 - 1, 0) == 0xE4D971771B652C20


# ---- how it ends


def test_an_eos_token_ends_it_and_is_delivered() -> None:
    desk = Desk(say=lambda w, n: [2])
    desk.add("a", 4, eos_ids=(2,))
    (event,) = desk.step()
    assert (event.tokens, event.finish, event.stop_id) == ([2], "stop", 2)


def test_ignore_eos_goes_on() -> None:
    desk = Desk(say=lambda w, n: [2])
    desk.add("a", 4, eos_ids=(2,), ignore_eos=True, max_tokens=5)
    assert [e.finish for e in desk.finish()] == [None] * 4 + ["length"]


def test_no_stop_before_min_tokens() -> None:
    desk = Desk(say=lambda w, n: [2])
    desk.add("a", 4, eos_ids=(2,), min_tokens=3)
    assert [e.finish for e in desk.finish()] == [None, None, None, "stop"]


def test_the_context_ends_it() -> None:
    desk = Desk(context=9)
    desk.add("a", 6)
    events = desk.finish()
    assert [e.finish for e in events] == [None, None, "length"]


def test_an_error_row_ends_its_sequence_alone() -> None:
    desk = Desk()
    desk.add("a", 4)
    desk.add("b", 4, first=200, max_tokens=2)
    plan = desk.plan()
    events = desk.scheduler.commit(plan, Result([Row(0, error="logits are not numbers"), Row(4, [7])]))
    assert [(e.id, e.finish, e.error) for e in events] == [
        ("a", "error", "logits are not numbers"),
        ("b", None, None),
    ]
    lease = desk.tree.match("", list(range(100, 104)))
    assert lease.shared == 0, "what failed is not published"
    desk.tree.release(lease)
    assert [e.finish for e in desk.finish()] == ["length"]


def test_tokens_after_the_end_are_dropped_with_their_logprobs() -> None:
    desk = Desk(drafts=3, say=lambda w, n: [7])
    desk.add("a", 4, eos_ids=(2,), logprobs=0)
    desk.step()
    plan = desk.plan()
    assert (plan.work[0].start, plan.work[0].tokens, plan.work[0].drafts, plan.work[0].n) == (-1, None, 3, 4)
    said = [Logprob(t, -1.0, 1, []) for t in (8, 2, 8, 8)]
    (event,) = desk.scheduler.commit(plan, Result([Row(4, [8, 2, 8, 8], said)]))
    assert (event.tokens, event.finish, event.stop_id) == ([8, 2], "stop", 2)
    assert [p.token for p in event.logprobs] == [8, 2]
    assert event.receipt is not None and event.receipt.output_tokens == 3
    desk.check()


def test_drafts_never_reach_past_the_end() -> None:
    desk = Desk(drafts=3)
    desk.add("a", 4, max_tokens=3)
    desk.step()
    assert desk.plan().work[0].n == 2  # positions 4 and 5 yield the tokens 5 and 6


# ---- what is refused


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    desk = Desk(context=10)
    with pytest.raises(BadRequest, match=r"10 tokens.*11.*context is 10") as refusal:
        desk.add("a", 10)
    assert refusal.value.code == "context_length_exceeded"
    desk.add("b", 9)
    assert [e.finish for e in desk.finish()] == ["length"]


def test_a_pool_smaller_than_the_context_is_the_context() -> None:
    desk = Desk(pages=3, context=1000)
    assert desk.scheduler.context == 12
    with pytest.raises(BadRequest, match=r"the KV pool holds \(3 pages\)"):
        desk.add("a", 12)
    desk.add("b", 11)
    assert desk.finish()[-1].finish == "length"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        Desk().add("a", 0)


def test_an_id_in_use_is_refused_and_the_first_goes_on() -> None:
    desk = Desk()
    desk.add("a", 4, max_tokens=2)
    with pytest.raises(BadRequest, match="'a' is in use"):
        desk.add("a", 4)
    assert [e.finish for e in desk.finish()] == [None, "length"]
    desk.add("a", 4, max_tokens=1)


# ---- budget, chunks, order


def test_a_long_prompt_is_computed_in_chunks() -> None:
    desk = Desk(budget=8)
    desk.add("a", 20, max_tokens=1)
    plans: list[Plan] = []
    events: list[Event] = []
    while desk.scheduler.has_work:
        plans.append(desk.plan())
        events = desk.commit(plans[-1])
    assert [(p.work[0].start, p.work[0].n, p.work[0].sample) for p in plans] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]
    assert events[0].receipt is not None and events[0].receipt.chunks == 3


def test_decodes_are_planned_before_an_older_prompts_chunks() -> None:
    desk = Desk(budget=8)
    short = desk.add("short", 2, first=900)
    long = desk.add("long", 40, priority=-1)
    other = desk.add("other", 2, first=700, priority=-2)
    for want in ([(other, 2), (long, 6)], [(other, 1), (long, 7)]):
        plan = desk.plan()
        assert shape(plan) == want  # `short` waits: the budget is spent
        desk.commit(plan)
    desk.scheduler.abort("long")
    assert shape(desk.plan()) == [(other, 1), (short, 2)]


def test_running_decodes_ride_with_a_prompt() -> None:
    desk = Desk(budget=8)
    a = desk.add("a", 3)
    b = desk.add("b", 3, first=200)
    desk.step()
    long = desk.add("long", 30, first=900, priority=-5)
    plan = desk.plan()
    assert shape(plan) == [(a, 1), (b, 1), (long, 6)]
    desk.commit(plan)
    assert shape(desk.plan()) == [(a, 1), (b, 1), (long, 6)]


def test_waiting_is_by_priority_then_arrival() -> None:
    desk = Desk(slots=2)
    keys = {name: desk.add(name, 3, first=f, priority=p) for name, f, p in [("x", 0, 1), ("y", 50, 0), ("z", 90, 0)]}
    assert [w.key for w in desk.plan().work] == [keys["y"], keys["z"]]
    assert desk.scheduler.stats().waiting == 1


def test_a_policy_is_an_ordering() -> None:
    desk = Desk(slots=1, policy=FairShare(lambda request: len(request.tokens)))
    desk.add("long", 9)
    short = desk.add("short", 2)
    assert [w.key for w in desk.plan().work] == [short]


def test_a_waiting_sequence_does_not_preempt() -> None:
    desk = Desk(slots=1)
    desk.add("a", 3, priority=5, max_tokens=3)
    desk.step()
    desk.add("urgent", 3, priority=-5)
    assert desk.plan().opened == []
    assert desk.scheduler.stats().preemptions == 0


# ---- sharing


def test_a_second_request_takes_the_prompt_from_the_tree() -> None:
    desk = Desk()
    desk.add("a", 10, max_tokens=1)
    desk.step()
    desk.add("b", 10, max_tokens=1)
    work = desk.plan().work[0]
    assert (work.start, work.n, len(work.pages)) == (8, 2, 3)
    stats = desk.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.computed_prompt_tokens) == (9 + 9, 8, 10)


def test_the_last_prompt_token_is_always_computed() -> None:
    desk = Desk()
    desk.add("a", 8, max_tokens=1)
    desk.step()
    desk.add("b", 8)
    assert desk.plan().work[0].start == 4


def test_generated_pages_are_shared_with_the_next_turn() -> None:
    desk = Desk(say=lambda w, n: [n])
    desk.add("a", 6, max_tokens=7)
    (*_, last) = desk.finish()
    assert last.finish == "length"
    desk.add("b", [*range(100, 106), 6, 7, 8, 9, 10, 11, 12, 55])
    work = desk.plan().work[0]
    assert (work.start, work.tokens) == (12, [12, 55])  # 12 of 13 have KV: three full pages


def test_twins_in_one_batch_end_up_on_the_same_pages() -> None:
    desk = Desk()
    desk.add("a", 8)
    desk.add("b", 8)
    first = desk.plan()
    a, b = (w.pages for w in first.work)
    assert not set(a) & set(b)
    desk.commit(first)
    second = desk.plan()
    assert second.work[0].page_from == 2  # only the new page
    assert (second.work[1].page_from, second.work[1].pages[:2]) == (0, a)
    assert desk.scheduler.stats().pages_used == 4


def test_namespaces_do_not_share() -> None:
    desk = Desk()
    desk.add("a", 10, max_tokens=1, namespace="one")
    desk.step()
    desk.add("b", 10, namespace="two")
    assert desk.plan().work[0].start == 0


def test_without_a_prefix_cache_nothing_is_shared_or_kept() -> None:
    desk = Desk(prefix_cache=False)
    for name in ("a", "b"):
        desk.add(name, 10, max_tokens=1)
        plan = desk.plan()
        assert plan.work[0].start == 0
        desk.commit(plan)
        assert desk.tree.cached() == 0
    assert desk.scheduler.stats().prefix_queries == 0


def test_a_follower_waits_for_its_leaders_prompt() -> None:
    desk = Desk(budget=8, policy=FirstCome())
    lead = desk.add("lead", 12)
    follow = desk.add("follow", 12, follows="lead", index=1)
    other = desk.add("other", 3, first=900)
    plan = desk.plan()
    assert shape(plan) == [(lead, 8)]
    desk.commit(plan)
    plan = desk.plan()
    assert shape(plan) == [(lead, 4), (other, 3)], "it is passed, not waited for"
    desk.commit(plan)
    plan = desk.plan()
    assert [w.key for w in plan.work] == [lead, other, follow]
    assert plan.work[2].start == 8


@pytest.mark.parametrize("gone", ["never there", "aborted", "refused"])
def test_a_follower_of_nobody_goes_ahead(gone: str) -> None:
    desk = Desk(context=20, budget=4)
    if gone == "aborted":
        desk.add("lead", 12)
        follow = desk.add("b", 3, follows="lead")
        desk.step()
        desk.scheduler.abort("lead")
    else:
        if gone == "refused":
            with pytest.raises(BadRequest):
                desk.add("lead", 20)
        follow = desk.add("b", 3, follows="lead")
    assert [w.key for w in desk.plan().work] == [follow]


def test_followers_in_a_circle_do_not_wait_forever() -> None:
    desk = Desk()
    desk.add("self", 3, follows="self", max_tokens=1)
    desk.add("a", 3, follows="b", max_tokens=1)
    desk.add("b", 3, follows="a", max_tokens=1)
    assert {e.id for e in desk.finish() if e.finish} == {"self", "a", "b"}


# ---- preemption


def fill(desk: Desk, count: int, **options: Any) -> None:
    for i in range(count):
        desk.add(f"s{i}", 7, first=100 * i, max_tokens=20, **options)


def test_the_latest_is_preempted_and_resumes_where_it_was() -> None:
    desk = Desk(pages=9, say=lambda w, n: [n + 1000])
    fill(desk, 3)
    events = desk.finish()
    by_id: dict[str, list[int]] = {}
    for event in events:
        by_id.setdefault(event.id, []).extend(event.tokens)
    assert by_id == {f"s{i}": list(range(1007, 1027)) for i in range(3)}
    receipts = {e.id: e.receipt for e in events if e.receipt}
    assert receipts["s0"].preemptions == 0
    assert sum(r.preemptions for r in receipts.values()) == desk.scheduler.stats().preemptions > 0
    assert receipts["s2"].cached_tokens == 0, "only the first admission counts"


def test_a_better_priority_is_never_preempted_for_a_worse() -> None:
    desk = Desk(pages=9)
    desk.add("late but urgent", 7, first=300, max_tokens=20, priority=1)
    fill(desk, 2, priority=0)
    receipts = {e.id: e.receipt for e in desk.finish() if e.receipt}
    assert receipts["s0"].preemptions == 0 and receipts["late but urgent"].preemptions > 0


def test_a_preempted_sequence_is_opened_again_with_all_its_tokens() -> None:
    desk = Desk(pages=5, slots=2)
    a = desk.add("a", 6, first=100, max_tokens=12)
    b = desk.add("b", 6, first=200, max_tokens=12)
    reopened = None
    while desk.scheduler.has_work and reopened is None:
        plan = desk.plan()
        if plan.opened and plan.step:
            reopened = plan
        desk.commit(plan)
    assert reopened is not None
    work = next(w for w in reopened.work if w.key == b)
    assert work.epoch == 1 and a not in [w.key for w in reopened.work]
    opened = reopened.opened[0]
    assert opened.tokens[:6] == list(range(200, 206)) and len(opened.tokens) > 6 and opened.prompt_len == 6
    assert work.start + work.n == len(opened.tokens)


def test_stale_rows_are_dropped() -> None:
    desk = Desk(pages=5, slots=2)
    desk.add("a", 6, first=100)
    desk.add("b", 6, first=200)
    desk.step()
    first = desk.plan()
    seq = desk.scheduler._ids["b"]
    desk.scheduler._admission.preempt(seq)
    assert [e.id for e in desk.commit(first)] == ["a"]
    assert len(seq.tokens) == 7 and seq.steps == 1


def test_admission_leaves_running_sequences_their_pages() -> None:
    desk = Desk(pages=6, budget=12)
    desk.add("long", 18, first=100, max_tokens=2)  # five pages in all; three in its first step
    desk.step()
    desk.add("next", 6, first=300, max_tokens=2)
    plan = desk.plan()
    assert shape(plan) == [(0, 6)], "one page is left, but two are needed"
    assert desk.scheduler.stats().waiting == 1
    desk = Desk(pages=7, budget=12)
    desk.add("long", 18, first=100, max_tokens=2)
    desk.step()
    desk.add("next", 6, first=300, max_tokens=2)
    assert shape(desk.plan()) == [(0, 6), (1, 6)]


def test_admission_in_one_plan_counts_what_each_will_need() -> None:
    desk = Desk(pages=6, budget=20)
    desk.add("a", 18, first=100, max_tokens=2)  # 18 now: five pages
    desk.add("b", 7, first=300, max_tokens=9)  # two pages for its 7 tokens and the next
    assert shape(desk.plan()) == [(0, 18)]
    desk = Desk(pages=6, budget=12, limits=(Sips(),))
    desk.add("a", 18, first=100, max_tokens=2)
    desk.add("b", 7, first=300, max_tokens=9)
    assert shape(desk.plan()) == [(0, 4)], "its other four pages are promised"


class Sips(Limit):
    """Lets each sequence compute 4 tokens in a step."""

    admission_only = False

    def grant(self, seq: object, start: int, n: int) -> int:
        return min(n, 4)

    def passes(self, count: int) -> bool:
        return False

    def passed(self, count: int) -> None:
        pytest.fail("it does not let everybody pass")


def test_a_plan_that_preempts_admits_nobody() -> None:
    desk = Desk(pages=9, slots=3)
    fill(desk, 3, priority=5)
    desk.step()
    desk.add("tiny", 1, first=990, max_tokens=1)  # waits for a slot, and preemption will free one
    before, seen = 0, False
    while desk.scheduler.has_work:
        plan = desk.plan()
        after = desk.scheduler.stats().preemptions
        if after > before:
            seen = True
            assert not plan.opened
        before = after
        desk.commit(plan)
    assert seen


# ---- abort


def test_abort_while_waiting_and_while_running() -> None:
    desk = Desk(slots=1)
    desk.add("a", 9)
    desk.add("b", 9)
    desk.step()
    assert desk.scheduler.stats().pages_used == 3
    (b,) = desk.scheduler.abort("b")
    (a,) = desk.scheduler.abort("a")
    assert (a.finish, b.finish) == ("abort", "abort")
    assert a.receipt is not None and a.receipt.output_tokens == 1
    assert desk.scheduler.abort("a") == desk.scheduler.abort("nobody") == []
    assert desk.scheduler.stats().pages_used == 0 and desk.scheduler.idle
    desk.add("c", 2)
    assert desk.plan().closed == [0]


def test_what_is_in_flight_of_an_aborted_request_is_dropped() -> None:
    desk = Desk()
    desk.add("a", 4)
    plan = desk.plan()
    desk.scheduler.abort("a")
    desk.add("a", 4)  # the same id again is another request
    assert desk.commit(plan) == []


# ---- overlap


def test_the_device_knows_the_token_that_is_in_flight() -> None:
    desk = Desk()
    desk.add("a", 6, max_tokens=4)
    first = desk.plan()
    second, third = desk.plan(), desk.plan()
    for plan in (second, third):
        assert (plan.work[0].start, plan.work[0].tokens, plan.work[0].n, plan.work[0].sample) == (-1, None, 1, True)
    fourth = desk.plan()
    assert desk.scheduler.plan() is None, "four tokens are on their way: there is no fifth"
    news = [e for plan in (first, second, third, fourth) for e in desk.commit(plan)]
    assert [e.finish for e in news] == [None, None, None, "length"]


def test_steps_are_committed_in_order() -> None:
    desk = Desk()
    desk.add("a", 6)
    desk.plan()
    second = desk.plan()
    with pytest.raises(RuntimeError, match="step 0 is next"):
        desk.commit(second)


def test_a_result_has_a_row_for_each_work() -> None:
    desk = Desk()
    desk.add("a", 6)
    with pytest.raises(RuntimeError, match="1 rows of work and 0"):
        desk.scheduler.commit(desk.plan(), Result([]))
