"""The compiled sampler against the rules in numpy, bit for bit: every kernel set, any threads, any mix of rows in one call."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from quire.backends.native import extension
from quire.backends.native.backend import NativeBackend
from quire.runner.params import SamplingParams
from quire.runner.random import draw53
from quire.runner.sampler import Chosen, Sampler, Stream
from tests.unit.runner.naive_sampling import distribution

SIZES = (1, 2, 3, 63, 64, 65, 1003, 4097, 40_961)


def _params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Anything a request may ask, the common and the odd."""

    def pick(*values):
        return values[rng.integers(len(values))]

    p = SamplingParams(
        temperature=pick(0.0, 1.0, 1.0, 0.7, 0.8, 2.5, 100.0, 1e-3, 5e-324),
        top_k=pick(0, 0, 0, 1, 2, 40, 300, vocab - 1, vocab, vocab + 5, 2**31 - 1),
        top_p=pick(1.0, 1.0, 0.9, 0.95, 0.3, 1e-9, 0.9999),
        min_p=pick(0.0, 0.0, 0.0, 0.05, 0.5, 1.0, 1e-4, 1e-30),
        typical_p=pick(1.0, 1.0, 1.0, 1.0, 0.2, 0.9),
        repetition_penalty=pick(1.0, 1.0, 1.1, 0.7, 100.0),
        frequency_penalty=pick(0.0, 0.0, 0.4, -2.0),
        presence_penalty=pick(0.0, 0.0, 0.6, -2.0),
        logit_bias={int(t): float(rng.normal() * 4) for t in rng.integers(0, vocab, pick(0, 0, 3))},
        min_tokens=pick(0, 0, 0, 5),
        logprobs=pick(None, None, 0, 5, 20),
    )
    return p.validate(vocab)


def _logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Rows of every shape: peaked, flat, full of equals, mostly ruled out, large."""
    made = (rng.standard_normal((rows, vocab)) * rng.choice([0.0, 0.01, 1.0, 3.0, 8.0], (rows, 1))).astype(np.float32)
    for row in made:
        match rng.integers(8):
            case 0:
                row[:] = np.round(row)
            case 1:
                row[rng.random(vocab) < 0.9] = -np.inf
                row[rng.integers(vocab)] = 2.0
            case 2:
                row *= np.float32(1e30)
            case 3:
                row[rng.integers(0, vocab, 3)] = row.max()
            case 4:
                row[:] = np.abs(row) * rng.choice([0.0, -0.0], vocab)  # zeros of both signs are equal
    return made


@dataclasses.dataclass
class Asked:
    """One call: what both samplers are given."""

    logits: np.ndarray
    params: list[SamplingParams]
    context: list[dict]
    positions: list[int]
    drafts: list[list[int]]
    masks: dict[int, np.ndarray]

    def streams(self, vocab: int) -> list[Stream]:
        return [
            Stream(p, 7 * i - 3, vocab, **c) for i, (p, c) in enumerate(zip(self.params, self.context, strict=True))
        ]

    def ask(self, sampler: Sampler, vocab: int) -> tuple[list[Chosen], list[list[int]]]:
        streams = self.streams(vocab)
        told = sampler.sample(self.logits, streams, self.positions, drafts=self.drafts, masks=self.masks)
        return told, [[] if s.history is None else s.history.ids.tolist() for s in streams]


def _asked(rng: np.random.Generator, rows: int, vocab: int) -> Asked:
    drafts: list[list[int]] = [[] for _ in range(rows)]
    for own in drafts:
        if rng.random() < 0.3:
            own += rng.integers(0, vocab, rng.integers(1, 4)).tolist()
    total = rows + sum(map(len, drafts))
    logits = _logits(rng, total, vocab)
    first = 0
    for own in drafts:  # the best token is a guess that is often right
        own[:] = [int(logits[first + j].argmax()) if rng.random() < 0.7 else t for j, t in enumerate(own)]
        first += 1 + len(own)
    context = [
        {
            "prompt": rng.integers(0, vocab, rng.integers(1, 30)).tolist(),
            "output": rng.integers(0, vocab, rng.integers(0, 9)).tolist(),
            "stop_ids": rng.integers(0, vocab, rng.integers(0, 4)).tolist(),
        }
        for _ in range(rows)
    ]
    masks = {}
    for i in range(rows):
        if rng.random() < 0.2:
            masks[i] = rng.random((1 + len(drafts[i]), vocab)) < rng.choice([0.02, 0.5, 0.99])
    return Asked(
        logits=logits,
        params=[_params(rng, vocab) for _ in range(rows)],
        context=context,
        positions=[len(c["output"]) for c in context],
        drafts=drafts,
        masks=masks,
    )


@pytest.mark.parametrize("vocab", SIZES)
def test_the_same_bits_as_the_rules(vocab: int):
    """Tokens, log probabilities, ranks, alternatives, errors and histories, rows of every kind in one call."""
    rng = np.random.default_rng(vocab)
    native = NativeBackend(threads=2)
    rules, compiled = Sampler(vocab), Sampler(vocab, native.host_sampler(vocab))
    drawn = 0
    for _ in range(40 if vocab < 5000 else 6):
        asked = _asked(rng, 12, vocab)
        before = asked.logits.copy()
        want, got = asked.ask(rules, vocab), asked.ask(compiled, vocab)
        for i, (a, b) in enumerate(zip(want[0], got[0], strict=True)):
            assert a == b, asked.params[i]
        assert want[1] == got[1]
        assert np.array_equal(asked.logits, before)
        drawn += sum(len(c.tokens) for c in want[0])
    assert drawn > 40


@pytest.mark.parametrize("isa", extension().available())
def test_every_kernel_set_and_any_threads_draw_alike(isa: str):
    vocab, rng = 33_001, np.random.default_rng(5)
    asked = _asked(rng, 16, vocab)
    told = []
    for threads in (1, 3):
        sampler = Sampler(vocab, NativeBackend(threads, isa).host_sampler(vocab))
        told.append(asked.ask(sampler, vocab))
    reference = asked.ask(Sampler(vocab, NativeBackend(1, "scalar").host_sampler(vocab)), vocab)
    assert told == [reference, reference]


def test_draws_follow_the_distribution():
    """Chi-square over what survives, for each way a token can be found: no filter, a short list, a long one."""
    vocab, n = 3000, 6000
    row = np.random.default_rng(0).standard_normal(vocab).astype(np.float32)
    row[[5, 700, 2999]] = 5.0, 6.0, 5.5
    sampler = Sampler(vocab, NativeBackend(2).host_sampler(vocab))
    for params in (
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=0.8, top_p=0.5),
        SamplingParams(temperature=1.5, top_p=0.9),
        SamplingParams(temperature=0.8, top_k=30, min_p=0.01, repetition_penalty=1.3),
    ):
        context = {"prompt": [700, 1, 2]} if params.repetition_penalty != 1.0 else {}
        p = distribution(row, params, **context)
        stream = Stream(params, 11, vocab, **context)
        count = dict.fromkeys(p, 0)
        for at in range(0, n, 100):
            streams = [Stream(params, 11 + at + i, vocab, **context) for i in range(100)]
            for one in sampler.sample(np.repeat(row[None], 100, axis=0), streams, [0] * 100):
                count[one.tokens[0]] += 1  # a KeyError: a token that cannot be
        big = {t for t in p if n * p[t] >= 5}
        rest = 1.0 - sum(p[t] for t in big)
        terms = [(count[t] - n * p[t]) ** 2 / (n * p[t]) for t in big]
        if n * rest >= 5:
            terms.append((sum(c for t, c in count.items() if t not in big) - n * rest) ** 2 / (n * rest))
        degrees = len(terms) - 1
        assert degrees > 3 and abs(sum(terms) - degrees) < 5 * (2 * degrees) ** 0.5, (params, stream.params)


def test_a_draw_lands_on_the_token_whose_share_it_is():
    """Two tokens of known shares: which one comes is decided by the number that was drawn, at every position."""
    row = np.full(200, -np.inf, np.float32)
    row[70], row[150] = 0.0, np.log(3.0)
    sampler = Sampler(200, NativeBackend(1).host_sampler(200))
    for position in range(64):
        (one,) = sampler.sample(row[None], [Stream(SamplingParams(), 5, 200)], [position])
        assert one.tokens == [70 if draw53(5, position) < 2**53 // 4 else 150]


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 63, 64, 199])
def test_what_is_no_number_is_seen_wherever_it_is(bad: float, at: int):
    rows = np.zeros((2, 200), np.float32)
    rows[1, at] = bad
    mask = np.zeros(200, np.bool_)
    mask[100] = True  # hidden behind it, too
    sampler = Sampler(200, NativeBackend(2).host_sampler(200))
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=3, logprobs=1)):
        for masks in (None, {1: mask}):
            fine, broken = sampler.sample(rows, [Stream(params, 0, 200)] * 2, [0, 0], masks=masks)
            assert fine.error is None and len(fine.tokens) == 1
            assert broken.tokens == [] and "NaN or infinite logits (1 " in (broken.error or "")


def test_what_crosses_the_border_is_checked():
    sampler = NativeBackend(1).host_sampler(10)
    own = sampler.params(1.0, 0, 1.0, 1.0, 0.0, 1.1, 0.0, 0.0, 0, 0, -1, [], [])
    logits = np.zeros((1, 10), np.float32)
    ids, counts, mask = np.array([3, 9]), np.array([1.0, 0.0]), np.ones((1, 10), np.bool_)
    assert 0 <= sampler.choose(logits, [own], [0], [], [(0, ids, counts)], [(0, mask)])[0][0][0] < 10
    for wrong in (
        (logits[:, :9], [own], [0], [], [], []),
        (np.zeros((10, 2), np.float32).T[:1], [own], [0], [], [], []),
        (logits, [own, own], [0, 0], [], [], []),
        (logits, [own], [], [], [], []),
        (logits, [own], [0], [[1]], [], []),
        (logits, [own], [0], [], [(0, np.array([10]), np.array([1.0]))], []),
        (logits, [own], [0], [], [(0, np.array([-1]), np.array([1.0]))], []),
        (logits, [own], [0], [], [(1, ids, counts)], []),
        (logits, [own], [0], [], [(0, ids, counts[:1])], []),
        (logits, [own], [0], [], [], [(0, mask[:, :9])]),
        (logits, [own], [0], [], [], [(2, mask)]),
        (
            logits,
            [NativeBackend(1).host_sampler(11).params(1.0, 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, -1, [], [])],
            [0],
            [],
            [],
            [],
        ),
    ):
        with pytest.raises(ValueError):
            sampler.choose(*wrong)
    with pytest.raises(TypeError):
        sampler.choose(logits.astype(np.float64), [own], [0], [], [], [])
    for bias, stops in (([(10, 1.0)], []), ([], [-1])):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            sampler.params(1.0, 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 0, -1, bias, stops)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.logprobs(logits, [10], 0)
