"""`langchain-openai`: messages, streams, bound tools, structured output by each method, Responses, embeddings, errors."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.clients.conftest import ASK, FOUND, LONG, TALK, TOLD, Served

langchain = pytest.importorskip("langchain_openai", reason="needs langchain-openai: `make test-clients` installs it")


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    rank: int = Field(ge=1, le=9)


def model(served: Served, **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 60, "max_retries": 0, **more}
    return langchain.ChatOpenAI(model=served.model, base_url=served.openai, api_key=served.key, **settings)


def weather() -> Any:
    from langchain_core.tools import tool

    @tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return FOUND if city == "Paris" else "unknown"

    return get_weather


@pytest.mark.parametrize("responses", [False, True])
def test_chat_stream_and_batch(served: Served, responses: bool):
    llm = model(served, use_responses_api=responses, stream_usage=True)
    whole = llm.invoke(ASK)
    assert whole.text and whole.usage_metadata["output_tokens"] > 0
    parts = list(llm.stream(ASK))
    summed = parts[0]
    for part in parts[1:]:
        summed += part
    assert summed.text == whole.text
    assert summed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert [m.text for m in llm.batch([ASK, ASK])] == [whole.text] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("responses", [False, True])
def test_tools_in_a_loop(served: Served, responses: bool, stream: bool):
    tool = weather()
    llm = model(served, use_responses_api=responses).bind_tools([tool])
    talk, calls = list(TALK), []
    for _ in range(3):
        if stream:
            parts = list(llm.stream(talk))
            message = parts[0]
            for part in parts[1:]:
                message += part
        else:
            message = llm.invoke(talk)
        talk.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            calls.append((call["name"], call["args"]))
            talk.append(tool.invoke(call))
    assert calls == [("get_weather", {"city": "Paris"})]
    assert talk[-1].text == TOLD


def test_a_demanded_call(served: Served):
    for choice in ("any", "City"):
        message = model(served, max_tokens=300).bind_tools([City], tool_choice=choice, strict=True).invoke(ASK)
        assert message.tool_calls and all(City(**call["args"]) for call in message.tool_calls)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("responses", [False, True])
def test_structured_output(served: Served, responses: bool, method: str):
    llm = model(served, max_tokens=300, use_responses_api=responses)
    found = llm.with_structured_output(City, method=method).invoke(ASK)
    assert isinstance(found, City)


def test_json_mode(served: Served):
    ask = [{"role": "user", "content": 'Write {"name": "Paris"} and nothing else.'}]
    assert isinstance(model(served, max_tokens=300).with_structured_output(method="json_mode").invoke(ask), dict)


def test_logprobs_and_stop(served: Served):
    message = model(served, logprobs=True, top_logprobs=2).invoke(ASK, stop=["France"])
    assert "France" not in message.text
    assert message.response_metadata["logprobs"]["content"]


def test_embeddings(embedder: Served):
    made = langchain.OpenAIEmbeddings(
        model=embedder.model, base_url=embedder.openai, api_key=embedder.key, check_embedding_ctx_length=False
    )
    rows = made.embed_documents(["a cat", "a dog"])
    assert [len(row) for row in rows] == [576, 576]
    assert made.embed_query("a cat") == pytest.approx(rows[0], abs=1e-6)


def test_errors(served: Served):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model(served, temperature=-1).invoke(ASK)
    with pytest.raises(openai.NotFoundError):
        langchain.ChatOpenAI(model="nobody", base_url=served.openai, api_key=served.key, max_retries=0).invoke(ASK)
    with pytest.raises(openai.AuthenticationError):
        langchain.ChatOpenAI(model=served.model, base_url=served.openai, api_key="wrong", max_retries=0).invoke(ASK)


def test_time_limits_and_leaving(served: Served):
    endless = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    with served.stops_early(), pytest.raises(openai.APITimeoutError):
        model(served, timeout=0.4, **endless).invoke(ASK)
    with served.stops_early():
        stream = model(served, **endless).stream(ASK)
        for _ in range(3):
            next(stream)
        stream.close()


async def test_async(served: Served):
    llm = model(served)
    whole = await llm.ainvoke(ASK)
    assert "".join([part.text async for part in llm.astream(ASK)]) == whole.text
