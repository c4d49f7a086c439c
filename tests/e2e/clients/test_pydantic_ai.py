"""`pydantic-ai`: agents that call tools until they can answer, with each kind of output, over chat, Responses and Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.e2e.clients.conftest import ASK, FOUND, LONG, TOLD, Served

pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs pydantic-ai: `make test-clients` installs it")
pytest.importorskip(
    "pydantic_ai.models.openai", reason="needs pydantic-ai-slim[openai]: `make test-clients` installs it"
)

WAYS = ["chat", "responses", "anthropic", "ollama"]


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    rank: int = Field(ge=1, le=9)


def model(served: Served, way: str = "chat", name: str | None = None) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.ollama import OllamaProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    name = name or served.model
    if way == "anthropic":
        anthropic = pytest.importorskip("anthropic", reason="needs anthropic: `make test-clients` installs it")
        known = tuple(int(part) for part in pydantic_ai.__version__.split(".")[:2])
        if anthropic.__version__ >= "2" and known < (2, 48):
            pytest.skip("needs a pydantic-ai that knows anthropic 2 (litellm holds back openai, and that pydantic-ai)")
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=served.url, api_key=served.key, max_retries=0)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
    if way == "ollama":
        return OpenAIChatModel(name, provider=OllamaProvider(base_url=served.openai, api_key=served.key))
    provider = OpenAIProvider(base_url=served.openai, api_key=served.key)
    return (OpenAIResponsesModel if way == "responses" else OpenAIChatModel)(name, provider=provider)


def agent(served: Served, way: str = "chat", **more: Any) -> Any:
    return pydantic_ai.Agent(model(served, way), model_settings={"temperature": 0, "max_tokens": 400}, **more)


def history() -> list[Any]:
    """The two rounds of the shared conversation, in this library's words."""
    from pydantic_ai.messages import (
        ModelRequest,
        ModelResponse,
        TextPart,
        ToolCallPart,
        ToolReturnPart,
        UserPromptPart,
    )

    said: list[Any] = []
    for city in ("Rome", "Oslo"):
        call = f"call_{city}"
        said += [
            ModelRequest(parts=[UserPromptPart(f"What is the weather in {city}?")]),
            ModelResponse(parts=[ToolCallPart("get_weather", {"city": city}, tool_call_id=call)]),
            ModelRequest(parts=[ToolReturnPart("get_weather", "18 degrees", tool_call_id=call)]),
            ModelResponse(parts=[TextPart(f"It is 18 degrees in {city}.")]),
        ]
    return said


@pytest.mark.parametrize("way", WAYS)
async def test_text_and_stream(served: Served, way: str):
    asked = ASK[0]["content"]
    whole = await agent(served, way).run(asked)
    assert whole.output and whole.usage.output_tokens > 0
    async with agent(served, way).run_stream(asked) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert "".join(pieces) == whole.output and len(pieces) > 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_in_a_loop(served: Served, way: str, stream: bool):
    weather = agent(served, way)
    asked: list[str] = []

    @weather.tool_plain
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return FOUND

    question = "What is the weather in Paris?"
    if stream:
        async with weather.run_stream(question, message_history=history()) as run:
            told = await run.get_output()
    else:
        told = (await weather.run(question, message_history=history())).output
    assert (asked, told) == (["Paris"], TOLD)


@pytest.mark.parametrize("kind", ["tool", "native", "prompted"])
@pytest.mark.parametrize("way", WAYS)
async def test_structured_output(served: Served, way: str, kind: str):
    if way == "anthropic" and kind != "tool":
        pytest.skip("pydantic-ai asks for these of models it knows by name")
    from pydantic_ai import NativeOutput, PromptedOutput, ToolOutput

    output = {"tool": ToolOutput, "native": NativeOutput, "prompted": PromptedOutput}[kind](City)
    if kind == "prompted":  # JSON mode holds the form alone, so the model must be given a chance to miss the fields
        from pydantic_ai.exceptions import UnexpectedModelBehavior

        try:
            found = await agent(served, way, output_type=output, retries=0).run("Paris, rank 1.")
        except UnexpectedModelBehavior:
            return
    else:
        found = await agent(served, way, output_type=output, retries=0).run(ASK[0]["content"])
    assert isinstance(found.output, City)


async def test_a_tool_then_an_output_tool(served: Served):
    """Demanded at each step: the tool first, the output tool when that is all there is."""
    weather = agent(served, output_type=City, retries=0)
    asked: list[str] = []

    async def once(ctx: Any, definition: Any) -> Any:
        return definition if not asked else None

    @weather.tool_plain(prepare=once)
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return FOUND

    found = await weather.run("Use get_weather, then tell the city.")
    assert isinstance(found.output, City)


async def test_errors(served: Served):
    from pydantic_ai.exceptions import ModelHTTPError

    with pytest.raises(ModelHTTPError) as caught:
        await pydantic_ai.Agent(model(served, name="nobody")).run("Hello")
    assert caught.value.status_code == 404
    with pytest.raises(ModelHTTPError) as caught:
        await pydantic_ai.Agent(model(served), model_settings={"temperature": -1}).run("Hello")
    assert caught.value.status_code == 400 and "temperature" in str(caught.value.body)


async def test_time_limits_and_leaving(served: Served):
    endless = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}
    with served.stops_early(), pytest.raises(Exception, match=r"(?i)timed out|Connection"):
        await pydantic_ai.Agent(model(served), model_settings={**endless, "timeout": 0.4}).run("Hello")
    with served.stops_early(), pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.5):
            await pydantic_ai.Agent(model(served), model_settings=endless).run("Hello")


async def test_embeddings(embedder: Served):
    embeddings = pytest.importorskip("pydantic_ai.embeddings.openai")
    from pydantic_ai import Embedder
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=embedder.openai, api_key=embedder.key)
    made = await Embedder(embeddings.OpenAIEmbeddingModel(embedder.model, provider=provider)).embed_documents(
        ["a cat", "a dog"]
    )
    assert [len(row) for row in made.embeddings] == [576, 576]
