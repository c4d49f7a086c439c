"""Speculative decoding on a GPU: verification graphs against eager steps and against none at all.

Needs an NVIDIA GPU; skipped elsewhere. The model is random: one that repeats itself after few tokens, so that draft tokens are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the cuda extra")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from quire.engine.types import Event, Request  # noqa: E402
from quire.runner.params import SamplingParams  # noqa: E402
from tests.gpu import kit  # noqa: E402


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("shape")
    return kit.write_shape(folder, vocab_size=600, num_hidden_layers=3, max_position_embeddings=2048)


def engine(shape: str, **options: Any) -> Any:
    settings = {"dtype": "bfloat16", "max_batch_tokens": 256, "context": 1024}
    return kit.build(shape, load_format="dummy", **(settings | options))[0]


def traffic(seed: int, n: int) -> list[Request]:
    """Prompts that say the same words over and over, with every kind of sampling."""
    rng = random.Random(seed)
    found = []
    for i in range(n):
        words = [rng.randrange(600) for _ in range(rng.choice([3, 7, 20]))]
        kind: dict[str, Any] = {"temperature": 0.0}
        if i % 3 == 1:
            kind = {"temperature": 0.3, "top_k": 4, "seed": i}
        if i % 6 == 5:
            kind = {"temperature": 0.0, "repetition_penalty": 1.2}
        sampling = SamplingParams(
            max_tokens=rng.randint(20, 90), logprobs=rng.choice([None, 2]), ignore_eos=True, **kind
        )
        found.append(Request(id=str(i), tokens=words * rng.randint(2, 12), sampling=sampling))
    return found


def serve(running: Any, requests: list[Request]) -> dict[str, list[Any]]:
    def told(event: Event) -> Iterable[Any]:
        return zip(event.tokens, event.logprobs or [None] * len(event.tokens), strict=True)

    return kit.serve(running, requests, told)


def test_bits_are_the_same_with_and_without(shape: str):
    """In the mode whose promise is bits: tokens and log probabilities, at every depth, from graphs and from eager steps."""
    requests = traffic(1, 24)
    want = serve(engine(shape, deterministic=True), requests)
    for depth in (0, 1, 2):
        guessing = engine(shape, deterministic=True, speculate="ngram", depth=depth)
        verifier = guessing._runner._verify
        assert verifier is not None and len(verifier.ladder.graphs) >= 9
        assert serve(guessing, requests) == want
        stats = guessing.stats()
        assert 0 < stats.accepted_tokens <= stats.drafted_tokens
        guessing.close()
    eager = engine(shape, deterministic=True, speculate="ngram")
    eager._runner._verify = eager._runner._decode = eager._runner._prefill = None
    assert serve(eager, requests) == want


@pytest.mark.parametrize("backend", ["cuda", "torch"])
def test_otherwise_the_tokens_are_nearly_all_the_same(shape: str, backend: str):
    """In float32: steps of another shape round differently, so a tie may flip, and then the answer goes on differently."""
    requests = traffic(2, 24)
    want = serve(engine(shape, dtype="float32", backend=backend), requests)
    guessing = engine(shape, dtype="float32", backend=backend, speculate="ngram", draft_tokens=8)
    have = serve(guessing, requests)
    tokens = [{name: [token for token, _ in told] for name, told in heard.items()} for heard in (have, want)]
    assert sum(tokens[0][name] != tokens[1][name] for name in want) <= 2
    assert guessing.stats().accepted_tokens > 0


def test_long_contexts_are_verified_in_parts(shape: str):
    """A context long enough to be cut into parts, at a batch so small that it is: the same bits as one token at a time."""
    rng = random.Random(3)
    words = [rng.randrange(600) for _ in range(40)]
    request = Request(
        id="long",
        tokens=words * 20,
        sampling=SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, logprobs=1),
    )
    want = serve(engine(shape, deterministic=True), [request])
    guessing = engine(shape, deterministic=True, speculate="ngram", draft_tokens=8)
    assert serve(guessing, [request]) == want
    plain, quick = (serve(engine(shape, **more), [request])["long"] for more in ({}, {"speculate": "ngram"}))
    same = next((i for i, (a, b) in enumerate(zip(plain, quick, strict=True)) if a[0] != b[0]), len(plain))
    assert same >= 8 and all(abs(a[1].logprob - b[1].logprob) < 0.1 for a, b in zip(plain[:same], quick, strict=False))
