"""What the tests of layers of several kinds share on a GPU: an engine and traffic in log probabilities, and what must hold of them.

Float32 with float16 keys and values. Launches of another shape round differently, so a token may differ at a tie, and only at one.
Knows no GPU and no model: whoever imports it has looked for one and made the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.engine.engine import Engine
from quire.engine.types import Event, Request
from quire.runner.params import SamplingParams
from tests.gpu import kit

TIE = 0.1  # two tokens whose log probabilities are this near may change places


def engine(path: Path, **options: Any) -> Any:
    return kit.build(path, **({"context": 480} | options))[0]


def serve(running: Engine, requests: list[Request]) -> dict[str, list[Any]]:
    """The log probabilities of every request's tokens."""
    return kit.serve(running, requests, lambda event: event.logprobs, together=2)


def tokens(heard: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {name: [p.token for p in told] for name, told in heard.items()}


def traffic(seed: int, n: int, greedy: bool = False) -> list[Request]:
    """Prompts on both sides of a window of 90, a third of them behind a common beginning that is longer than it."""
    rng = random.Random(seed)
    bases = [[rng.randrange(3, 160) for _ in range(length)] for length in (0, 40, 200)]
    found = []
    for i in range(n):
        kind: dict[str, Any] = {"temperature": 0.0}
        if not greedy and rng.random() < 0.5:
            kind = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": rng.choice([1.0, 1.2]), "seed": i}
        sampling = SamplingParams(max_tokens=rng.randint(4, 50), logprobs=4, ignore_eos=True, **kind)
        own = [rng.randrange(3, 160) for _ in range(rng.randint(1, 150))]
        found.append(Request(id=str(i), tokens=rng.choice(bases) + own, sampling=sampling))
    return found


def unexplained(have: dict[str, list[Any]], want: dict[str, list[Any]]) -> list[str]:
    """Greedy requests whose first token that differs was no tie."""
    assert have.keys() == want.keys()
    found = []
    for name in want:
        for a, b in zip(have[name], want[name], strict=True):
            if a.token != b.token:
                beside = dict(b.top).get(a.token, -np.inf)
                if b.logprob - beside > TIE:
                    found.append(name)
                break
    return found


def check_log_probabilities(
    path: Path, chunk: int, lengths: Sequence[int], exact: Callable[[list[int]], np.ndarray]
) -> None:
    """Prompts of these lengths in steps of `chunk`, then a hundred tokens from graphs: nearly as likely as `exact` logits say."""
    running = engine(path, max_batch_tokens=chunk, max_seqs=4)
    rng = random.Random(chunk)
    prompts = [[rng.randrange(3, 160) for _ in range(n)] for n in lengths]
    sampling = SamplingParams(temperature=0.0, max_tokens=100, logprobs=0, ignore_eos=True)
    heard = serve(running, [Request(id=str(i), tokens=p, sampling=sampling) for i, p in enumerate(prompts)])
    running.close()
    for i, prompt in enumerate(prompts):
        told = heard[str(i)]
        whole = prompt + [p.token for p in told]
        logits = np.asarray(exact(whole), np.float64)[len(prompt) - 1 : -1]
        logits -= logits.max(axis=1, keepdims=True)
        want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        error = np.abs(np.array([p.logprob for p in told]) - want[np.arange(len(told)), whole[len(prompt) :]])
        assert np.quantile(error, 0.95) < 0.05, f"prompt of {len(prompt)}: {np.sort(error)[-8:]}"


def check_again(path: Path) -> list[int]:
    """A prompt of 300 three times: the tokens are those of the first time. How many were found cached, each time."""
    running = engine(path)
    rng = random.Random(5)
    prompt = [rng.randrange(3, 160) for _ in range(300)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, logprobs=4, ignore_eos=True)
    heard: list[list[Event]] = []
    for i in range(3):
        request = Request(id=str(i), tokens=prompt, sampling=sampling)
        heard.append(kit.serve(running, [request], lambda event: [event])[request.id])
    running.close()
    told = [[p for event in events for p in event.logprobs] for events in heard]
    assert [p.token for p in told[1]] == [p.token for p in told[2]]
    assert unexplained({"again": told[1]}, {"again": told[0]}) == []
    return [event.receipt.cached_tokens for events in heard for event in events if event.receipt is not None]
