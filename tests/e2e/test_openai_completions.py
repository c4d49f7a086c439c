"""The official `openai` client drives the older completions route on the default model."""

from __future__ import annotations

import httpx
import openai
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server

PROMPT = "The capital of France is"


def test_text(client: openai.OpenAI):
    r = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, temperature=0, max_tokens=8)
    assert "Paris" in r.choices[0].text
    assert r.choices[0].finish_reason == "length"
    assert r.usage and r.usage.completion_tokens == 8


def test_tokens_in_are_text_in(client: openai.OpenAI, server: Server):
    ids = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}, timeout=10).json()["tokens"]
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}, timeout=10).json()["prompt"]
    assert back == PROMPT
    one = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, temperature=0, max_tokens=8)
    two = client.completions.create(model=DEFAULT_MODEL, prompt=ids, temperature=0, max_tokens=8)
    assert one.choices[0].text == two.choices[0].text


def test_several_prompts_and_choices(client: openai.OpenAI):
    prompts = [PROMPT, "Two plus two is", "The colour of the sky is"]
    alone = [
        client.completions.create(model=DEFAULT_MODEL, prompt=p, temperature=0, max_tokens=8).choices[0].text
        for p in prompts
    ]
    r = client.completions.create(model=DEFAULT_MODEL, prompt=prompts, temperature=0, max_tokens=8, n=2)
    assert [c.index for c in r.choices] == list(range(6))
    assert [c.text for c in r.choices] == [t for t in alone for _ in range(2)]


def test_stream_equals_whole(client: openai.OpenAI):
    whole = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, temperature=0.8, seed=3, max_tokens=24)
    stream = client.completions.create(
        model=DEFAULT_MODEL, prompt=PROMPT, temperature=0.8, seed=3, max_tokens=24, stream=True
    )
    assert "".join(c.choices[0].text for c in stream if c.choices) == whole.choices[0].text


def test_logprobs_in_the_old_shape(client: openai.OpenAI):
    r = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=3)
    lp = r.choices[0].logprobs
    assert lp and lp.tokens and lp.token_logprobs and lp.top_logprobs and lp.text_offset
    assert "".join(lp.tokens) == r.choices[0].text
    assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 6
    for token, logprob, top in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs, strict=True):
        assert top[token] == pytest.approx(logprob) == max(top.values())
    for token, offset in zip(lp.tokens, lp.text_offset, strict=True):
        assert r.choices[0].text[offset:].startswith(token)


def test_echo_scores_the_prompt_as_generation_did(client: openai.OpenAI):
    """Scores of generated tokens, and scores of the same tokens as a prompt, are the same numbers."""
    made = client.completions.create(model=DEFAULT_MODEL, prompt=PROMPT, temperature=0, max_tokens=6, logprobs=0)
    text = PROMPT + made.choices[0].text
    scored = client.completions.create(
        model=DEFAULT_MODEL, prompt=text, echo=True, max_tokens=0, logprobs=0, temperature=0
    )
    assert scored.choices[0].text == text
    lp, old = scored.choices[0].logprobs, made.choices[0].logprobs
    assert lp and lp.token_logprobs and lp.tokens and old and old.token_logprobs and old.tokens
    assert lp.token_logprobs[0] is None
    assert lp.tokens[-6:] == old.tokens
    assert lp.token_logprobs[-6:] == old.token_logprobs  # bitwise: decode and prefill agree
    assert scored.usage and scored.usage.completion_tokens == 0


def test_errors(client: openai.OpenAI):
    for more, param in (
        ({"prompt": ""}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"n": 1000}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 99}, "logprobs"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": DEFAULT_MODEL, "prompt": "hi", **more})
        assert caught.value.param == param
