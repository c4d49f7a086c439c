"""Steps in flight: the host is ahead of the device, and nothing in the answers shows it."""

import random
import threading
from collections import deque

import pytest

from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import mix_seed
from quire.engine.types import Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan
from tests.unit.runner.tiny_llama import CONTEXT, PAGE, V, decode, generate, known, make_runner, opening, program

MAX_ROWS = 12


def _requests(rng: random.Random) -> list[Request]:
    bases = [[rng.randrange(V) for _ in range(rng.randint(1, 20))] for _ in range(2)]
    requests = []
    for i in range(rng.randint(4, 9)):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.9]),
            seed=rng.randrange(2**60),
            max_tokens=rng.randint(1, 10),
            min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        tokens = rng.choice(bases) + [rng.randrange(V) for _ in range(rng.randint(0, 6))]
        requests.append(Request(id=str(i), tokens=tokens, sampling=sampling, eos_ids=(2, 3)))
    return requests


def _serve(requests: list[Request], depth: int, overlap: bool, *, pages: int, budget: int, slots: int):
    """Everything each request was told, and how often somebody was preempted."""
    tree = PrefixTree(Pool(pages), PAGE)
    scheduler = Scheduler(tree, slots=slots, budget=budget, context=CONTEXT, draw=lambda: 0, limits=standard(MAX_ROWS))
    runner = make_runner(pages=pages, overlap=overlap, max_rows=MAX_ROWS)
    heard = {r.id: ([], [], []) for r in requests}
    finish, flight, todo = {}, deque(), deque(requests)
    while todo or flight or scheduler.has_work:
        if todo:
            scheduler.add(todo.popleft())
        plan = scheduler.plan()
        if plan is not None:
            flight.append((plan, runner.sample(runner.forward(plan))))
        if flight and (plan is None or len(flight) > depth):
            plan, ticket = flight.popleft()
            for event in scheduler.commit(plan, ticket.result()):
                for mine, new in zip(
                    heard[event.id], (event.tokens, event.logprobs, event.prompt_logprobs), strict=True
                ):
                    mine.extend(new)
                if event.finish:
                    assert event.error is None, event.error
                    finish[event.id] = event.finish
    runner.close()
    assert finish.keys() == heard.keys()
    return heard, scheduler.stats().preemptions


@pytest.mark.parametrize("seed", range(6))
def test_depth_and_overlap_change_no_bit(seed: int):
    rng = random.Random(seed)
    requests = _requests(rng)
    size = {"pages": rng.randint(14, 24), "budget": rng.randint(4, 24), "slots": rng.randint(2, 6)}
    want, _ = _serve(requests, 0, False, **size)
    for depth in (0, 1, 2):
        for overlap in (False, True):
            have, _ = _serve(requests, depth, overlap, **size)
            assert have == want
    for request in requests:
        tokens, probs, prompt_probs = want[request.id]
        # A stop token ends a sequence and may be left out of its tokens, so compare what there is.
        naive = generate(
            request.tokens, request.sampling, mix_seed(request.sampling.seed, request.index), len(tokens), [2, 3]
        )
        assert tokens == naive
        assert len(probs) == (len(tokens) if request.sampling.logprobs is not None else 0)
        asked = request.sampling.prompt_logprobs is not None
        assert [p.token for p in prompt_probs] == (request.tokens[1:] if asked else [])


def test_preemption_changes_no_bit():
    """So few pages that sequences must be preempted; room for all is the same."""
    requests = [
        Request(
            id=str(i),
            tokens=[i, i + 1, 40 + i, 9],
            sampling=SamplingParams(
                temperature=1.2, seed=i, max_tokens=20, frequency_penalty=0.7, repetition_penalty=1.2, logprobs=1
            ),
        )
        for i in range(5)
    ]
    want, none = _serve(requests, 0, False, pages=64, budget=16, slots=5)
    assert none == 0
    for depth in (0, 1, 2):
        have, preempted = _serve(requests, depth, depth > 0, pages=11, budget=16, slots=5)
        assert preempted > 0
        assert have == want


class MaskProvider:
    """A program that waits to be let through."""

    def __init__(self):
        self.inner, self.open, self.entered = program(64), threading.Event(), threading.Event()
        self.threads = set()

    def run(self, batch, inputs=None):
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.open.wait(20)
        return self.inner.run(batch, inputs or {})


def test_only_result_blocks():
    gate = MaskProvider()
    runner = make_runner(overlap=True, run=gate)
    params = SamplingParams(temperature=1.0, frequency_penalty=1.0)
    prompt = [4, 8, 15, 16, 23, 42]
    first = Plan(
        step=0,
        work=[known(0, prompt, 0, sample=True, pages=[0, 1, 2])],
        opened=[opening(0, prompt, params)],
    )
    tickets = [runner.sample(runner.forward(first))]
    tickets += [runner.sample(runner.forward(Plan(step=i, work=[decode(0)]))) for i in (1, 2, 3)]
    assert gate.entered.wait(20)
    assert not any(ticket.ready for ticket in tickets)
    gate.open.set()
    tokens = [ticket.result().rows[0].tokens[0] for ticket in tickets]
    assert tokens == generate(prompt, params, 7, 4, [2, 3])
    assert tickets[0].ready and tickets[0].result().rows[0].tokens == tokens[:1]
    assert gate.threads and threading.get_ident() not in gate.threads
    runner.close()


def test_close_finishes_what_was_given():
    gate = MaskProvider()
    runner = make_runner(overlap=True, run=gate)
    plan = Plan(
        step=0,
        work=[known(0, [1, 2], 0, sample=True, pages=[0])],
        opened=[opening(0, [1, 2], SamplingParams(temperature=0.0))],
    )
    ticket = runner.sample(runner.forward(plan))
    threading.Timer(0.05, gate.open.set).start()
    runner.close()
    assert ticket.ready and len(ticket.result().rows[0].tokens) == 1
