"""Limits, each alone and in the scheduler; and the logits of prompts, which one of them is for."""

from __future__ import annotations

from typing import Any

import pytest

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import Drafts, Follows, Limit, LogitRows, SamePrompt, TokenBudget, common, standard
from quire.engine.policy import FirstCome, Policy
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob, Plan, Result, Row


def sequence(prompt: int, **options: Any) -> Sequence:
    return Sequence.of(Request(id="a", tokens=[1] * prompt, sampling=SamplingParams(**options)), 0, 0, 0, 100)


def test_token_budget() -> None:
    limit, seq = TokenBudget(5), sequence(9)
    assert limit.grant(seq, 0, 9) == 5
    limit.charge(seq, 0, 3)
    assert limit.grant(seq, 3, 6) == 2
    limit.begin({}, 0)
    assert limit.grant(seq, 3, 6) == 5
    with pytest.raises(ValueError, match="at least one"):
        TokenBudget(0)


def test_logit_rows_of_a_plain_prompt() -> None:
    limit, seq = LogitRows(1), sequence(9)
    assert limit.grant(seq, 0, 8) == 8  # no logits
    limit.charge(seq, 0, 8)
    assert limit.grant(seq, 8, 1) == 1
    limit.charge(seq, 8, 1)
    assert limit.grant(seq, 8, 1) == 0
    assert limit.grant(seq, 0, 9) == 8  # all but the row that samples


def test_logit_rows_of_prompt_logprobs() -> None:
    limit, seq = LogitRows(5), sequence(9, prompt_logprobs=0)
    assert limit.grant(seq, 0, 9) == 5
    limit.charge(seq, 0, 5)
    assert limit.left == 0
    limit.begin({}, 0)
    assert limit.grant(seq, 5, 4) == 4
    limit.charge(seq, 5, 4)  # rows 5, 6 and 7 for the prompt, 8 for the sample
    assert limit.left == 1


def test_logit_rows_of_drafts() -> None:
    limit, seq = LogitRows(5), sequence(9)
    assert limit.grant(seq, 8, 4) == 4
    limit.charge(seq, 8, 4)
    assert limit.grant(seq, 8, 4) == 1


def test_standard() -> None:
    assert [type(x) for x in standard()] == [Follows]
    assert [type(x) for x in standard(8)] == [Follows, LogitRows]
    assert [type(x) for x in standard(8, 16)] == [Follows, SamePrompt, LogitRows]
    assert [type(x) for x in standard(8, None, (4, 32))] == [Follows, LogitRows, Drafts]


@pytest.mark.parametrize(("running", "each"), [(0, 12), (1, 12), (3, 4), (4, 3), (12, 1), (13, 0), (15, 0), (40, 0)])
def test_drafts_are_shared_and_leave_room(running: int, each: int) -> None:
    limit, seqs = Drafts(12, 64), [sequence(9) for _ in range(running + 5)]
    limit.begin({str(i): seq for i, seq in enumerate(seqs)}, running)
    assert limit.grant(seqs[0], 8, 20) == 1 + each  # the last token, and what is guessed to follow
    assert limit.grant(seqs[0], 11, 20) == 1 + each  # behind what is in flight
    assert limit.grant(seqs[0], 2, 7) == 7  # tokens that are known are no guesses
    assert (1 + each) * running <= 64 or not each


def test_drafts_take_at_most_half_of_a_step() -> None:
    limit, seqs = Drafts(100, 32), [sequence(9) for _ in range(4)]
    limit.begin({str(i): seq for i, seq in enumerate(seqs)}, len(seqs))
    assert limit.grant(seqs[0], 8, 20) == 1 + (32 // 2 - 4) // 4


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9])
def test_common(length: int) -> None:
    assert common([*range(length), 50], [*range(length), 60, 61]) == length
    assert common(list(range(length)), list(range(12))) == length


def test_a_prompt_that_is_being_computed_is_waited_for() -> None:
    """Two prompts with 40 tokens in common: the second computes only what the first does not."""
    scheduler = make(budget=32, limits=standard(64, 4), policy=FirstCome())
    for name, more in (("a", 100), ("b", 200), ("c", 300)):
        scheduler.add(
            Request(id=name, tokens=[*range(40), *range(more, more + 4)], sampling=SamplingParams(max_tokens=2))
        )
    scheduler.add(Request(id="other", tokens=[*range(500, 508)], sampling=SamplingParams(max_tokens=2)))
    first = scheduler.plan() or pytest.fail("no plan")
    assert [(w.key, w.n) for w in first.work] == [(0, 32)]
    run(scheduler, first)
    second = scheduler.plan() or pytest.fail("no plan")
    assert [(w.key, w.n) for w in second.work] == [(0, 12), (3, 8)]  # who shares nothing is not held back
    run(scheduler, second)
    third = scheduler.plan() or pytest.fail("no plan")
    assert {w.key: (w.start, w.n) for w in third.work if w.key in (1, 2)} == {1: (40, 4), 2: (40, 4)}


def test_who_would_save_little_does_not_wait() -> None:
    scheduler = make(budget=64, limits=standard(64, 4))
    scheduler.add(Request(id="a", tokens=[*range(8), *range(100, 112)], sampling=SamplingParams(max_tokens=2)))
    scheduler.add(Request(id="b", tokens=[*range(8), *range(200, 212)], sampling=SamplingParams(max_tokens=2)))
    scheduler.add(Request(id="c", tokens=[*range(20)], sampling=SamplingParams(max_tokens=2), namespace="another"))
    plan = scheduler.plan() or pytest.fail("no plan")
    assert [w.n for w in plan.work] == [20, 20, 20]


def test_a_leader_that_is_gone_holds_nobody_back() -> None:
    scheduler = make(budget=8, limits=standard(64, 4))
    for name in ("a", "b"):
        scheduler.add(Request(id=name, tokens=[*range(20)], sampling=SamplingParams(max_tokens=2)))
    run(scheduler, scheduler.plan() or pytest.fail("no plan"))
    scheduler.abort("a")
    plan = scheduler.plan() or pytest.fail("no plan")
    assert [(w.key, w.start) for w in plan.work] == [(1, 8)]


class Refuse(Limit):
    """Lets nobody of one name run."""

    admission_only = False

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        return 0 if seq.request.id == "never" and start else n

    def passes(self, count: int) -> bool:
        return False

    def passed(self, count: int) -> None:
        pytest.fail("it does not let everybody pass")


def make(
    pages: int = 64,
    budget: int = 64,
    rows: int = 64,
    *,
    limits: tuple[Limit, ...] | None = None,
    policy: Policy | None = None,
) -> Scheduler:
    return Scheduler(
        PrefixTree(Pool(pages), 4),
        slots=4,
        budget=budget,
        context=1000,
        draw=lambda: 1,
        limits=standard(rows) if limits is None else limits,
        policy=policy,
    )


def request(name: str, prompt: int, first: int = 10, **options: Any) -> Request:
    return Request(id=name, tokens=list(range(first, first + prompt)), sampling=SamplingParams(**options))


def run(scheduler: Scheduler, plan: Plan) -> list[Event]:
    """Answer with 7; a prompt logprob names the position it belongs to."""
    rows = []
    for w in plan.work:
        said = [Logprob(w.start + i + 1, 0.0, 1, []) for i in range(w.prompt_logits)]
        rows.append(Row(w.n, [7] if w.sample else [], prompt_logprobs=said))
    return scheduler.commit(plan, Result(rows))


def test_a_sequence_held_back_after_its_match_leaves_no_trace() -> None:
    scheduler = make(limits=(Refuse(),))
    scheduler.add(request("first", 8, max_tokens=1))
    run(scheduler, scheduler.plan() or pytest.fail("no plan"))
    scheduler.add(request("never", 8))
    other = scheduler.add(request("other", 3, first=90))
    plan = scheduler.plan()
    assert plan is not None and [w.key for w in plan.work] == [other]
    seq = scheduler._ids["never"]
    assert (seq.lease, seq.slot, seq.computed, seq.status) == (None, -1, 0, "waiting")
    scheduler.tree.check([scheduler._ids["other"].held])


def test_prompt_logprobs_come_once_and_complete() -> None:
    scheduler = make(rows=4)
    scheduler.add(request("a", 10, prompt_logprobs=0, max_tokens=2))
    events: list[Event] = []
    sizes = []
    while scheduler.has_work:
        plan = scheduler.plan()
        assert plan is not None
        sizes.append((plan.work[0].n, plan.work[0].prompt_logits))
        events += run(scheduler, plan)
    assert sizes == [(4, 4), (4, 4), (2, 1), (1, 0)]
    assert [[p.token for p in e.prompt_logprobs] for e in events] == [list(range(1, 10)), []]


def test_prompt_logprobs_do_not_take_the_prompt_from_the_tree() -> None:
    scheduler = make()
    scheduler.add(request("a", 10, max_tokens=1))
    run(scheduler, scheduler.plan() or pytest.fail("no plan"))
    scheduler.add(request("b", 10, prompt_logprobs=0, max_tokens=1))
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.work[0].start, plan.work[0].prompt_logits) == (0, 9)
    (event,) = run(scheduler, plan)
    assert event.receipt is not None and event.receipt.cached_tokens == 0
    assert scheduler.tree.cached() == 2, "and its pages are those that were there"


def test_prompt_logprobs_survive_a_preemption() -> None:
    scheduler = make(budget=6)
    scheduler.add(request("a", 14, prompt_logprobs=0, max_tokens=1))
    run(scheduler, scheduler.plan() or pytest.fail("no plan"))
    seq = scheduler._ids["a"]
    scheduler._admission.preempt(seq)
    plan = scheduler.plan()
    assert plan is not None
    assert (plan.work[0].start, plan.work[0].prompt_logits) == (4, 6)  # six were there: one page of them is reused
    events = run(scheduler, plan)
    while scheduler.has_work:
        events += run(scheduler, scheduler.plan() or pytest.fail("no plan"))
    (event,) = events
    assert [p.token for p in event.prompt_logprobs] == list(range(1, 14))


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    scheduler = make()
    scheduler.add(request("a", 1, prompt_logprobs=0, max_tokens=1))
    (event,) = run(scheduler, scheduler.plan() or pytest.fail("no plan"))
    assert (event.tokens, event.prompt_logprobs) == ([7], ())
