"""How the prompts of a step share its tokens, counted in steps and tokens: nobody waits behind a long prompt, and it is slowed by a quarter at most."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import standard
from quire.engine.policy import FairShare, FirstCome, Policy
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Logprob, Plan, Result, Row

P = 16


class Line:
    """A scheduler that is stepped, and notes when each request has its first token and what each step gave to whom."""

    def __init__(
        self,
        *,
        pages: int = 8192,
        slots: int = 8,
        budget: int = 512,
        rows: int = 64,
        depth: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.tree = PrefixTree(Pool(pages), P)
        self.scheduler = Scheduler(
            self.tree,
            slots=slots,
            budget=budget,
            context=1 << 20,
            draw=lambda: 1,
            limits=standard(rows, P),
            policy=policy,
        )
        self.depth = depth
        self.flight: list[Plan] = []
        self.first: dict[str, int] = {}  # the step in which its first token was there
        self.given: list[dict[str, int]] = []  # prompt tokens in each step, by request
        self.names: dict[int, str] = {}
        self.done: dict[str, Event] = {}

    def add(self, name: str, prompt: int | list[int], **options: Any) -> None:
        tokens = prompt if isinstance(prompt, list) else random.Random(name).choices(range(1000), k=prompt)
        fields = {k: options.pop(k) for k in ("priority", "follows") if k in options}
        sampling = SamplingParams(**{"max_tokens": 4, **options})
        self.names[self.scheduler.add(Request(id=name, tokens=tokens, sampling=sampling, **fields))] = name

    def step(self) -> None:
        plan = self.scheduler.plan()
        self.given.append({})
        if plan is not None:
            self.given[-1] = {self.names[w.key]: w.n for w in plan.work if w.start >= 0}
            self.flight.append(plan)
        if self.flight and (plan is None or len(self.flight) > self.depth):
            self.commit(self.flight.pop(0))

    def commit(self, plan: Plan) -> None:
        rows = []
        for w in plan.work:
            said = [Logprob(w.start + i + 1, 0.0, 1, []) for i in range(w.prompt_logits)]
            rows.append(Row(w.n, [7] if w.sample else [], prompt_logprobs=said))
        for event in self.scheduler.commit(plan, Result(rows)):
            if event.tokens:
                self.first.setdefault(event.id, len(self.given))
            if event.finish:
                self.done[event.id] = event
        self.tree.check(s.lease for s in self.scheduler._keys.values() if s.lease is not None)

    def until(self, *names: str, most: int = 5000) -> None:
        for _ in range(most):
            if all(name in self.first for name in names):
                return
            self.step()
        pytest.fail(f"no first token after {most} steps: {names}")

    def finish(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        pytest.fail("it never ends")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_short_prompt_behind_a_long_one_has_its_first_token_at_once(depth: int) -> None:
    line = Line(depth=depth)
    line.add("long", 32768)
    for _ in range(3):
        line.step()
    line.add("short", 20)
    line.until("short")
    assert line.first["short"] <= 3 + 1 + depth
    line.until("long")
    assert line.first["long"] <= 64 + 2 + depth


def test_first_come_is_a_policy_too() -> None:
    line = Line(policy=FirstCome())
    line.add("long", 32768)
    line.add("short", 20)
    line.until("short")
    assert line.first["long"] == 64 and line.first["short"] == 65


def test_they_arrive_together_and_no_token_of_the_step_is_lost() -> None:
    line = Line()
    line.add("long", 2000)
    line.add("short", 20)
    line.until("long", "short")
    assert line.first == {"short": 1, "long": 4}
    assert line.given[0] == {"long": 492, "short": 20} and line.given[1] == {"long": 512 - 1}  # which decodes by then


def test_later_prompts_have_a_fifth_at_any_time_and_the_first_is_slowed_by_a_quarter() -> None:
    """Short ones come without end: they have what is lent, and then what the first makes room for."""
    line = Line(slots=8)
    line.add("long", 32768)
    count = later = own = 0
    while "long" not in line.first:
        while line.scheduler.stats().waiting < 8:
            line.add(f"s{count}", 100, max_tokens=1)
            count += 1
        line.step()
        given = line.given[-1]
        if given.get("long", 0) and len(line.given) < 80:
            own += given["long"]
            later += sum(given.values()) - given["long"]
            assert 4 * later >= own - 512, "a fifth at least, but for what the newest step makes room for"
            assert later <= own / 4 + (32768 - own) / 8 + 1, "and not more than that and what is lent"
            assert given["long"] >= 512 // 5, "the first moves in each step"
    assert line.first["long"] <= 81, "64 steps and a quarter; the last token of a prompt goes with the decoders"
    assert later > 32768 / 4 - 512, "all of the quarter was used"


def test_a_fifth_is_for_prompts_that_are_not_short() -> None:
    """What is not a whole fifth is carried on, in both directions."""
    line = Line(slots=8)
    line.add("long", 32768)
    line.add("longer", 40000)
    while len(line.given) < 78:
        line.step()
        assert abs(line.given[-1]["longer"] - 512 / 5) < 1
    line.until("long")
    assert line.first["long"] <= 81


def test_a_prompt_that_is_short_beside_what_the_first_needs_goes_ahead() -> None:
    line = Line()
    line.add("long", 32768)
    line.step()
    line.add("second", 20000)
    line.step()
    assert line.given[-1]["second"] <= 103, "an eighth of what the first needs is less than that"
    line.add("short", 2000)
    line.until("short")
    assert line.first["short"] == 2 + 5, "four fifths of each step"
    line.until("long")
    assert line.first["long"] <= 81


def test_what_was_lent_is_not_lent_again_before_it_is_paid_back() -> None:
    """The account is on the prompt: it is not forgotten while an urgent one is computed first."""
    line = Line(slots=8)
    line.add("long", 8192)
    line.step()
    first = next(iter(line.scheduler._keys.values()))
    for i in range(60):
        line.add(f"s{i}", 100, max_tokens=1)
        if i == 30:
            line.add("urgent", 700, priority=-1)
        line.step()
        if first.prompt_done:
            break
        assert first.lent <= (8192 - first.left) / 4 + first.left / 8 + 1
    line.until("long")
    assert first.lent <= 8192 / 4 + 1 and first.lent > 1000


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 7, 32])
def test_a_fifth_of_few_tokens_is_something(budget: int) -> None:
    line = Line(budget=budget)
    line.add("long", 40 * budget)
    line.add("next", 40 * budget)
    line.until("long")
    assert 40 <= line.first["long"] <= 51
    assert sum(given.get("next", 0) for given in line.given) >= 40 * budget // 5
    line.until("next")
    assert all(sum(given.values()) == budget for given in line.given[: line.first["long"]]), "no token is lost"


def test_several_short_ones_behind_several_long_ones() -> None:
    line = Line(slots=8)
    for i in range(3):
        line.add(f"long{i}", 16384)
    for _ in range(5):
        line.step()
    for i in range(4):
        line.add(f"s{i}", 20)
    line.until(*(f"s{i}" for i in range(4)))
    assert max(line.first[f"s{i}"] for i in range(4)) <= 5 + 2
    line.until("long0", "long1", "long2")
    assert line.first["long0"] <= 32 * 5 / 4 + 1
    assert line.first["long0"] < line.first["long1"] < line.first["long2"] <= 3 * 32 + 4


def test_the_last_slot_is_not_for_a_second_long_one() -> None:
    line = Line(slots=2)
    line.add("a", 16384)
    line.add("b", 16384)
    line.step()
    line.add("s", 20)
    line.until("s")
    assert line.first["s"] <= 3
    line.finish()
    assert set(line.done) == {"a", "b", "s"}


def test_short_ones_without_end_do_not_starve_the_next_long_one() -> None:
    line = Line(slots=4)
    line.add("a", 8192)
    line.add("b", 8192)
    count = 0
    while "b" not in line.first:
        assert len(line.given) < 60, "b waits for a, and for a slot that a short one leaves"
        while line.scheduler.stats().waiting < 4:
            line.add(f"s{count}", 200, max_tokens=3)
            count += 1
        line.step()
    assert line.first["a"] <= 20 + 1


def test_a_lower_priority_has_no_share() -> None:
    line = Line()
    line.add("urgent", 5120, priority=-1)
    line.add("other", 20)
    line.until("urgent")
    assert "other" not in line.first
    line.until("other")
    assert line.first == {"urgent": 10, "other": 11}


def test_an_urgent_request_has_a_share_behind_a_long_prompt_that_runs() -> None:
    line = Line()
    line.add("long", 32768)
    line.step()
    line.add("shorter", 300)
    line.add("urgent", 600, priority=-1)
    line.until("urgent")
    assert line.first["urgent"] <= 4, "and once it runs it is the first"
    line.until("shorter")
    assert line.first["shorter"] <= 8


def test_followers_have_their_share_when_they_may_start() -> None:
    line = Line()
    line.add("long", 32768)
    prompt = list(range(2000, 2400))
    line.add("lead", prompt)
    for i in range(3):
        line.add(f"f{i}", prompt, follows="lead")
    line.add("same", prompt)
    line.until("lead", "f0", "f1", "f2", "same")
    assert line.first["lead"] <= 4
    assert max(line.first[name] for name in ("f0", "f1", "f2", "same")) <= 7
    computed = sum(given.get(name, 0) for given in line.given for name in ("f0", "f1", "f2", "same"))
    assert computed <= 4 * P, "they found its prompt in the cache"


def test_prompt_logprobs_leave_their_tokens_to_others() -> None:
    """A prompt whose rows are bounded cannot use the step: what it leaves goes to the next, beyond its share."""
    line = Line(rows=64)
    line.add("rows", 640, prompt_logprobs=0)
    line.add("next", 4096)
    line.step()
    assert line.given[0] == {"rows": 64, "next": 448}
    line.finish()
    assert len(line.done) == 2


def test_prompt_logprobs_in_the_share() -> None:
    line = Line(rows=32)
    line.add("long", 32768)
    line.add("rows", 100, prompt_logprobs=0)
    line.until("rows")
    assert line.first["rows"] <= 5
    line.until("long")
    assert line.first["long"] <= 66


def test_a_tight_pool_preempts_and_all_finish() -> None:
    line = Line(pages=160, slots=6, budget=64)
    line.add("long", 2000, max_tokens=200)
    for i in range(6):
        line.add(f"m{i}", 300, max_tokens=200)
        line.add(f"s{i}", 20, max_tokens=200)
        line.step()
    line.finish(20_000)
    assert len(line.done) == 13 and line.scheduler.stats().preemptions > 0
    assert all(event.receipt and event.receipt.output_tokens == 200 for event in line.done.values())


def test_nobody_overtakes_who_waits_for_pages() -> None:
    """A long prompt that needs nearly all pages is next as soon as they are free, however many short ones come."""
    line = Line(pages=100, slots=8, budget=64)
    line.add("d", 64, max_tokens=30)
    line.step()
    line.add("wide", 1550, max_tokens=1)
    line.step()
    for i in range(40):
        line.add(f"s{i}", 20, max_tokens=30)
    while not line.given[-1].get("wide"):
        line.step()
        assert len(line.given) < 60
    assert all(at == len(line.given) for name, at in line.first.items() if name != "d"), (
        "a few pages were free all the time"
    )
    line.finish()


def test_plans_are_the_same_every_time() -> None:
    def told() -> list[dict[str, int]]:
        line, rng = Line(slots=4, pages=200, budget=48), random.Random(3)
        for i in range(20):
            line.add(f"r{i}", rng.choice([5, 60, 400]), priority=rng.choice([0, 0, 1]), max_tokens=rng.randint(1, 30))
            line.step()
        line.finish()
        return line.given

    assert told() == told()


def test_a_share_is_a_fifth_in_the_long_run() -> None:
    policy, shares = FairShare(), list[int]()
    first = Sequence.of(Request(id="a", tokens=[1] * 512000), 0, 0, 1, 1 << 20)
    for _ in range(1000):
        shares.append(policy.share(first, 512).any)
        policy.shared(first, 512, shares[-1])
        first.computed += 512 - shares[-1]
    assert sum(shares) == 102400 and set(shares) == {102, 103}
    policy.shared(first, 512, 0)
    assert policy.share(first, 512).any == 103, "what was not used is not owed"
