"""npm's `openai` package: chat, streams, its own tool loop and parsers, Responses, errors, time limits, leaving early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.clients.conftest import TOLD, Script, Served, needs_npm

pytestmark = needs_npm("openai", "zod")


@pytest.fixture(scope="module")
def said(served: Served, script: Script) -> dict[str, Any]:
    with served.stops_early():
        return script("openai.mjs", served)


def test_chat_and_stream(said: dict[str, Any], served: Served):
    assert said["models"] == [served.model]
    assert said["whole"]["text"] and said["whole"]["text"] == said["stream"]["text"]
    assert said["whole"]["finish"] in ("stop", "length")
    assert said["stream"]["usage"]["completion_tokens"] == said["whole"]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("way", ["loop", "streamedLoop"])
def test_tools_in_a_loop(said: dict[str, Any], way: str):
    assert said[way] == {"told": TOLD, "asked": ["Paris"]}


@pytest.mark.parametrize("way", ["parsed", "strict"])
def test_structured_output(said: dict[str, Any], way: str):
    assert said[way].keys() == {"name", "population"}
    assert said[way]["name"] in ("Paris", "Rome") and 1 <= said[way]["population"] <= 99


def test_responses(said: dict[str, Any]):
    assert said["response"] == said["responseStream"] == said["whole"]["text"]


def test_errors_and_time_limits(said: dict[str, Any]):
    errors = said["errors"]
    assert (errors["model"]["name"], errors["model"]["status"]) == ("NotFoundError", 404)
    assert errors["model"]["code"] == "model_not_found" and "/v1/models" in errors["model"]["message"]
    assert (errors["field"]["name"], errors["field"]["param"]) == ("BadRequestError", "temperature")
    assert errors["field"]["id"]
    assert errors["key"]["name"] == "AuthenticationError"
    assert errors["timeout"]["name"] == "APIConnectionTimeoutError"


def test_leaving_a_stream(said: dict[str, Any]):
    assert said["aborted"] >= 3  # and the fixture saw the server stop


@needs_npm("openai", "ai", "@ai-sdk/openai-compatible")
def test_embeddings(embedder: Served, script: Script):
    made = script("openai_embeddings.mjs", embedder)
    assert len(made["openai"]) == 3 and len(made["openai"][0]) == 576
    assert made["usage"]["prompt_tokens"] > 3
    for one, other in zip(made["openai"], made["ai"], strict=True):
        assert one == pytest.approx(other, abs=1e-6)
    assert made["openai"][0] != made["openai"][1]
