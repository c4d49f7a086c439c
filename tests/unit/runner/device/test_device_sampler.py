"""The device's sampler against the host's, row by row, and its random numbers against the host's."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra")

from quire.backends.torch.sampler import BROKEN, RULED_OUT, TorchSampler  # noqa: E402
from quire.runner.device.slot_sampling import SlotSampling  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from quire.runner.random import uniform, uniforms  # noqa: E402
from quire.runner.sampler import Sampler, Stream  # noqa: E402

V = 1003
CPU = torch.device("cpu")


def test_uniforms_are_uniform_bit_for_bit():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 200, dtype=np.uint64)
    seeds[:3] = (0, 1, 2**64 - 1)
    positions = np.concatenate((np.arange(100), rng.integers(0, 2**40, 100))).astype(np.uint64)
    want = [uniform(int(s), int(p)) for s, p in zip(seeds, positions, strict=True)]
    assert uniforms(seeds, positions).tolist() == want


def _both(logits, params, *, seed=0, position=0, sampler=TorchSampler(), **context):
    """The token of the host's sampler and of the device's, for every row of logits alone and for all at once."""
    rows = len(logits)
    streams = [Stream(params, seed + i, V, **context) for i in range(rows)]
    own = SlotSampling(rows, V, CPU)
    for i, stream in enumerate(streams):
        own.open(i, stream)
    slots, positions = np.arange(rows), np.full(rows, position)
    sampling = own.gather(slots, positions)
    tensor = torch.from_numpy(logits)
    if sampling is None:
        tokens = sampler.greedy(tensor)
    else:
        sent = [torch.from_numpy(a.copy()) for a in sampling.arrays()]
        tokens = sampler.choose(tensor, own.metadata(sampling, sent))
    host = Sampler(V).sample(logits, streams, [position] * rows)
    return tokens.tolist(), host


CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=1.0),
    "hot": SamplingParams(temperature=9.0),
    "cold": SamplingParams(temperature=1e-4),
    "top_k": SamplingParams(top_k=40),
    "top_k1": SamplingParams(temperature=3.0, top_k=1),
    "top_k_all": SamplingParams(top_k=V + 5),
    "top_p": SamplingParams(top_p=0.9),
    "top_p_flat": SamplingParams(temperature=9.0, top_p=0.99),
    "min_p": SamplingParams(min_p=0.1),
    "typical": SamplingParams(typical_p=0.7),
    "all": SamplingParams(temperature=1.3, top_k=100, typical_p=0.95, top_p=0.9, min_p=0.02),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 30.0, 6: -30.0}),
    "penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=-0.6),
    "greedy-penalties": SamplingParams(temperature=0.0, repetition_penalty=2.0),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=4),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_as_on_the_host(name):
    rng = np.random.default_rng([ord(c) for c in name])
    logits = (rng.standard_normal((40, V)) * 2.0).astype(np.float32)
    logits[0, [900, 30, 31]] = logits[0].max()  # equals at the top
    logits[1] = 0.0  # all equal
    logits[2, 100:] = -np.inf
    logits[3] = np.round(logits[3])  # many equals everywhere
    logits[4, 7] = 60.0
    context = {"prompt": [3, 4, 4, 900], "output": [8, 8, 8, 30, 5], "stop_ids": [30, 31, 7]}
    got, want = _both(logits, CASES[name], seed=100, position=3, **context)
    assert got == [c.tokens[0] for c in want]
    few = TorchSampler(3 * V)  # a few rows at a time
    again, _ = _both(logits, CASES[name], seed=100, position=3, sampler=few, **context)
    assert again == got


def test_codes_for_what_cannot_be_sampled():
    logits = np.random.default_rng(1).standard_normal((5, V)).astype(np.float32)
    logits[1, 9], logits[2, 9], logits[3] = np.nan, np.inf, -np.inf
    logits[4] = -np.inf
    logits[4, 7] = 1.0
    stops = {"stop_ids": [7]}
    for params in (CASES["greedy"], SamplingParams(temperature=0.0, min_tokens=1), SamplingParams(min_tokens=1)):
        got, host = _both(logits, params, **stops)
        assert [t < 0 for t in got] == [c.error is not None for c in host]
        assert got[1] == got[2] == got[3] == BROKEN
        assert got[4] == (RULED_OUT if params.min_tokens else 7)


@pytest.mark.parametrize("top", [0, 1, 20])
def test_logprobs_are_the_hosts(top):
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((6, V)) * 3.0).astype(np.float32)
    logits[1, :50] = logits[1].max()
    logits[2, 100:] = -1e30
    logits[3] = np.abs(logits[3]) * rng.choice([0.0, -0.0], V)  # zeros of both signs are equal
    logits[4, 12:] = -np.inf
    tokens = np.array([3, 49, 99, 500, 4, 1002])
    rows = TorchSampler().logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), top).numpy()
    for row, token, got in zip(logits, tokens, rows, strict=True):
        want = Sampler(V).logprob(row, int(token), top)
        assert got[0] == pytest.approx(want.logprob, abs=1e-12) and int(got[1]) == want.rank
        ids, probs = got[2 : 2 + top].astype(int), got[2 + top :]
        kept = probs > -np.inf
        assert ids[kept].tolist() == [t for t, _ in want.top]
        assert probs[kept].tolist() == pytest.approx([x for _, x in want.top], abs=1e-12)
    logits[0, 3] = np.nan
    assert TorchSampler().logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), top)[0, 0].isnan()
