"""npm's `ollama` package: lists, chat, streams, tools in a loop, formats, thinking, errors, leaving early."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.clients.conftest import TOLD, Script, Served, needs_npm

pytestmark = needs_npm("ollama")


@pytest.fixture(scope="module")
def said(served: Served, script: Script) -> dict[str, Any]:
    with served.stops_early():
        return script("ollama.mjs", served)


def test_what_is_here(said: dict[str, Any], served: Served):
    assert said["models"][0] == served.model and said["running"] == [served.model]
    assert {"completion", "tools", "thinking"} <= set(said["shown"])


def test_chat_and_stream(said: dict[str, Any]):
    assert said["whole"] == said["stream"]
    assert said["whole"]["text"] == said["generated"] != ""
    assert said["whole"]["done"] is True and said["whole"]["count"] > 0


@pytest.mark.parametrize("way", ["loop", "streamedLoop"])
def test_tools_in_a_loop(said: dict[str, Any], way: str):
    assert said[way] == {"told": TOLD, "calls": [["get_weather", {"city": "Paris"}]]}


def test_a_format_and_thinking(said: dict[str, Any]):
    assert said["format"]["city"] in ("Paris", "Rome") and 1 <= said["format"]["rank"] <= 9
    assert said["thought"]["thinking"]


def test_errors(said: dict[str, Any], served: Served):
    errors = said["errors"]
    assert (errors["model"]["name"], errors["model"]["status"]) == ("ResponseError", 404)
    assert served.model in errors["model"]["message"]
    assert errors["option"]["status"] == 400 and "temperature" in errors["option"]["message"]
    assert errors["key"]["status"] == 401 and "API key" in errors["key"]["message"]
    assert errors["timeout"]["name"] == "TimeoutError"


def test_leaving_a_stream(said: dict[str, Any]):
    assert said["aborted"]["parts"] == 3 and said["aborted"]["name"] == "AbortError"
