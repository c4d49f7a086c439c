"""Layers that forget, from the scheduler to the ops: the tokens of a model that keeps everything, from less memory.

Every cell of the pools is NaN until it is written, and rows of the page table begin with -1 where pages are gone, so a
read of what was let go shows.
"""

import random
from collections import deque

import pytest

from quire.cache.groups import Full, Window
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import mix_seed
from quire.engine.types import Request
from quire.models.kv_layout import KVLayout
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan
from tests.unit.runner.tiny_llama import CONTEXT, PAGE, TinyLlama, V, generate, known, kv, make_runner, opening

MAX_ROWS = 12
KINDS = {"window and all": (6, None), "all and window": (None, 9), "two windows": (3, 10), "one window": (7, 7)}


def _whole(windows: tuple[int | None, ...]) -> TinyLlama:
    model = TinyLlama(windows=windows)
    model.kv_layout = KVLayout(windows, CONTEXT)
    return model


def _tree(pages: tuple[int, ...], model: TinyLlama) -> PrefixTree:
    first, *more = [(Window(k.window) if k.window else Full(), Pool(k.pages)) for k in kv(pages, model).groups]
    return PrefixTree(first[1], PAGE, first[0], more)


def _serve(requests, model, pages, *, budget: int, slots: int, depth: int = 0, overlap: bool = False, runner=None):
    """The tokens of each request, and the scheduler and the most pages that were held in each group."""
    tree = _tree(pages, model)
    limits = standard(MAX_ROWS, PAGE)
    scheduler = Scheduler(tree, slots=slots, budget=budget, context=CONTEXT, draw=lambda: 0, limits=limits)
    runner = runner or make_runner(pages=pages, model=model, overlap=overlap, max_rows=MAX_ROWS)
    heard, flight, todo = {r.id: [] for r in requests}, deque(), deque(requests)
    peak, cached = [0] * len(pages), {}
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
                if event.receipt is not None:
                    cached[event.id] = event.receipt.cached_tokens
        leases = [s.lease for s in scheduler._keys.values() if s.lease is not None]
        tree.check(leases)
        peak = [
            max(most, pool.size - tree.available(g))
            for g, (most, pool) in enumerate(zip(peak, tree.pools, strict=True))
        ]
    runner.close()
    return heard, scheduler, peak, cached


def _requests(rng: random.Random) -> list[Request]:
    bases = [[rng.randrange(V) for _ in range(rng.randint(1, 30))] for _ in range(2)]
    return [
        Request(
            id=str(i),
            tokens=rng.choice(bases) + [rng.randrange(V) for _ in range(rng.randint(0, 6))],
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(2**60), max_tokens=rng.randint(1, 20)
            ),
            index=rng.choice([0, 0, 1]),
            follows=str(i - 1) if i and rng.random() < 0.3 else None,
        )
        for i in range(rng.randint(4, 8))
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_tokens_are_those_of_a_model_that_keeps_everything(kind: str, seed: int):
    rng = random.Random(seed * 31 + len(kind))
    windows = KINDS[kind]
    model, requests = TinyLlama(windows=windows), _requests(rng)
    pools = tuple(rng.randint(9, 16) if k.window else rng.randint(16, 24) for k in kv(1, model).groups)
    size = {"budget": rng.randint(4, 14), "slots": rng.randint(2, 5)}
    want = None
    for depth, overlap in ((0, False), (1, True), (2, False)):
        heard, *_ = _serve(requests, model, pools, depth=depth, overlap=overlap, **size)
        want = want or {
            r.id: generate(
                r.tokens, r.sampling, mix_seed(r.sampling.seed, r.index), len(heard[r.id]), model=_whole(windows)
            )
            for r in requests
        }
        assert heard == want


def test_memory_for_a_long_context_is_bounded_by_the_window():
    model = TinyLlama(windows=(6, None))
    request = Request(id="a", tokens=list(range(40)), sampling=SamplingParams(max_tokens=23, seed=1))
    heard, _, peak, _ = _serve([request], model, (16, 5), budget=4, slots=1)
    assert len(heard["a"]) == 23
    assert peak == [16, 3]  # 62 tokens in one; in the other 5 that are seen and a step of 4


def test_a_hit_needs_what_the_window_sees_and_no_more():
    """A prompt that comes again is found where its last tokens are cached, in every group; earlier pages may be gone."""
    model, params = TinyLlama(windows=(6, None)), SamplingParams(max_tokens=2, seed=1)
    prompt = [i * 7 % V for i in range(30)]
    again = [Request(id=str(i), tokens=prompt, sampling=params, follows=str(i - 1) if i else None) for i in range(3)]
    heard, scheduler, _, cached = _serve(again, model, (16, 6), budget=8, slots=1)
    assert cached == {"0": 0, "1": 28, "2": 28}
    assert scheduler.tree.cached(1) <= 6 < scheduler.tree.cached(0)
    assert (
        heard["0"] == heard["1"] == heard["2"] == generate(prompt, params, mix_seed(1, 0), 2, model=_whole((6, None)))
    )


def test_a_prefix_whose_window_was_evicted_is_computed_again():
    model, params = TinyLlama(windows=(6, None)), SamplingParams(max_tokens=2, seed=1)
    prompt = [i * 7 % V for i in range(30)]
    other = [(i * 5 + 3) % V for i in range(30)]
    turns = [
        Request(id=str(i), tokens=tokens, sampling=params, follows=str(i - 1) if i else None)
        for i, tokens in enumerate((prompt, other, prompt))
    ]
    heard, scheduler, _, cached = _serve(turns, model, (32, 4), budget=4, slots=1)
    assert cached == {"0": 0, "1": 0, "2": 0} and scheduler.tree.cached(0) == 2 * 7
    assert heard["0"] == heard["2"]


def test_preemption_changes_no_token():
    model = TinyLlama(windows=(6, None))
    requests = [
        Request(
            id=str(i), tokens=[i, i + 1, 40 + i, 9], sampling=SamplingParams(temperature=1.2, seed=i, max_tokens=20)
        )
        for i in range(5)
    ]
    want, scheduler, *_ = _serve(requests, model, (64, 64), budget=16, slots=5)
    assert scheduler.stats().preemptions == 0
    for pools in ((11, 64), (64, 7), (11, 8)):
        for depth in (0, 1, 2):
            have, scheduler, *_ = _serve(requests, model, pools, budget=8, slots=5, depth=depth)
            assert have == want
            assert scheduler.stats().preemptions > 0 or pools == (64, 7)


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (known(0, [3, 4], 8, page_from=0, pages=[0, 1, 2], more=[[-1, -1, 5]]), "a page is missing"),
        (known(0, [3, 4], 8, page_from=0, pages=[-1, 1, 2], more=[[-1, 4, 5]]), "page numbers"),
        (known(0, [3, 4], 8, page_from=0, pages=[0, 1, 2], more=[[-1, 4, 8]]), "page numbers"),
        (known(0, [3, 4], 8, page_from=0, pages=[0, 1, 2], more=[[4, 5]]), "pages for 2 groups"),
        (known(0, [3, 4], 8, page_from=0, pages=[0, 1, 2]), "pages for 2 groups"),
    ],
)
def test_a_row_that_lacks_what_is_read_is_refused(work, text: str):
    runner = make_runner(pages=(8, 8), model=TinyLlama(windows=(4, None)))
    tokens = list(range(10))
    row = runner.step(Plan(step=0, work=[work], opened=[opening(0, tokens, SamplingParams())])).rows[0]
    assert row.error is not None and text in row.error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_a_device_has_the_same_tokens(kind: str, padded: bool):
    pytest.importorskip("torch", reason="needs torch: the torch extra")
    from tests.unit.runner.device.kit import make_device_runner

    rng = random.Random(len(kind))
    model, requests = TinyLlama(windows=KINDS[kind]), _requests(rng)
    pools = tuple(12 if k.window else 20 for k in kv(1, model).groups)
    want, *_ = _serve(requests, model, pools, budget=9, slots=3)
    for depth in (0, 1):
        runner = make_device_runner(pages=pools, model=model, max_rows=MAX_ROWS, padded=padded)
        have, *_ = _serve(requests, model, pools, budget=9, slots=3, depth=depth, runner=runner)
        assert have == want


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_is_one_copy_to_the_device_however_many_groups(padded: bool, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torch", reason="needs torch: the torch extra")
    from quire.runner.device.staging import Staging
    from tests.unit.runner.device.kit import make_device_runner

    model, sent, steps = TinyLlama(windows=(3, 10)), [], []
    runner = make_device_runner(pages=(12, 12), model=model, max_rows=MAX_ROWS, padded=padded)
    send, forward = Staging.send, runner.forward
    monkeypatch.setattr(Staging, "send", lambda self, arrays, *n: sent.append(len(arrays)) or send(self, arrays, *n))
    monkeypatch.setattr(runner, "forward", lambda plan: steps.append(plan.step) or forward(plan))
    request = Request(id="a", tokens=list(range(14)), sampling=SamplingParams(temperature=0.0, max_tokens=20))
    heard, *_ = _serve([request], model, (12, 12), budget=5, slots=1, depth=1, runner=runner)
    assert len(heard["a"]) == 20 and len(sent) == len(steps) > 20
