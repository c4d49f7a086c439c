"""Speculative decoding: the n-gram proposer against a plain search, and runners that verify its drafts against runners that have none."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, ClassVar

import numpy as np
import pytest

from quire.cache.groups import Full, Window
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import mix_seed
from quire.engine.types import Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan
from quire.runner.speculate import DraftRows, names, open_proposer
from quire.runner.speculate.ngram import LEAST, MOST, START, NGram
from tests.unit.runner.tiny_llama import CONTEXT, PAGE, TinyLlama, V, decode, generate, known, kv, make_runner, opening

MAX_ROWS = 40


def test_the_proposers_are_the_files() -> None:
    assert names() == ["ngram"]
    with pytest.raises(ValueError, match="there are ngram"):
        open_proposer("oracle", max_seqs=1, max_context=8)


def plainly(said: list[int], most: int) -> list[int]:
    """The longest tail that was said before, of several the latest, and what followed; which goes on with itself."""
    for n in range(min(MOST, len(said) - 1), LEAST - 1, -1):
        for end in range(len(said) - 1, n - 1, -1):
            if said[end - n : end] == said[-n:]:
                whole = list(said)
                for i in range(most):
                    whole.append(whole[end + i])
                return whole[len(said) :]
    return []


def draft_of(proposer: NGram, slot: int, most: int, ahead: int = 0) -> list[int]:
    return proposer.propose(DraftRows([slot], [most], [ahead]))[0]


def test_a_draft_is_what_followed_the_longest_match() -> None:
    rng = random.Random(1)
    found = 0
    for _ in range(400):
        said = [rng.randrange(rng.choice([2, 3, 6])) for _ in range(rng.randint(1, 60))]
        proposer = NGram(3, 64)
        proposer.open(1, said[: len(said) // 2])
        proposer.learn(1, said[len(said) // 2 :], 0)
        draft = draft_of(proposer, 1, START)
        assert draft == plainly(said, START)
        found += bool(draft)
    assert 200 < found < 400  # both kinds were there


def test_what_repeats_goes_on_repeating() -> None:
    proposer = NGram(1, 64)
    proposer.open(0, [7, 8, 9, 7, 8])
    assert draft_of(proposer, 0, 9) == [9, 7]  # as far as a new sequence is trusted
    proposer.learn(0, [9, 7, 8], 2)
    assert draft_of(proposer, 0, 9) == [9, 7, 8, 9]
    assert draft_of(proposer, 0, 3) == [9, 7, 8]
    proposer.learn(0, [9, 7, 8, 9, 7], 4)
    assert draft_of(proposer, 0, 32) == [8, 9, 7, 8, 9, 7, 8, 9]


def test_wrong_drafts_ask_for_longer_matches() -> None:
    proposer = NGram(1, 64)
    proposer.open(0, [1, 2, 3, 1, 2])
    assert draft_of(proposer, 0, 4) == [3, 1]
    proposer.learn(0, [5], 2)
    proposer.learn(0, [1, 2], 0)
    assert draft_of(proposer, 0, 4) == []  # two tokens are the same, and two were not enough before
    proposer.learn(0, [3, 1, 2], 0)
    assert draft_of(proposer, 0, 4) == [5] == plainly([1, 2, 3, 1, 2, 5, 1, 2, 3, 1, 2], 1)  # one at a time again


def test_a_slot_is_a_sequence_of_its_own() -> None:
    proposer = NGram(2, 16)
    proposer.open(0, [1, 2, 1, 2])
    proposer.open(1, [5, 6, 7])
    assert draft_of(proposer, 0, 2) == [1, 2] and draft_of(proposer, 1, 2) == []
    proposer.close(0)
    assert draft_of(proposer, 0, 2) == []
    proposer.open(0, list(range(16)))
    proposer.learn(0, [3, 4, 5], 0)  # past what it holds: the end of a context, which nothing follows
    assert draft_of(proposer, 0, 2) == []


class Told:
    """A proposer that says what it is told to."""

    def __init__(self, *drafts: list[int]) -> None:
        self.drafts = deque(drafts)
        self.heard: list[tuple[list[int], int]] = []

    on_device: ClassVar[bool] = False

    def open(self, slot: int, tokens: Any) -> None: ...
    def close(self, slot: int) -> None: ...
    def propose(self, batch: DraftRows, hidden: Any = None) -> list[list[int]]:
        assert not any(batch.ahead)
        return [self.drafts.popleft()[:most] if self.drafts else [] for most in batch.most]

    def learn(self, slot: int, tokens: Any, drafted: int) -> None:
        self.heard.append((list(tokens), drafted))


def runners(proposer: Any, kinds: str, **more: Any) -> Any:
    if kinds == "host":
        return make_runner(proposer=proposer, **more)
    pytest.importorskip("torch", reason="needs torch: the torch extra")
    from tests.unit.runner.device.kit import make_device_runner

    return make_device_runner(proposer=proposer, drafts=4, padded=kinds == "padded", **more)


KINDS = ["host", "device", "padded"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_row_is_the_right_drafts_and_one_more(kind: str, right: int) -> None:
    prompt, params = [5, 9, 5, 9, 5], SamplingParams(temperature=0.0, logprobs=2)
    want = generate(prompt, params, 7, 8)
    drafts = want[1:4]
    if right < 3:
        drafts[right] = (drafts[right] + 1) % V
    told = Told(drafts)
    runner = runners(told, kind)
    first = known(0, prompt, 0, sample=True, pages=[3, 1, 2])
    assert runner.step(Plan(step=0, work=[first], opened=[opening(0, prompt, params)])).rows[0].tokens == want[:1]
    verify = decode(0)
    verify.n, verify.drafts = 5, 4
    row = runner.step(Plan(step=1, work=[verify])).rows[0]
    assert (row.accepted, row.drafted, row.error) == (1 + right, 3, None)
    assert row.tokens == want[1 : 2 + right] and [p.token for p in row.logprobs] == row.tokens
    plain = runners(None, kind)
    plain.step(Plan(step=0, work=[first], opened=[opening(0, prompt, params)]))
    for i in range(1 + right):
        alone = plain.step(Plan(step=1 + i, work=[decode(0)])).rows[0]
        assert alone.tokens == row.tokens[i : i + 1] and alone.logprobs == row.logprobs[i : i + 1]
    assert runner.step(Plan(step=2, work=[decode(0)])).rows[0].tokens == want[2 + right : 3 + right]
    assert told.heard == [(want[:1], 0), (row.tokens, 3), (want[2 + right : 3 + right], 0)]
    runner.close()


@pytest.mark.parametrize("kind", ["device", "padded"])
def test_penalties_have_no_draft_tokens_on_a_device(kind: str) -> None:
    """What a row may choose there depends on the row before it: no drafts are asked for, and the others have theirs."""
    prompt = [5, 9, 5, 9, 5]
    sampling = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.0, repetition_penalty=1.3)]
    want = [generate(prompt, params, 7, 4) for params in sampling]
    runner = runners(Told(want[0][1:3], want[1][1:3]), kind)
    opened = [opening(i, prompt, params) for i, params in enumerate(sampling)]
    work = [known(i, prompt, 0, sample=True, pages=[3 + 4 * i, 4 + 4 * i, 5 + 4 * i]) for i in range(2)]
    runner.step(Plan(step=0, work=work, opened=opened))
    verified = [decode(0), decode(1)]
    for verify in verified:
        verify.n, verify.drafts = 5, 4
    rows = runner.step(Plan(step=1, work=verified)).rows
    assert [row.drafted for row in rows] == [2, 0]
    assert rows[0].tokens == want[0][1:4] and rows[1].tokens == want[1][1:2]
    assert runner.step(Plan(step=2, work=[decode(1)])).rows[0].tokens == want[1][2:3]
    runner.close()


def tree_of(model: TinyLlama, pools: tuple[int, ...]) -> PrefixTree:
    first, *more = [(Window(k.window) if k.window else Full(), Pool(k.pages)) for k in kv(pools, model).groups]
    return PrefixTree(first[1], PAGE, first[0], more)


def serve(requests: list[Request], model: TinyLlama, pools: tuple[int, ...], runner: Any, *, drafts: int, depth: int):
    """Tokens and log probabilities of each request, the scheduler's counts, and receipts."""
    limits = standard(MAX_ROWS, PAGE, (12, 24) if drafts else None)
    tree = tree_of(model, pools)
    scheduler = Scheduler(
        tree, slots=4, budget=24, context=CONTEXT, draw=lambda: 0, limits=limits, drafts=drafts
    )  # fmt: skip
    heard: dict[str, list[int]] = {r.id: [] for r in requests}
    logprobs: dict[str, list[Any]] = {r.id: [] for r in requests}
    receipts: dict[str, Any] = {}
    flight: deque[Any] = deque()
    todo = deque(requests)
    while todo or flight or scheduler.has_work:
        if todo:
            scheduler.add(todo.popleft())
        plan = scheduler.plan()
        if plan is not None:
            flight.append((plan, runner.sample(runner.forward(plan))))
        if flight and (plan is None or len(flight) > depth):
            plan, ticket = flight.popleft()
            for event in scheduler.commit(plan, ticket.result()):
                assert event.error is None, event.error
                heard[event.id] += event.tokens
                logprobs[event.id] += event.logprobs
                receipts[event.id] = event.receipt
        tree.check([s.lease for s in scheduler._keys.values() if s.lease is not None])
    runner.close()
    return heard, logprobs, scheduler.stats(), receipts


def traffic(rng: random.Random) -> list[Request]:
    """Prompts that repeat themselves, and some that do not; every kind of sampling."""
    made = []
    for i in range(5):
        words = [rng.randrange(V) for _ in range(rng.choice([2, 3, 5]))]
        prompt = words * rng.randint(1, 4) + words[: rng.randint(0, 2)]
        kind = rng.choice([{}, {}, {"temperature": 0.7}, {"temperature": 0.3, "top_k": 8}, {"repetition_penalty": 1.2}])
        more = {"logprobs": 2} if rng.random() < 0.4 else {}
        more |= {"min_tokens": 3, "stop_token_ids": (2, 3)} if rng.random() < 0.3 else {}
        params = SamplingParams(**{"temperature": 0.0, **kind, **more}, seed=i, max_tokens=rng.randint(5, 36))
        made.append(Request(id=str(i), tokens=prompt, sampling=params))
    return made


@pytest.mark.parametrize(("windows", "seed"), [((None, None), 0), ((6, None), 1), ((5, 11), 1)], ids=str)
def test_random_traffic_says_the_same_with_and_without(windows: tuple[int | None, ...], seed: int) -> None:
    """On the host and on a device, at every depth, in pools so small that sequences are preempted."""
    rng = random.Random(seed * 7 + len(str(windows)))
    model, requests = TinyLlama(windows=windows), traffic(rng)
    groups = kv(1, model).groups
    small = tuple(14 if k.window else 22 for k in groups)
    runner = make_runner(pages=small, model=model, max_rows=MAX_ROWS)
    want, told, plain, _ = serve(requests, model, small, runner, drafts=0, depth=0)
    drafted = right = 0
    for kind, depth in (("host", 0), ("host", 1), ("device", 1), ("padded", 0), ("padded", 2)):
        proposer = open_proposer("ngram", max_seqs=8, max_context=CONTEXT)
        runner = runners(proposer, kind, pages=small, model=model, max_rows=MAX_ROWS, overlap=depth > 0)
        have, logprobs, stats, receipts = serve(requests, model, small, runner, drafts=4, depth=depth)
        assert have == want, (kind, depth)
        assert logprobs == told or kind != "host"  # a device sums them up in another order
        assert 0 < stats.accepted_tokens <= stats.drafted_tokens
        assert stats.preemptions <= plain.preemptions + (depth > 0)  # nobody gives way to draft tokens
        ends = [r for r in receipts.values() if r is not None]
        assert sum(r.drafted_tokens for r in ends) == stats.drafted_tokens
        assert sum(r.accepted_tokens for r in ends) == stats.accepted_tokens
        drafted, right = drafted + stats.drafted_tokens, right + stats.accepted_tokens
    assert right > drafted // 4


def test_shapes_of_verification_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with other numbers of drafts are computed with as many rows each, at sizes that could be captured."""
    pytest.importorskip("torch", reason="needs torch: the torch extra")
    from quire.runner.device.verify import row_counts
    from tests.unit.runner.device.kit import OnDevice, make_device_runner

    assert [row_counts(k) for k in (0, 1, 2, 4, 8)] == [[], [2], [2, 3], [2, 3, 5], [2, 5, 9]]
    program = OnDevice(64)
    shapes: list[tuple[int, int, bool]] = []
    launch = program.launch
    program.launch = lambda batch: (shapes.append((batch.sequences, batch.tokens, batch.uniform)), launch(batch))[1]
    prompts = [[5, 9, 5, 9], [1, 2, 3, 1, 2], [50, 51, 52]]
    told = Told([1], [2, 3, 4])  # the third has none
    runner = make_device_runner(run=program, proposer=told, drafts=4, padded=True)
    params = SamplingParams(temperature=0.0)
    work = [known(i, p, 0, sample=True, pages=[4 * i, 4 * i + 1, 4 * i + 2]) for i, p in enumerate(prompts)]
    runner.step(Plan(step=0, work=work, opened=[opening(i, p, params) for i, p in enumerate(prompts)]))
    verified = [decode(i) for i in range(3)]
    for verify in verified:
        verify.n, verify.drafts = 5, 4
    shapes.clear()
    rows = runner.step(Plan(step=1, work=verified)).rows
    assert shapes == [(4, 20, True)]  # three sequences at the size of four; four rows at that of five
    assert [row.drafted for row in rows] == [1, 3, 0]
    shapes.clear()
    runner.step(Plan(step=2, work=[decode(i) for i in range(3)]))
    assert shapes == [(4, 4, False)]  # no draft tokens: a decode step like any other
    runner.close()


def test_a_failed_row_keeps_its_error_to_itself() -> None:
    """Logits that are no numbers behind a draft: that sequence fails, and its batch mate's drafts are verified."""
    pytest.importorskip("torch", reason="needs torch: the torch extra")
    from tests.unit.runner.device.kit import OnDevice, make_device_runner

    prompt, params = [5, 9, 5, 9, 5], SamplingParams(temperature=0.0)
    want = generate(prompt, params, 7, 4)
    program = OnDevice(64)
    runner = make_device_runner(run=program, proposer=Told(want[1:3], want[1:3]), drafts=4)
    work = [known(i, prompt, 0, sample=True, pages=[4 * i, 4 * i + 1, 4 * i + 2]) for i in range(2)]
    runner.step(Plan(step=0, work=work, opened=[opening(i, prompt, params) for i in range(2)]))
    verified = [decode(0), decode(1)]
    for verify in verified:
        verify.n, verify.drafts = 3, 2
    program.nan = [1]  # the second of the first one's three rows
    rows = runner.step(Plan(step=1, work=verified)).rows
    assert rows[0].error is not None and "NaN" in rows[0].error and rows[0].tokens == []
    assert rows[1].tokens == want[1:4] and rows[1].accepted == 3
    runner.close()


def test_seeds_are_by_position() -> None:
    """The draw of a token is its position's, however many came in its step."""
    prompt, params = [5, 9, 5, 9, 5], SamplingParams(temperature=1.0)
    want = generate(prompt, params, mix_seed(3, 0), 6)
    for kind in KINDS:
        runner = runners(Told(want[1:5]), kind)
        opened = opening(0, prompt, params, seed=mix_seed(3, 0))
        runner.step(Plan(step=0, work=[known(0, prompt, 0, sample=True, pages=[3, 1, 2])], opened=[opened]))
        verify = decode(0)
        verify.n, verify.drafts = 5, 4
        assert runner.step(Plan(step=1, work=[verify])).rows[0].tokens == want[1:6]
        runner.close()
    assert np.unique(want).size > 1
