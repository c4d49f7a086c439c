"""`litellm` by each of its ways to a server: OpenAI's, vLLM's, Anthropic's and Ollama's dialects, and Responses."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.e2e.clients.conftest import ASK, FOUND, LONG, TALK, TOLD, WEATHER, Served

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or importing it asks the network for prices
litellm = pytest.importorskip("litellm", reason="needs litellm: `make test-clients` installs it")
pytest.importorskip(
    "mcp", reason="needs mcp, which litellm imports when it is given tools: `make test-clients` installs it"
)

WAYS = ["openai", "hosted_vllm", "litellm_proxy", "anthropic", "ollama_chat"]


def fields(served: Served, way: str, **more: Any) -> dict[str, Any]:
    base = served.url if way in ("anthropic", "ollama_chat") else served.openai
    common = {"api_base": base, "api_key": served.key, "temperature": 0, "max_tokens": 60, "num_retries": 0}
    return {"model": f"{way}/{served.model}", "messages": ASK, **common, **more}


def ask(served: Served, way: str = "openai", **more: Any) -> Any:
    return litellm.completion(**fields(served, way, **more))


@pytest.mark.parametrize("way", WAYS)
def test_chat_and_stream(served: Served, way: str):
    whole = ask(served, way)
    said = whole.choices[0].message.content
    assert said and whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 0 < whole.usage.prompt_tokens
    chunks = list(ask(served, way, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == said == ask(served).choices[0].message.content
    again = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert again.choices[0].message.content == said
    assert again.usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_tools_in_a_loop(served: Served, way: str, stream: bool):
    talk, calls = list(TALK), []
    for _ in range(3):
        r = ask(served, way, messages=talk, tools=[WEATHER], stream=stream)
        if stream:
            r = litellm.stream_chunk_builder(list(r), messages=talk)
        message = r.choices[0].message
        talk.append(message)
        if not message.tool_calls:
            break
        assert r.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            calls.append((call.function.name, json.loads(call.function.arguments)))
            talk.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": FOUND})
    assert calls == [("get_weather", {"city": "Paris"})]
    assert talk[-1].content == TOLD


@pytest.mark.parametrize("way", ["openai", "hosted_vllm", "anthropic"])
def test_a_demanded_call(served: Served, way: str):
    city = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "note", "parameters": city}}
    named = {"type": "function", "function": {"name": "note"}}
    for choice in ("required", named):
        r = ask(served, way, tools=[tool], tool_choice=choice, max_tokens=300, parallel_tool_calls=False)
        (call,) = r.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("way", WAYS)
def test_structured_output(served: Served, way: str):
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", "Rome"]},
            "rank": {"type": "integer", "maximum": 9},
        },
        "required": ["city", "rank"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    r = ask(served, way, response_format=form, max_tokens=300)
    found = json.loads(r.choices[0].message.content)
    assert found["city"] in ("Paris", "Rome") and found["rank"] <= 9 and len(found) == 2


@pytest.mark.parametrize("way", ["openai", "hosted_vllm"])
def test_reasoning(served: Served, way: str):
    thinks = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}, "max_tokens": 16}
    r = ask(served, way, **thinks)
    assert r.choices[0].message.reasoning_content
    parts = [c.choices[0].delta for c in ask(served, way, **thinks, stream=True)]
    assert "".join(getattr(p, "reasoning_content", None) or "" for p in parts) == r.choices[0].message.reasoning_content


def test_responses_and_text(served: Served):
    more = {"api_base": served.openai, "api_key": served.key, "temperature": 0}
    r = litellm.responses(model=f"openai/{served.model}", input=ASK[0]["content"], max_output_tokens=60, **more)
    assert r.output[0].content[0].text == ask(served).choices[0].message.content
    text = litellm.text_completion(model=f"openai/{served.model}", prompt="1, 2, 3,", max_tokens=4, **more)
    assert text.choices[0].text


def test_embeddings(embedder: Served):
    more = {"api_base": embedder.openai, "api_key": embedder.key}
    made = litellm.embedding(
        model=f"openai/{embedder.model}", input=["a cat", "a dog"], encoding_format="float", **more
    )
    assert [len(d["embedding"]) for d in made.data] == [576, 576]


@pytest.mark.parametrize("way", WAYS)
def test_errors(served: Served, way: str):
    with pytest.raises(litellm.exceptions.NotFoundError):
        litellm.completion(**fields(served, way) | {"model": f"{way}/nobody"})
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature"):
        ask(served, way, temperature=-1)
    with pytest.raises(litellm.exceptions.AuthenticationError):
        ask(served, way, api_key="wrong")


def test_a_prompt_that_is_too_long_is_known_as_such(served: Served):
    """It has an exception of its own for that, which agents catch to shorten what they send."""
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        ask(served, messages=[{"role": "user", "content": "word " * 4000}])
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        ask(served, max_tokens=2048)


def test_time_limits_and_leaving(served: Served):
    endless = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    with served.stops_early(), pytest.raises(litellm.exceptions.Timeout):
        ask(served, timeout=0.4, **endless)
    with served.stops_early():
        stream = ask(served, stream=True, **endless)
        for _ in range(3):
            next(stream)
        stream.completion_stream.close()


async def test_many_at_once(served: Served):
    import asyncio

    expected = ask(served).choices[0].message.content
    answers = await asyncio.gather(*(litellm.acompletion(**fields(served, "openai")) for _ in range(8)))
    assert {a.choices[0].message.content for a in answers} == {expected}
