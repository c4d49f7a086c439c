"""The sampler: greedy, draws, log probabilities, errors, drafts, and that batch mates change nothing. Both ways to compute it."""

import math

import numpy as np
import pytest

from quire.backends.native.backend import NativeBackend
from quire.runner import sampler as host
from quire.runner.params import SamplingParams
from quire.runner.sampler import Stream
from tests.unit.runner.naive_sampling import distribution, logprobs, sample

V = 1003  # odd, so that rows of a batch are not aligned alike


@pytest.fixture(params=["rules", "compiled"], autouse=True)
def kind(request: pytest.FixtureRequest, backend: NativeBackend):
    """Every test twice: rule by rule in numpy, and in C++."""
    _made["native"] = backend if request.param == "compiled" else None


@pytest.fixture(scope="module")
def backend() -> NativeBackend:
    return NativeBackend(threads=2)


_made: dict[str, NativeBackend | None] = {}


def Sampler(vocab_size: int) -> host.Sampler:
    backend = _made["native"]
    return host.Sampler(vocab_size, backend and backend.host_sampler(vocab_size))


def _logits(rows: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, V)) * spread).astype(np.float32)


def _one(logits: np.ndarray, params: SamplingParams, seed: int = 0, position: int = 0, **context):
    return Sampler(logits.size).sample(logits[None], [Stream(params, seed, logits.size, **context)], [position])[0]


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_is_argmax_with_ties_to_the_smallest_id():
    logits = _logits(5)
    logits[2, [900, 30, 31]] = 50.0
    logits[3] = 0.0
    chosen = Sampler(V).sample(logits, [Stream(GREEDY, i, V) for i in range(5)], [0] * 5)
    assert [c.tokens for c in chosen] == [[int(r.argmax())] for r in logits]
    assert chosen[2].tokens == [30] and chosen[3].tokens == [0]
    # The slow path, taken because of a rule that changes nothing here, agrees.
    busy = SamplingParams(temperature=0.0, logit_bias={5: -1e-30})
    again = Sampler(V).sample(logits, [Stream(busy, i, V) for i in range(5)], [0] * 5)
    assert [c.tokens for c in again] == [c.tokens for c in chosen]


def test_top_k_one_is_greedy():
    logits = np.round(_logits(20))
    for row in logits:
        assert _one(row, SamplingParams(temperature=7.0, top_k=1), seed=3).tokens == _one(row, GREEDY).tokens


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.95),
        SamplingParams(temperature=2.0, top_p=0.9),
        SamplingParams(temperature=1.5, typical_p=0.7, min_p=0.01),
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.5, min_tokens=4),
        SamplingParams(temperature=0.0, repetition_penalty=1.4, min_tokens=2),
    ],
    ids=str,
)
def test_a_whole_generation_agrees_with_the_naive_sampler(params: SamplingParams):
    logits = _logits(25, seed=8)
    prompt, stops = [1, 5, 5], [int(logits[0].argmax()), int(logits[1].argmax())]
    sampler = Sampler(V)
    for seed in (0, 99, -5):
        stream = Stream(params, seed, V, prompt=prompt, stop_ids=stops)
        output: list[int] = []
        for position, row in enumerate(logits):
            want = sample(row, params, seed, prompt=prompt, output=output, stop_ids=stops)
            output += sampler.sample(row[None], [stream], [position])[0].tokens
            assert output[-1] == want


def test_draws_follow_the_distribution():
    """Chi-square of 8,000 draws with fixed seeds, over every token that survives."""
    row = _logits(1, spread=1.0)[0][:40]
    params = SamplingParams(temperature=1.2, top_k=25, min_p=0.02)
    p = distribution(row, params)
    sampler, count = Sampler(40), dict.fromkeys(p, 0)
    stream, n = Stream(params, 2024, 40), 8000
    for position in range(n):
        count[sampler.sample(row[None], [stream], [position])[0].tokens[0]] += 1
    statistic = sum((count[t] - n * p[t]) ** 2 / (n * p[t]) for t in p)
    degrees = len(p) - 1
    assert degrees > 15
    assert abs(statistic - degrees) < 4 * math.sqrt(2 * degrees)


def test_batch_mates_change_nothing():
    """Bitwise, logprobs included: alone, and at every place in a batch of others."""
    logits = _logits(9, seed=4)
    all_params = [
        GREEDY,
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.95, logprobs=20),
        SamplingParams(temperature=9.0, top_p=0.99, logprobs=0),
        SamplingParams(typical_p=0.9, logprobs=5),
        SamplingParams(repetition_penalty=1.1, logprobs=1),
        SamplingParams(min_tokens=3, logprobs=2),
        SamplingParams(logit_bias={5: 3.0}),
        SamplingParams(temperature=0.3),
    ]
    alone = [_one(row, p, seed=i, position=i) for i, (row, p) in enumerate(zip(logits, all_params, strict=True))]
    for turn in range(9):
        order = [(i + turn) % 9 for i in range(9)]
        streams = [Stream(all_params[i], i, V) for i in order]
        assert Sampler(V).sample(logits[order], streams, order) == [alone[i] for i in order]


def test_logprobs_are_of_the_raw_logits():
    logits = _logits(4, seed=6)
    logits[1, :50] = logits[1].max()  # many equals at the top
    logits[2, 100:] = -1e30
    params = SamplingParams(temperature=0.2, top_k=2, logit_bias={9: 50.0}, logprobs=20)
    for row in logits:
        chosen = _one(row, params)
        want = logprobs(row)
        (logprob,) = chosen.logprobs
        assert logprob.token == chosen.tokens[0] == 9
        assert logprob.logprob == pytest.approx(want[9], abs=1e-12)
        order = sorted(range(V), key=lambda t: (-row[t], t))
        assert [t for t, _ in logprob.top] == order[:20]
        assert [x for _, x in logprob.top] == pytest.approx([want[t] for t in order[:20]], abs=1e-12)
        assert logprob.rank == order.index(9) + 1
    assert _one(logits[0], SamplingParams(logprobs=0)).logprobs[0].top == []
    assert _one(logits[0], SamplingParams()).logprobs == []


def test_logprobs_of_large_logits_do_not_overflow():
    row = np.array([3e38, 2.9e38, -3e38], np.float32)
    (logprob,) = Sampler(3).logprobs(row[None], [0], 3)
    assert logprob.logprob == 0.0 and logprob.rank == 1
    assert [t for t, _ in logprob.top] == [0, 1, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_fail_one_row_alone(bad: float):
    logits = _logits(3)
    fine = [int(logits[0].argmax()), int(logits[2].argmax())]
    logits[1, 500] = bad
    for params in (GREEDY, SamplingParams(top_k=1), SamplingParams(temperature=0.0, logprobs=1)):
        chosen = Sampler(V).sample(logits, [Stream(params, 0, V) for _ in range(3)], [0] * 3)
        assert chosen[1].tokens == [] and "the model produced NaN or infinite logits (1 " in (chosen[1].error or "")
        assert [chosen[0].tokens[0], chosen[2].tokens[0]] == fine
        assert chosen[0].error is None and chosen[2].error is None
    with pytest.raises(ValueError, match="the model produced"):
        Sampler(V).logprobs(logits, [0, 0, 0], 1)


def test_nothing_left_is_an_error_not_a_guess():
    row = np.full(4, -np.inf, np.float32)
    assert _one(row, GREEDY).error is not None
    row[2] = 1.0
    assert _one(row, GREEDY).tokens == [2]
    for temperature, top_k in ((0.0, 0), (0.5, 0), (1.0, 0), (1.0, 3)):
        chosen = _one(row, SamplingParams(temperature=temperature, top_k=top_k, min_tokens=1), stop_ids=[2])
        assert chosen.tokens == [] and "every token is ruled out" in (chosen.error or "")
        assert _one(row, SamplingParams(temperature=temperature, min_tokens=1), stop_ids=[1]).tokens == [2]


def test_bias_of_100_decides():
    row = _logits(1)[0]
    assert _one(row, SamplingParams(logit_bias={700: 100.0})).tokens == [700]
    best = int(row.argmax())
    assert _one(row, SamplingParams(temperature=0.0, logit_bias={best: -100.0})).tokens == [int(np.argsort(-row)[1])]


def test_masks_by_place():
    logits = _logits(2)
    mask = np.zeros(V, np.bool_)
    mask[[7, 8]] = True
    chosen = Sampler(V).sample(logits, [Stream(GREEDY, 0, V)] * 2, [0, 0], masks={1: mask})
    assert chosen[0].tokens == [int(logits[0].argmax())]
    assert chosen[1].tokens == [7 if logits[1, 7] >= logits[1, 8] else 8]


@pytest.mark.parametrize("right", range(5))
def test_drafts_change_how_many_tokens_come_never_which(right: int):
    """Verification is sampling: the accepted drafts and one more are what plain sampling gives one by one."""
    params = SamplingParams(temperature=1.1, top_k=30, frequency_penalty=1.5, logprobs=2)
    logits = _logits(5, seed=3)
    plain_stream, plain = Stream(params, 5, V), []
    for j, row in enumerate(logits):
        plain.append(Sampler(V).sample(row[None], [plain_stream], [10 + j])[0])
    drafts = [c.tokens[0] for c in plain[:4]]
    if right < 4:
        drafts[right] = (drafts[right] + 1) % V
    other = _logits(1, seed=9)
    streams = [Stream(GREEDY, 0, V), Stream(params, 5, V)]
    first, second = Sampler(V).sample(np.concatenate((other, logits)), streams, [0, 10], drafts=[[], drafts])
    assert first.tokens == [int(other[0].argmax())]
    assert second.tokens == [c.tokens[0] for c in plain[: right + 1]]
    assert second.logprobs == [c.logprobs[0] for c in plain[: right + 1]]


def test_logits_are_not_changed_and_their_shape_is_checked():
    logits = _logits(2)
    before = logits.copy()
    params = SamplingParams(temperature=0.5, top_p=0.5, repetition_penalty=2.0, logit_bias={1: 9.0}, logprobs=5)
    Sampler(V).sample(logits, [Stream(params, 0, V, prompt=[1])] * 2, [0, 0])
    assert (logits == before).all()
    with pytest.raises(ValueError, match="expected"):
        Sampler(V).sample(logits[:1], [Stream(params, 0, V)] * 2, [0, 0])


def test_ids_outside_the_vocabulary_are_refused():
    for bad in (-1, V):
        with pytest.raises(ValueError, match="logit_bias"):
            Stream(SamplingParams(logit_bias={bad: 1.0}), 0, V)
        with pytest.raises(ValueError, match="stop_ids"):
            Stream(SamplingParams(), 0, V, stop_ids=[bad])
        with pytest.raises(ValueError, match="tokens"):
            Stream(SamplingParams(repetition_penalty=2.0), 0, V, prompt=[1, bad])
