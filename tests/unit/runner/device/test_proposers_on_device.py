"""Proposers with layers of their own on a device: a small draft model that is mostly wrong, and one that is always right.

Both must leave every answer as it is without draft tokens: in batches, with prefix hits and preemptions, whatever a row's sampling is.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import deque
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from quire.backends.ops import KV  # noqa: E402
from quire.backends.torch.batch import DeviceBatch  # noqa: E402
from quire.cache.groups import Full, Window  # noqa: E402
from quire.cache.pages import Pool  # noqa: E402
from quire.cache.prefix_tree import PrefixTree  # noqa: E402
from quire.engine.limits import Limit, standard  # noqa: E402
from quire.engine.scheduler import Scheduler  # noqa: E402
from quire.engine.sequence import Sequence  # noqa: E402
from quire.engine.types import Constraint, Request  # noqa: E402
from quire.runner.device.proposer import DeviceRows  # noqa: E402
from quire.runner.device.runner import DeviceRunner  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.runner.plan import Plan  # noqa: E402
from quire.runner.speculate import open_proposer  # noqa: E402
from tests.unit.runner.device.kit import OnDevice  # noqa: E402
from tests.unit.runner.tiny_llama import (  # noqa: E402
    CONTEXT,
    PAGE,
    TinyLlama,
    V,
    decode,
    generate,
    known,
    kv,
    opening,
)

DRAFTS = 3
MAX_ROWS = 40
PAGES = 16  # so few that sequences are preempted


def draft_model(target: TinyLlama) -> TinyLlama:
    """One layer with random weights, and the target's embeddings."""
    made = TinyLlama(seed=9, windows=(None,))
    made.layers, made.table, made.head = made.layers[:1], target.table, target.head
    return made


class DraftModel:
    """The best token of a small model, step after step. Its KV lies in groups of its own."""

    on_device: ClassVar[bool] = True
    keep = ()

    def __init__(self, model: TinyLlama, pages: int):
        self.program = OnDevice(pages, model)
        self.groups = self.program.kv.groups
        self.followed = self.proposed = 0

    def follow(self, batch: DeviceBatch, hidden: Any) -> None:
        self.followed += 1
        self.program.launch(batch)

    def propose(self, rows: DeviceRows, hidden: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.proposed += 1
        ids, found = rows.tokens, []
        for ahead in range(DRAFTS):
            ids = self.program.launch(rows.step(ids, ahead)).argmax(dim=-1).to(torch.int32)
            found.append(ids)
        return torch.stack(found, dim=1), torch.full_like(rows.most, DRAFTS)


def whole(model: TinyLlama, proposer: Any) -> KV:
    """The pools of the model, and behind them the proposer's."""
    own = kv(PAGES, model)
    return dataclasses.replace(own, more=(*own.more, *getattr(proposer, "groups", ())))


def runner_of(model: TinyLlama, proposer: Any, padded: bool) -> DeviceRunner:
    return DeviceRunner(
        OnDevice(PAGES, model), kv=whole(model, proposer), vocab_size=V, max_seqs=8, max_tokens=64, max_context=CONTEXT,
        max_rows=MAX_ROWS, padded=padded, proposer=proposer, drafts=DRAFTS if proposer is not None else 0,
    )  # fmt: skip


class Held(Limit):
    """As constraints are: what may come next depends on the token before, so one step in flight and no draft tokens."""

    admission_only = False

    def passes(self, count: int) -> bool:
        return False

    def grant(self, seq: Sequence, start: int, n: int) -> int:
        if seq.request.constraint is None:
            return n
        return 0 if seq.sampling else min(n, max(1, len(seq.tokens) - start))


def mask_of(seq: Sequence) -> np.ndarray:
    """Odd tokens after even ones, and the other way round."""
    return np.arange(V) % 2 != seq.tokens[-1] % 2


def serve(model: TinyLlama, requests: list[Request], proposer: Any, *, padded: bool, depth: int) -> Any:
    """Tokens and log probabilities of each request, and the scheduler's counts."""
    runner = runner_of(model, proposer, padded)
    groups = whole(model, proposer).groups
    first, *more = [(Window(k.window) if k.window else Full(), Pool(k.pages)) for k in groups]
    tree = PrefixTree(first[1], PAGE, first[0], more)
    drafts = DRAFTS if proposer is not None else 0
    limits = (*standard(MAX_ROWS, PAGE, (12, 32) if drafts else None), Held())
    scheduler = Scheduler(tree, slots=5, budget=32, context=CONTEXT, draw=lambda: 0, limits=limits, drafts=drafts)
    heard: dict[str, tuple[list[int], list[Any]]] = {r.id: ([], []) for r in requests}
    flight: deque[Any] = deque()
    todo = deque(requests)
    while todo or flight or scheduler.has_work:
        if todo:
            scheduler.add(todo.popleft())
        plan = scheduler.plan()
        if plan is not None:
            held = {w.key: scheduler._keys[w.key] for w in plan.work if w.sample}
            masks = {
                i: mask_of(held[w.key])
                for i, w in enumerate(plan.work)
                if w.sample and held[w.key].request.constraint is not None
            }
            flight.append((plan, runner.sample(runner.forward(plan), masks)))
        if flight and (plan is None or len(flight) > depth):
            plan, ticket = flight.popleft()
            for event in scheduler.commit(plan, ticket.result()):
                assert event.error is None, event.error
                heard[event.id][0].extend(event.tokens)
                heard[event.id][1].extend((p.token, round(p.logprob, 9), p.rank) for p in event.logprobs)
        tree.check([s.lease for s in scheduler._keys.values() if s.lease is not None])
    runner.close()
    return heard, scheduler.stats()


def traffic(seed: int) -> list[Request]:
    """Prompts that begin alike, and every kind of sampling."""
    rng = random.Random(seed)
    base = [rng.randrange(V) for _ in range(9)]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 30},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0.7, "presence_penalty": 0.6},
        {"min_tokens": 6, "temperature": 0.9},
        {"logit_bias": {3: 2.0, 8: -4.0}, "temperature": 0.5},
    ]
    made = []
    for i in range(7):
        kind = kinds[(i + seed) % len(kinds)]
        params = SamplingParams(
            **{"temperature": 0.0, **kind}, seed=i, max_tokens=rng.randint(16, 26), logprobs=rng.choice([None, 1])
        )
        tokens = base[: rng.randint(3, 9)] + [rng.randrange(V), i, i, 50] * rng.randint(0, 3)
        held = Constraint.regex("x") if i % 4 == 3 else None
        made.append(Request(id=str(i), tokens=tokens, sampling=params, eos_ids=(2, 3), constraint=held))
    return made


@functools.cache
def plainly(seed: int) -> tuple[TinyLlama, list[Request], Any]:
    """A model, requests, and what they get without draft tokens."""
    model, requests = TinyLlama(windows=(6, None) if seed % 2 else (None, None)), traffic(seed)
    return model, requests, serve(model, requests, None, padded=False, depth=0)[0]


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", ["random", "perfect", "ngram"])
def test_answers_are_those_without_draft_tokens(kind: str, depth: int, padded: bool) -> None:
    model, requests, want = plainly((depth + padded) % 2)
    proposer: Any = open_proposer("ngram", max_seqs=8, max_context=CONTEXT)
    if kind != "ngram":
        proposer = DraftModel(draft_model(model) if kind == "random" else model, PAGES)
    have, stats = serve(model, requests, proposer, padded=padded, depth=depth)
    assert have == want
    assert stats.preemptions and stats.prefix_hits
    if kind == "random":
        assert stats.drafted_tokens > 20 and stats.accepted_tokens < stats.drafted_tokens / 2
    if kind == "perfect":  # of those who take the best token, all but the ones past their end
        assert stats.accepted_tokens > max(10, stats.drafted_tokens / 4)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_perfect_draft_model_is_right_every_time(depth: int) -> None:
    """Greedy and alone: each step is as many tokens as it has rows. That holds only if the draft model's own KV is true."""
    model, prompt = TinyLlama(), [5, 9, 61, 3, 40, 7]
    params = SamplingParams(temperature=0.0, max_tokens=33, ignore_eos=True)
    have, stats = serve(
        model, [Request(id="0", tokens=prompt, sampling=params)], DraftModel(model, PAGES), padded=True, depth=depth
    )
    assert have["0"][0] == generate(prompt, params, 0, 33)
    assert stats.accepted_tokens >= 24 and stats.drafted_tokens - stats.accepted_tokens <= 2 * DRAFTS


def test_a_prefix_hit_brings_the_draft_models_kv_too() -> None:
    """The second request computes only its last page: its draft tokens are all right, because the rest was in the cache."""
    model, prompt = TinyLlama(), [5, 9, 61, 3, 40, 7, 12, 30, 31, 32, 33, 34, 35]
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    proposer = DraftModel(model, PAGES)
    requests = [Request(id=str(i), tokens=prompt, sampling=params, follows="0" if i else None) for i in range(2)]
    have, stats = serve(model, requests, proposer, padded=False, depth=1)
    assert have["0"] == have["1"] and stats.prefix_hits == 12
    assert stats.accepted_tokens >= 16 and stats.drafted_tokens - stats.accepted_tokens <= 4 * DRAFTS


@pytest.mark.parametrize("kind", ["perfect", "ngram"])
def test_no_step_waits_for_the_one_before(kind: str) -> None:
    """Four steps are launched with draft tokens before the first is read, and none of them reads another."""
    model, prompt = TinyLlama(), [5, 9, 5, 9, 5, 9, 5, 9]
    params = SamplingParams(temperature=0.0)
    proposer: Any = DraftModel(model, PAGES)
    if kind == "ngram":
        proposer = open_proposer("ngram", max_seqs=8, max_context=CONTEXT)
    runner = runner_of(model, proposer, True)
    reads: list[int] = []
    read = runner.read
    runner.read = lambda ticket: (reads.append(1), read(ticket))[1]  # type: ignore[method-assign]
    pages = list(range(8))
    more = [pages] * len(getattr(proposer, "groups", ()))
    first = known(0, prompt, 0, sample=True, pages=pages, more=more)
    tickets = [runner.sample(runner.forward(Plan(step=0, work=[first], opened=[opening(0, prompt, params)])))]
    for i in range(3):
        work = decode(0)
        work.n, work.drafts = 1 + DRAFTS, DRAFTS
        tickets.append(runner.sample(runner.forward(Plan(step=1 + i, work=[work]))))
    assert not reads
    rows = [ticket.result().rows[0] for ticket in tickets]
    told = [token for row in rows for token in row.tokens]
    assert told == generate(prompt, params, 7, len(told))
    assert len(told) == 13 if kind == "perfect" else len(told) >= 4
    runner.close()
