"""The whole device sampler over Triton kernels, fed as the runner feeds it, against the host's sampler, row by row."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from quire.backends.cuda.sampler import CudaSampler
from quire.backends.torch.sampler import BROKEN, RULED_OUT
from quire.runner.device.slot_sampling import SlotSampling
from quire.runner.params import SamplingParams
from quire.runner.sampler import Chosen, Sampler, Stream

VOCAB = 8200  # two chunks, the second all but empty
STOPS = [30, 31, 8199]


def random_params(rng: random.Random) -> SamplingParams:
    def maybe(usual: float, *others: float) -> Any:
        return rng.choice(others) if rng.random() < 0.4 else usual

    return SamplingParams(
        temperature=rng.choice([0.0, 0.2, 0.7, 1.0, 1.6, 20.0]),
        top_k=int(maybe(0, 1, 2, 40, 5000, VOCAB, VOCAB + 7)),
        top_p=maybe(1.0, 1e-5, 0.3, 0.9, 0.999),
        min_p=maybe(0.0, 1e-5, 0.05, 1.0),
        typical_p=rng.choice([0.2, 0.9]) if rng.random() < 0.15 else 1.0,
        repetition_penalty=maybe(1.0, 0.7, 1.3),
        frequency_penalty=maybe(0.0, -0.5, 1.1),
        presence_penalty=maybe(0.0, 0.8),
        logit_bias={rng.randrange(VOCAB): rng.uniform(-9, 9) for _ in range(5)} if rng.random() < 0.3 else {},
        min_tokens=rng.choice([0, 0, 9]),
        seed=rng.randrange(2**63),
        logprobs=rng.choice([None, 0, 5]),
    )


def random_logits(rng: np.random.Generator, rows: int) -> np.ndarray:
    logits = rng.standard_normal((rows, VOCAB)) * rng.choice([0.3, 2.0, 6.0], (rows, 1))
    rounded = rng.random(rows) < 0.3
    logits[rounded] = np.round(logits[rounded] * 2) / 2  # equals everywhere
    logits[rng.random(rows) < 0.1, 100:] = -np.inf
    return logits.astype(np.float32)


def both(
    logits: np.ndarray, params: list[SamplingParams], masks: dict[int, np.ndarray], device: str
) -> tuple[list[int], list[Chosen]]:
    """Tokens of the device and answers of the host, for the same rows at once."""
    rows = len(params)
    context: dict[str, Any] = {"prompt": [3, 4, 900], "output": [8, 8, 8, 30, 8199], "stop_ids": STOPS}
    streams = [Stream(p, p.seed or 0, VOCAB, **context) for p in params]
    place, sampler = torch.device(device), CudaSampler(torch.device(device))
    own = SlotSampling(rows, VOCAB, place)
    for i, stream in enumerate(streams):
        own.open(i, stream)
    sampling = own.gather(np.arange(rows), np.full(rows, 5), masks)
    on = torch.from_numpy(logits).to(place)
    tokens = sampler.greedy(on)
    if sampling is not None:
        found = own.metadata(sampling, [torch.from_numpy(a.copy()).to(place) for a in sampling.arrays()])
        tokens[sampling.rows] = sampler.choose(on, found)
    return tokens.tolist(), Sampler(VOCAB).sample(logits, streams, [5] * rows, masks=masks)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.large)])
def test_random_rows_get_the_hosts_tokens(seed: int, device: str):
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    rows = 16
    logits = random_logits(draws, rows)
    params = [random_params(rng) for _ in range(rows)]
    masks = {i: draws.random(VOCAB) < rng.choice([0.001, 0.5]) for i in range(rows) if rng.random() < 0.25}
    have, host = both(logits, params, masks, device)
    for i, (token, chosen) in enumerate(zip(have, host, strict=True)):
        if chosen.error is not None:
            assert token == (RULED_OUT if "ruled out" in chosen.error else BROKEN), i
        else:
            assert token == chosen.tokens[0], (i, params[i])
    some = [i for i, p in enumerate(params) if p.logprobs is not None and host[i].error is None]
    on, at = torch.from_numpy(logits[some]).to(device), torch.tensor([have[i] for i in some], device=device)
    for i, row in zip(some, CudaSampler(torch.device(device)).logprobs(on, at, 5).tolist(), strict=True):
        want, top = host[i].logprobs[0], params[i].logprobs or 0
        assert row[0] == pytest.approx(want.logprob, abs=1e-5) and row[1] == want.rank
        kept = [(int(t), p) for t, p in zip(row[2 : 2 + top], row[7 : 7 + top], strict=True) if p > -math.inf]
        assert [t for t, _ in kept] == [t for t, _ in want.top]
        assert [p for _, p in kept] == pytest.approx([p for _, p in want.top], abs=1e-5)


@pytest.mark.parametrize(
    "p",
    [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=5), SamplingParams(typical_p=0.5)],
    ids=["greedy", "drawn", "top_k", "typical"],
)
@pytest.mark.parametrize("min_tokens", [0, 9])
def test_codes_for_what_cannot_be_sampled(p: SamplingParams, min_tokens: int, device: str):
    from msgspec.structs import replace

    logits = np.random.default_rng(1).standard_normal((5, VOCAB)).astype(np.float32)
    logits[1, 31], logits[2, 9], logits[3], logits[4] = np.nan, np.inf, -np.inf, -np.inf
    logits[4, 8199] = 1.0  # its only token is a stop id
    have, host = both(logits, [replace(p, min_tokens=min_tokens)] * 5, {}, device)
    assert have[1:4] == [BROKEN] * 3 and [t < 0 for t in have] == [c.error is not None for c in host]
    assert have[4] == (RULED_OUT if min_tokens else 8199)


def test_a_row_does_not_depend_on_its_batch(device: str):
    """Bits: alone, in another place, beside rows that want other things."""
    rng = random.Random(3)
    logits = random_logits(np.random.default_rng(3), 12)
    params = [random_params(rng) for _ in range(12)]
    together, _ = both(logits, params, {}, device)
    for i in (0, 5, 11):
        assert both(logits[i : i + 1], [params[i]], {}, device)[0] == together[i : i + 1]
    sampler = CudaSampler(torch.device(device))
    on, at = torch.from_numpy(logits).to(device), torch.arange(12, device=device)
    for top in (0, 5):
        whole, alone = sampler.logprobs(on, at, top), sampler.logprobs(on[7:8], at[7:8], 0)
        assert torch.equal(whole[7, :2], alone[0])


def test_the_warm_up_reaches_every_kernel(device: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever a request asks for later was launched once before, in every kind there is."""
    from quire.backends.cuda.kernels import candidates, logprobs, rules, sample

    launched: set[str] = set()

    class Watched:
        def __init__(self, name: str, kernel: Any):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                kinds = [str(a.dtype) if isinstance(a, torch.Tensor) else type(a).__name__ for a in args]
                launched.add(f"{self.name} {kinds} {options}")
                self.kernel[grid](*args, **options)

            return launch

    for module, names in (
        (candidates, ("_peaks", "_bins", "_compact")),
        (rules, ("_adjust", "_scatter")),
        (sample, ("_choose", "_greedy")),
        (logprobs, ("_ranks", "_finish")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Watched(name, getattr(module, name)))
    sampler = CudaSampler(torch.device(device))
    sampler.warm_up(torch.randn(3, VOCAB, device=device))
    known = set(launched)
    assert {name.split()[0] for name in known} == {
        "_peaks", "_bins", "_compact", "_adjust", "_scatter", "_choose", "_greedy", "_ranks", "_finish"
    }  # fmt: skip
    rng = random.Random(5)
    params = [random_params(rng) for _ in range(10)]
    masks = {3: np.ones(VOCAB, np.bool_)}
    both(random_logits(np.random.default_rng(5), 10), params, masks, device)
    both(random_logits(np.random.default_rng(5), 2), [SamplingParams(temperature=0.0), SamplingParams()], {}, device)
    sampler.logprobs(torch.randn(2, VOCAB, device=device), torch.zeros(2, dtype=torch.int64, device=device), 20)
    assert launched == known
