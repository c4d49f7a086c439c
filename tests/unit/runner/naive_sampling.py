"""Sampling written down as plainly as possible: full sorts, Python loops, numpy's own Philox. The sampler's oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quire.runner.params import SamplingParams


def uniform(seed: int, position: int) -> float:
    """numpy counts up before it draws, so the counter starts one below."""
    counter = (position - 1) % 2**256
    words = [(counter >> (64 * i)) & (2**64 - 1) for i in range(4)]
    key = np.array([seed % 2**64, 0], np.uint64)
    generator = np.random.Philox(key=key, counter=np.array(words, np.uint64))
    return int(generator.random_raw(1)[0] >> np.uint64(11)) * 2.0**-53


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    allowed: Sequence[int] | None = None,
) -> dict[int, float]:
    """Token -> probability of what may be sampled (temperature 0: the one token)."""
    score = {t: float(x) for t, x in enumerate(logits)}
    for t, value in params.logit_bias.items():
        score[t] += value
    for t in set(prompt) | set(output):
        score[t] = score[t] / params.repetition_penalty if score[t] > 0 else score[t] * params.repetition_penalty
    for t in set(output):
        score[t] -= params.frequency_penalty * output.count(t) + params.presence_penalty
    if len(output) < params.min_tokens:
        for t in stop_ids:
            score.pop(t, None)
    if allowed is not None:
        score = {t: x for t, x in score.items() if t in allowed}
    score = {t: x for t, x in score.items() if x > -math.inf}
    if params.temperature == 0:
        top = max(score.values())
        return {min(t for t, x in score.items() if x == top): 1.0}
    peak = max(score.values())
    score = {t: (x - peak) / params.temperature for t, x in score.items()}

    def normal() -> dict[int, float]:
        total = math.fsum(math.exp(x) for x in score.values())
        return {t: math.exp(x) / total for t, x in score.items()}

    def first(order: list[int], p: dict[int, float], mass: float) -> list[int]:
        held, kept = 0.0, []
        for t in order:
            kept.append(t)
            held += p[t]
            if held >= mass:
                break
        return kept

    if params.top_k:
        order = sorted(score, key=lambda t: (-score[t], t))
        score = {t: score[t] for t in order[: params.top_k]}
    if params.typical_p < 1:
        p = {t: x for t, x in normal().items() if x > 0}
        entropy = math.fsum(-x * math.log(x) for x in p.values())
        order = sorted(p, key=lambda t: (abs(-math.log(p[t]) - entropy), t))
        score = {t: score[t] for t in first(order, p, params.typical_p)}
    if params.top_p < 1:
        p = normal()
        order = sorted(p, key=lambda t: (-p[t], t))
        score = {t: score[t] for t in first(order, p, params.top_p)}
    if params.min_p:
        p = normal()
        best = max(p.values())
        score = {t: score[t] for t in p if p[t] >= params.min_p * best}
    p = normal()
    return {t: p[t] for t in sorted(p)}


def pick(p: dict[int, float], u: float) -> int:
    """Inverse CDF in the order of token ids."""
    held, token = 0.0, -1
    for t in sorted(p):
        if p[t] > 0:
            token = t
            held += p[t]
            if held > u:
                break
    return token


def sample(logits: np.ndarray, params: SamplingParams, seed: int, **context: list[int]) -> int:
    """The token that comes after `output`."""
    return pick(distribution(logits, params, **context), uniform(seed, len(context.get("output", []))))


def logprobs(logits: np.ndarray) -> list[float]:
    """log-softmax."""
    xs = [float(x) for x in logits]
    peak = max(xs)
    total = peak + math.log(math.fsum(math.exp(x - peak) for x in xs))
    return [x - total for x in xs]
