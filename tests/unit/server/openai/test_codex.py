"""A body as Codex sends it, whole: it streams to its end, and what has no effect is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.chat.types import CallPart, Chunk
from tests.unit.server.fakes import client_for
from tests.unit.server.openai.test_responses import DONE, caller, kinds, noted, told

BODY: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "codex.json").read_text())
SCRIPT = (
    Chunk(reasoning="Again.", tokens=[65]),
    Chunk(text="Reading.", tokens=[66]),
    Chunk(calls=[CallPart(0, "call_3", "mcp__files__read", '{"path":"a"}')], tokens=[67]),
    Chunk(finish="stop", receipt=DONE),
)


async def test_a_whole_body_of_a_model_that_reasons():
    completer = caller(*SCRIPT)
    completer.info = msgspec.structs.replace(completer.info, context=4000)
    async with client_for(completer) as http:
        r = await http.post("/v1/responses", json=BODY)
        after = [*BODY["input"], *told(r.text)[-1]["response"]["output"]]
        after.append({"type": "function_call_output", "call_id": "call_3", "output": "x"})
        again = await http.post("/v1/responses", json=BODY | {"input": after})
    events = told(r.text)
    assert kinds(events)[-1] == kinds(told(again.text))[-1] == "completed"
    response = events[-1]["response"]
    assert noted(response) == ["text.verbosity", "service_tier", "tools[2]"]
    thought, said, call = response["output"]
    assert thought["encrypted_content"] and thought["summary"][0]["text"] == "Again."
    assert said["content"][0]["text"] == "Reading."
    assert (call["namespace"], call["name"], call["call_id"]) == ("mcp__files", "read", "call_3")
    assert response["store"] is False and response["prompt_cache_key"] == BODY["prompt_cache_key"]
    turns, kwargs = completer.rendered[0]
    assert [turn["role"] for turn in turns] == ["system", "user", "user", "assistant", "tool", "tool"]
    assert turns[3]["reasoning_content"] == "I should look." and turns[3]["content"] == "Looking."
    assert [one["function"]["name"] for one in turns[3]["tool_calls"]] == ["exec_command", "mcp__files__read"]
    assert [one["function"]["name"] for one in kwargs["tools"]] == ["exec_command", "mcp__files__read"]
    assert kwargs["enable_thinking"] is True


async def test_a_whole_body_of_a_model_that_only_calls():
    completer = caller(*SCRIPT[1:], source="{{ messages }} tools")
    completer.info = msgspec.structs.replace(completer.info, context=4000)
    completer.answer_format = SimpleNamespace(name="fake", reasons=False, calls=True, markers=())
    async with client_for(completer) as http:
        events = told((await http.post("/v1/responses", json=BODY)).text)
    assert kinds(events)[-1] == "completed"
    assert noted(events[0]["response"]) == [
        *("reasoning.effort", "reasoning.summary", "text.verbosity", "service_tier", "tools[2]")
    ]
    assert events[-1]["response"]["reasoning"] == {"effort": None, "summary": None}


# What Codex sends with models that it knows: of patches, searches for tools, code mode and summaries. Long texts are cut.
MORE: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "codex-more.json").read_text())
SHOWN = {
    "search": [
        "exec_command",
        "apply_patch",
        "view_image",
        "tool_search",
        "mcp__tracker__create_ticket",
        "mcp__tracker__delete_ticket",
    ],
    "found": [
        "exec_command",
        "apply_patch",
        "view_image",
        "tool_search",
        "mcp__tracker__create_ticket",
        "mcp__tracker__delete_ticket",
    ],
    "patch": ["exec_command", "apply_patch", "view_image", "tool_search"],
    "code_mode": [
        "functions__exec",
        "functions__wait",
        "clock__sleep",
        "collaboration__followup_task",
        "collaboration__interrupt_agent",
    ],
    "compaction": ["exec_command", "apply_patch", "view_image", "tool_search"],
    "compacted": ["exec_command", "apply_patch", "view_image", "tool_search"],
}
LAST_ITEM = {"compaction": "compaction"}


@pytest.mark.parametrize("name", SHOWN)
async def test_bodies_of_codex_with_a_model_that_it_knows(name: str):
    completer = caller(*SCRIPT[:2], SCRIPT[-1])
    completer.info = msgspec.structs.replace(completer.info, context=40_000)
    async with client_for(completer) as http:
        events = told((await http.post("/v1/responses", json=MORE[name])).text)
    response = events[-1]["response"]
    assert (kinds(events)[-1], response["output"][-1]["type"]) == ("completed", LAST_ITEM.get(name, "message"))
    assert [one["function"]["name"] for one in completer.rendered[-1][1]["tools"]] == SHOWN[name]
    grammars = [one.name for one in completer.asked[-1][0].tools if one.grammar is not None]
    assert grammars == ([] if name == "compaction" else ["functions__exec"] if name == "code_mode" else ["apply_patch"])
