"""Sampling on the device against the host's sampler: filters, ties, rules, draws, log probabilities, broken rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.backends.cuda.kernels import candidates
from quire.backends.cuda.kernels.logprobs import logprobs, wanted
from quire.backends.cuda.kernels.philox import uniforms
from quire.backends.cuda.kernels.rules import apply_rules, pieces
from quire.backends.cuda.kernels.sample import BROKEN, RULED_OUT, choose, greedy
from quire.runner.params import SamplingParams
from quire.runner.random import uniform
from quire.runner.sampler import Sampler, Stream

VOCAB = 20_000  # three chunks, the last one short


def table(params: list[SamplingParams], draws: list[float]) -> torch.Tensor:
    return torch.tensor(
        [
            [p.temperature, p.top_k, p.typical_p, p.top_p, p.min_p, p.repetition_penalty, p.frequency_penalty, p.presence_penalty, u]
            for p, u in zip(params, draws, strict=True)
        ],
        dtype=torch.float64,
    )  # fmt: skip


def narrows(params: list[SamplingParams], vocab: int) -> torch.Tensor:
    return torch.tensor(
        [p.temperature > 0 and (0 < p.top_k < vocab or p.top_p < 1 or p.min_p > 0) for p in params], dtype=torch.int32
    )


def device_tokens(scores: torch.Tensor, params: list[SamplingParams], draws: list[float], device: str) -> list[int]:
    rows, vocab = scores.shape
    tokens = torch.full((rows,), -7, dtype=torch.int32, device=device)
    found = candidates.scratch(rows, vocab, device)
    choose(scores.to(device), table(params, draws).to(device), narrows(params, vocab).to(device), tokens, found)
    return tokens.tolist()


def host_tokens(scores: torch.Tensor, params: list[SamplingParams], seeds: list[int]) -> list[int]:
    sampler = Sampler(scores.shape[1])
    streams = [Stream(p, seed, scores.shape[1]) for p, seed in zip(params, seeds, strict=True)]
    return [c.tokens[0] for c in sampler.sample(scores.numpy(), streams, [3] * len(streams))]


CASES = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 6000},  # more than a list holds
    {"top_k": 19_999},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1e-4},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "temperature": 0.7},
    {"top_p": 0.7, "min_p": 0.01, "temperature": 2.0},
]


@pytest.mark.parametrize(
    "spread", [pytest.param(0.5, marks=pytest.mark.large), 12.0]
)  # flat: everything matters; steep: a handful does
def test_the_host_would_choose_the_same(spread: float, device: str):
    g = torch.Generator().manual_seed(int(spread * 10))
    seeds = [100 + i for i in range(len(CASES))]
    params = [SamplingParams(**c) for c in CASES]
    scores = torch.randn(len(CASES), VOCAB, generator=g) * spread
    draws = [uniform(seed, 3) for seed in seeds]
    assert device_tokens(scores, params, draws, device) == host_tokens(scores, params, seeds)


def test_ties_go_to_the_smaller_id_and_draws_reach_the_ends(device: str):
    scores = torch.full((1, VOCAB), -50.0)
    scores[0, [17, 400, 9000, 15_000]] = 2.0  # four equals
    scores[0, 12_000] = 1.0
    base = {"temperature": 1.0}
    for given, kept in (
        ({"top_k": 2}, [17, 400]),
        ({"top_k": 5}, [17, 400, 9000, 12_000, 15_000]),
        ({"top_p": 0.4}, [17, 400]),
        ({"top_k": 3, "top_p": 0.7}, [17, 400, 9000]),
        ({"min_p": 0.5}, [17, 400, 9000, 15_000]),
    ):
        p = SamplingParams(**base, **given)
        weight = np.exp([float(scores[0, t]) for t in kept])
        edges = np.concatenate(([0.0], np.cumsum(weight) / weight.sum()))
        for token, low, high in zip(kept, edges, edges[1:], strict=False):
            inside = [low + 1e-9, high - 1e-9]
            assert device_tokens(scores.expand(2, -1), [p] * 2, inside, device) == [token] * 2, (given, token)
    assert device_tokens(scores, [SamplingParams(temperature=0.0)], [0.5], device) == [17]
    scores[0, 19_000] = 3.0  # one above the equals: two of them are left for top_k=3
    ends = [0.001, 0.3, 0.45]
    assert device_tokens(scores.expand(3, -1), [SamplingParams(top_k=3)] * 3, ends, device) == [17, 400, 19_000]


def test_rows_that_cannot_be_sampled(device: str):
    scores = torch.randn(4, VOCAB)
    scores[0, 5], scores[1, 19_999], scores[2] = float("nan"), float("inf"), float("-inf")
    for p in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9), SamplingParams()):
        found = device_tokens(scores, [p] * 4, [0.1] * 4, device)
        assert found[:3] == [BROKEN] * 3 and 0 <= found[3] < VOCAB
    tokens = torch.empty(4, dtype=torch.int64, device=device)
    scores[3, [7, 19_000]] = 99.0
    greedy(scores.to(device), tokens)
    assert tokens.tolist() == [BROKEN] * 3 + [7]


def test_masked_tokens_are_never_drawn(device: str):
    scores = torch.full((3, VOCAB), float("-inf"))
    scores[:, [3, 8500]] = torch.tensor([0.0, 1.0])
    params = [SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.99)]
    for u in (0.0, 0.2, 0.5, 1 - 2**-53):
        assert device_tokens(scores, params, [u] * 3, device) == [3 if u < 0.2689 else 8500] * 3


def test_rules(device: str):
    g = torch.Generator().manual_seed(9)
    logits = torch.randn(3, VOCAB, generator=g) * 3
    prompt, output = [[1, 2, 3], [50], []], [[3, 3, 7], [9000] * 4, []]
    params = [
        SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias={3: 2.0, 19: -9.0}),
        SamplingParams(frequency_penalty=1.0, min_tokens=5),
        SamplingParams(logit_bias={0: 5.0}),
    ]  # fmt: skip
    seen, counts = torch.zeros(3, VOCAB, dtype=torch.bool), torch.zeros(3, VOCAB, dtype=torch.int32)
    for i in range(3):
        seen[i, prompt[i] + output[i]] = True
        for token in output[i]:
            counts[i, token] += 1
    allowed = torch.rand(3, VOCAB, generator=g) > 0.3
    stops = [7, 11]
    want = np.empty((3, VOCAB))
    from quire.runner.rules import Choice, History, rules_for

    for i, p in enumerate(params):
        want[i] = logits[i].numpy()
        choice = Choice(want[i], p, 3, np.array(stops), History(prompt[i], output[i]))
        for rule in rules_for(p):
            rule.apply(choice)
    on = lambda *t: tuple(x.to(device) for x in t)  # noqa: E731
    ints = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    scores = torch.full((3, VOCAB), float("nan"), device=device)
    alive = torch.full((3, pieces(VOCAB)), -1, dtype=torch.int32, device=device)
    before = logits.clone()
    # The rows are some of many, their histories lie apart, and one row has no mask: it may have every token.
    many = torch.full((6, VOCAB), float("nan"))
    many[[5, 0, 3]] = logits
    whose = [4, 2, 6]
    bits = np.packbits(allowed[:2].numpy(), axis=1, bitorder="little").view(np.int32)
    for i in (0, 1):
        want[i][~allowed[i].numpy()] = -np.inf
    all_seen, all_counts = (torch.zeros(7, VOCAB, dtype=t.dtype) for t in (seen, counts))
    all_seen[whose], all_counts[whose] = seen, counts
    apply_rules(
        many.to(device), scores, alive, table(params, [0.0] * 3).to(device), rows=ints(5, 0, 3).to(device),
        bias=on(ints(0, 0, 2), ints(3, 19, 0), torch.tensor([2.0, -9.0, 5.0], dtype=torch.float64)),
        history=ints(*whose).to(device), seen=all_seen.to(device), counts=all_counts.to(device),
        mask=ints(0, 1, -1).to(device), allowed=torch.from_numpy(bits.copy()).to(device),
        stops=on(ints(1, 1), ints(*stops)),
    )  # fmt: skip
    assert (alive == 1).all()
    np.testing.assert_allclose(scores.cpu().numpy(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


def test_a_broken_logit_stays_visible_behind_a_mask(device: str):
    logits = torch.zeros(1, 100, device=device)
    logits[0, 5] = float("nan")
    scores = torch.empty(1, 100, device=device)
    none = torch.zeros(1, 4, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    five = torch.full((1,), 5, dtype=torch.int32, device=device)
    alive = torch.empty(1, 1, dtype=torch.int32, device=device)
    apply_rules(
        logits, scores, alive, table([SamplingParams()], [0.0]).to(device), mask=zero, allowed=none, stops=(zero, five)
    )
    assert scores[0, 5] == float("inf") and (scores[0, :5] == float("-inf")).all()


@pytest.mark.parametrize("start", [0.0, float("-inf")])
def test_whose_fault_it_is_that_no_token_is_left(start: float, device: str):
    logits = torch.full((1, VOCAB), start, device=device)
    scores, alive = torch.empty_like(logits), torch.empty(1, pieces(VOCAB), dtype=torch.int32, device=device)
    none = torch.zeros(1, VOCAB // 32, dtype=torch.int32, device=device)
    params = table([SamplingParams()], [0.5]).to(device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    apply_rules(logits, scores, alive, params, mask=flag, allowed=none)
    tokens = torch.empty(1, dtype=torch.int32, device=device)
    choose(scores, params, flag, tokens, candidates.scratch(1, VOCAB, device), alive=alive)
    assert tokens.tolist() == [RULED_OUT if start == 0.0 else BROKEN]


@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0])
def test_logprobs_ranks_and_alternatives(spread: float, device: str):
    g = torch.Generator().manual_seed(11)
    logits = torch.randn(4, VOCAB, generator=g) * spread
    logits[1, 100:110] = 20.0  # equals
    tokens = torch.tensor([0, 105, 19_999, 12_345], dtype=torch.int32)
    for top in (0, 7):
        out = torch.full((4, 2 + 2 * top), float("nan"), dtype=torch.float64, device=device)
        found = candidates.scratch(4, VOCAB, device)
        logprobs(logits.to(device), tokens.to(device), top, out, found, wanted(top, device))
        sampler = Sampler(VOCAB)
        for i, row in enumerate(out.cpu().tolist()):
            want = sampler.logprob(logits[i].numpy(), int(tokens[i]), top)
            assert row[0] == pytest.approx(want.logprob, abs=1e-5) and row[1] == want.rank
            assert row[2 : 2 + top] == [t for t, _ in want.top]
            assert row[2 + top :] == pytest.approx([p for _, p in want.top], abs=1e-5)


def test_the_same_random_numbers_as_the_host(device: str):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789]
    positions = [0, 1, 2, 1000, 2**31 - 1, 7]
    draws = torch.empty(6, dtype=torch.float64, device=device)
    uniforms(torch.tensor(seeds, device=device), torch.tensor(positions, dtype=torch.int32, device=device), draws)
    assert draws.tolist() == [uniform(s, p) for s, p in zip(seeds, positions, strict=True)]
