"""The official `openai` client drives chat completions on the default model."""

from __future__ import annotations

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server

ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France? Answer in one word."}
]


def test_an_answer(client: openai.OpenAI):
    r = client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, temperature=0, max_tokens=20)
    choice = r.choices[0]
    assert choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert r.usage is not None
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens
    assert 0 < r.usage.completion_tokens <= 20
    assert r.system_fingerprint


def test_chat_is_completion_of_the_rendered_prompt(client: openai.OpenAI, server: Server):
    import httpx

    tokens = httpx.post(f"{server.url}/tokenize", json={"messages": ASK}, timeout=10).json()["tokens"]
    text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}, timeout=10).json()["prompt"]
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert "What is the capital of France?" in text
    chat = client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, temperature=0, max_tokens=12)
    plain = client.completions.create(model=DEFAULT_MODEL, prompt=tokens, temperature=0, max_tokens=12)
    assert chat.choices[0].message.content == plain.choices[0].text


def test_a_stream_says_the_same(client: openai.OpenAI):
    whole = client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=ASK,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]


def test_a_repeated_prompt_is_cached(client: openai.OpenAI):
    long: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count the sheep: " + "one sheep, " * 40}]
    seen = []
    for _ in range(2):
        r = client.chat.completions.create(model=DEFAULT_MODEL, messages=long, temperature=0, max_tokens=4)
        assert r.usage is not None
        assert r.usage.prompt_tokens_details is not None
        seen.append((r.usage.prompt_tokens_details.cached_tokens, r.choices[0].message.content))
    assert seen[1][0] and seen[1][0] > 64
    assert seen[0][1] == seen[1][1]


def test_cache_salts_do_not_share(client: openai.OpenAI):
    ask: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name the rivers: " + "a river, " * 40}]
    cached = []
    for salt in ("a", "b", "a"):
        r = client.chat.completions.create(
            model=DEFAULT_MODEL, messages=ask, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert r.usage and r.usage.prompt_tokens_details
        cached.append(r.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0


def test_seeds_reproduce(client: openai.OpenAI):
    def sample(seed: int | None) -> list[str | None]:
        r = client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": "Tell me something surprising."}],
            temperature=1.2,
            max_tokens=24,
            n=2,
            seed=seed,
        )
        return [c.message.content for c in r.choices]

    first, again, other = sample(7), sample(7), sample(8)
    assert first == again
    assert first != other
    assert first[0] != first[1]  # choices of one request differ


def test_the_receipt_tells_the_seed_that_was_drawn(client: openai.OpenAI):
    def ask(**more: object) -> tuple[str | None, dict[str, int]]:
        r = client.chat.completions.create(
            model=DEFAULT_MODEL, messages=ASK, temperature=1.5, max_tokens=16, extra_body={"receipts": True}, **more
        )
        return r.choices[0].message.content, r.model_extra["quire"]["receipts"][0]

    text, receipt = ask()
    replayed, _ = ask(seed=receipt["seed"])
    assert replayed == text


def test_logprobs(client: openai.OpenAI):
    r = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    assert r.choices[0].logprobs is not None
    content = r.choices[0].logprobs.content
    assert content
    text = bytes(b for t in content for b in t.bytes or ()).decode(errors="replace")
    assert text.startswith(r.choices[0].message.content or "")
    for token in content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy takes the best
        assert [t.logprob for t in token.top_logprobs] == sorted((t.logprob for t in token.top_logprobs), reverse=True)


def test_stop_strings(client: openai.OpenAI):
    ask: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story about a dog and a cat."}]
    free = client.chat.completions.create(model=DEFAULT_MODEL, messages=ask, temperature=0, max_tokens=40)
    text = free.choices[0].message.content or ""
    assert len(text) > 60
    stop = text[30:37]  # begins and ends where no token does
    cut = client.chat.completions.create(model=DEFAULT_MODEL, messages=ask, temperature=0, max_tokens=40, stop=stop)
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ask, temperature=0, max_tokens=40, stop=[stop], stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in streamed) == text[: text.index(stop)]


def test_length_bias_and_min_tokens(client: openai.OpenAI, server: Server):
    short = client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, max_completion_tokens=1)
    assert short.choices[0].finish_reason == "length"
    assert short.usage and short.usage.completion_tokens == 1
    forced = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, temperature=0, max_tokens=4, logit_bias={"354": 100}
    )
    ids = server_tokens(server, forced.choices[0].message.content or "")
    assert set(ids) == {354}
    long = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, temperature=0, max_tokens=30, extra_body={"ignore_eos": True}
    )
    assert long.usage and long.usage.completion_tokens == 30


def server_tokens(server: Server, text: str) -> list[int]:
    import httpx

    body = {"prompt": text, "add_special_tokens": False}
    return httpx.post(f"{server.url}/tokenize", json=body, timeout=10).json()["tokens"]


def test_earlier_turns_count(client: openai.OpenAI):
    def ask(name: str) -> str | None:
        r = client.chat.completions.create(
            model=DEFAULT_MODEL,
            temperature=0,
            max_tokens=24,
            messages=[
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": f"Hello, I am {name}."},
                {"role": "assistant", "content": f"Hello {name}, how can I help you?"},
                {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
            ],
        )
        return r.choices[0].message.content

    assert ask("Alice") != ask("Robert")


def test_errors_are_the_clients_own(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="nope", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=DEFAULT_MODEL, messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    assert client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, max_tokens=1).choices


def test_models(client: openai.OpenAI):
    assert [m.id for m in client.models.list()] == [DEFAULT_MODEL]
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL


async def test_many_at_once(server: Server):
    """Thirty requests together give what each gives alone."""
    import asyncio

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=180)

    async def ask(i: int) -> str:
        r = await client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=[{"role": "user", "content": f"Write the number {i % 10} as a word."}],
            temperature=0,
            max_tokens=12,
        )
        return r.choices[0].message.content or ""

    alone = [await ask(i) for i in range(3)]
    together = await asyncio.gather(*(ask(i) for i in range(30)))
    assert list(together[:3]) == alone
    assert list(together[10:13]) == alone
    await client.close()
