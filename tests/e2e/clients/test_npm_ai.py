"""npm's `ai` (the Vercel AI SDK) over chat completions and over Responses: steps with tools, objects, reasoning, leaving."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.clients.conftest import TOLD, Script, Served, needs_npm

pytestmark = needs_npm("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")


@pytest.fixture(scope="module")
def both(served: Served, script: Script) -> dict[str, Any]:
    with served.stops_early():
        return script("ai.mjs", served)


@pytest.fixture(params=["chat", "responses"])
def said(both: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    return both[request.param]


def test_text_and_stream(both: dict[str, Any], said: dict[str, Any]):
    assert said["whole"] == said["stream"]
    assert said["whole"]["text"] and said["whole"]["finish"] in ("stop", "length") and said["whole"]["tokens"] > 0
    assert both["chat"]["whole"]["text"] == both["responses"]["whole"]["text"]


@pytest.mark.parametrize("way", ["loop", "streamedLoop"])
def test_tools_in_a_loop(said: dict[str, Any], way: str):
    assert said[way] == {"told": TOLD, "steps": 2, "asked": ["Paris"]}


def test_a_demanded_call(said: dict[str, Any]):
    for name, arguments in said["forced"]:
        assert name == "note" and arguments["name"] in ("Paris", "Rome") and 1 <= arguments["rank"] <= 9
    assert said["forced"]


def test_objects(said: dict[str, Any]):
    assert said["object"] == said["streamedObject"] and said["partials"] > 1
    assert said["object"]["name"] in ("Paris", "Rome") and 1 <= said["object"]["rank"] <= 9


def test_errors_time_limits_and_leaving(said: dict[str, Any]):
    setting = said["errors"]["setting"]
    assert (setting["name"], setting["status"]) == ("AI_APICallError", 400) and "temperature" in setting["message"]
    assert said["errors"]["timeout"]["name"] in ("TimeoutError", "AbortError")
    assert said["aborted"] == "abort"


def test_a_stranger_and_a_key(both: dict[str, Any]):
    errors = both["chat"]["errors"]
    assert errors["model"]["status"] == 404 and "/v1/models" in errors["model"]["message"]
    assert errors["key"]["status"] == 401 and "API key" in errors["key"]["message"]


def test_reasoning(both: dict[str, Any]):
    thought = both["chat"]["thought"]
    assert thought["reasoning"] and thought == both["chat"]["streamedThought"]
