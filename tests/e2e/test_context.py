"""Conversations and answers longer than the context, with the official clients and the default model: cut where that is asked for, and told."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server, launch

CONTEXT = 512
WORDS = "Rivers run from the mountains to the sea, and towns were built along them for water and for trade. "


@pytest.fixture(scope="module")
def small(model_path: Path) -> Iterator[Server]:
    started = launch("--context", str(CONTEXT))
    yield started
    assert started.stop() == 0, "\n".join(started.lines)


def talk(turns: int) -> list[Any]:
    said: list[Any] = [{"role": "system", "content": "Answer in one word."}]
    for i in range(turns):
        said += [{"role": "user", "content": f"{i}. {WORDS}"}, {"role": "assistant", "content": "Yes."}]
    return [*said, {"role": "user", "content": "And the sea?"}]


def test_a_growing_conversation_is_cut_and_hits_the_cache(small: Server) -> None:
    client, cached, cuts = small.client(), [], []
    for n in range(16, 34):
        r = client.chat.completions.create(
            model=DEFAULT_MODEL, messages=talk(n), max_tokens=2, temperature=0, extra_body={"truncation": "auto"}
        )
        assert r.usage is not None and r.usage.prompt_tokens <= CONTEXT - 2
        cached.append(r.usage.prompt_tokens_details.cached_tokens / r.usage.prompt_tokens)  # type: ignore[union-attr]
        cuts.append(r.model_extra["quire"]["dropped"]["messages"])  # type: ignore[index]
    moves = sum(a != b for a, b in itertools.pairwise(cuts))
    assert cuts == sorted(cuts) and 1 <= moves <= len(cuts) // 3
    hits = [c for c, a, b in zip(cached[1:], cuts, cuts[1:], strict=False) if a == b]
    assert min(hits) > 0.5, (cached, cuts)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
        client.chat.completions.create(model=DEFAULT_MODEL, messages=talk(29), max_tokens=2)


def test_responses_and_a_header(small: Server) -> None:
    client = small.client()
    items: Any = talk(30)[1:]
    raw = client.responses.with_raw_response.create(
        model=DEFAULT_MODEL, input=items, instructions="Answer in one word.", truncation="auto", max_output_tokens=16
    )
    made = raw.parse()
    assert made.truncation == "auto" and made.usage is not None and made.usage.input_tokens <= CONTEXT - 16
    told = made.model_extra["quire"]["dropped"]  # type: ignore[index]
    assert f"messages={told['messages']}" in raw.headers["x-quire-dropped"]
    with client.responses.stream(model=DEFAULT_MODEL, input=items, truncation="auto", max_output_tokens=16) as stream:
        last = list(stream)[-1]
        assert last.response.model_extra["quire"]["dropped"]["messages"] > 2  # type: ignore[union-attr, index]
    with pytest.raises(openai.BadRequestError, match="never cut"):
        client.responses.create(model=DEFAULT_MODEL, input=WORDS * 40, truncation="auto")


def test_the_last_tokens_of_a_prompt(small: Server) -> None:
    client = small.client()
    fields: Any = {"model": DEFAULT_MODEL, "max_tokens": 4, "temperature": 0}
    more = {"truncate_prompt_tokens": 40, "return_token_ids": True}
    r = client.completions.create(prompt=WORDS * 40, **fields, extra_body=more)
    ids = r.choices[0].model_extra["token_ids"]  # type: ignore[index]
    assert r.usage is not None and r.usage.prompt_tokens == 40
    tokens = httpx.post(f"{small.url}/tokenize", json={"model": DEFAULT_MODEL, "prompt": WORDS * 40}).json()["tokens"]
    same = client.completions.create(prompt=tokens[-40:], **fields, extra_body={"return_token_ids": True})
    assert same.choices[0].model_extra["token_ids"] == ids  # type: ignore[index]


def test_an_answer_past_the_context_is_what_its_parts_are(small: Server) -> None:
    """Each part, asked for by itself with the tokens that were kept, is the same."""
    tokens = httpx.post(
        f"{small.url}/tokenize", json={"content": "Once upon a time" + " there was a river" * 60}
    ).json()["tokens"]
    ask = {
        "prompt": tokens,
        "n_predict": 500,
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": True,
    }
    limited = httpx.post(f"{small.url}/completion", json={**ask, "n_predict": -1}, timeout=120).json()
    assert len(limited["tokens"]) == CONTEXT - len(tokens) and not limited["truncated"]
    r = httpx.post(f"{small.url}/completion", json=ask | {"context_shift": True, "n_keep": 32}, timeout=120).json()
    assert len(r["tokens"]) == 500 and r["truncated"] and "context_shift" in r["quire"]["notes"][0]
    seen, made, parts = list(tokens), list(r["tokens"]), 0
    while made:
        room = CONTEXT - len(seen)
        alone = small.client().completions.create(
            model=DEFAULT_MODEL,
            prompt=seen,
            max_tokens=min(room, len(made)),
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        ids = alone.choices[0].model_extra["token_ids"]  # type: ignore[index]
        assert made[: len(ids)] == ids, parts
        seen, made, parts = seen + ids, made[len(ids) :], parts + 1
        gone = (len(seen) - 32) // 2
        seen = seen[:32] + seen[32 + gone :]
    assert parts > 1


def test_ollama_shifts_and_truncates_where_it_is_asked(small: Server) -> None:
    body: Any = {
        "model": DEFAULT_MODEL,
        "messages": talk(30),
        "options": {"temperature": 0, "num_predict": 600, "num_ctx": 256},
    }
    refused = httpx.post(f"{small.url}/api/chat", json=body | {"stream": False}, timeout=120)
    assert refused.status_code == 400
    lines = httpx.post(
        f"{small.url}/api/chat", json=body | {"truncate": True, "shift": True}, timeout=120
    ).text.splitlines()
    last = json.loads(lines[-1])
    assert last["done"] and last["quire"]["dropped"]["messages"] > 2 and last["prompt_eval_count"] <= 128
    text = {"model": DEFAULT_MODEL, "prompt": "Count: 1 2 3 4 5", "raw": True, "stream": False, "shift": True}
    r = httpx.post(
        f"{small.url}/api/generate",
        json=text | {"options": {"num_ctx": 64, "num_predict": 200, "temperature": 0}},
        timeout=120,
    ).json()
    if r["done_reason"] == "length":
        assert r["eval_count"] == 200 and "shift" in r["quire"]["notes"][-1]
