"""The scripted model (tests/scripted) behind the real completer, template and dialects: a loop of two calls, exactly as planned, by three APIs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.chat.completer import Completer
from tests.scripted.model import Script, ScriptedClient, scripted
from tests.unit.server.fakes import MODEL, client_for, service_over

TEMPLATE = Path(__file__).resolve().parents[3] / "e2e" / "clients" / "tools.jinja"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PLAN = {
    "rules": [
        {
            "match": "MEND",
            "turns": [
                {"text": "I look.", "calls": [["read", {"path": "a é.txt"}]]},
                {
                    "text": "And again.",
                    "reasoning": "Twice is sure.",
                    "calls": [["read", {"path": "{found}"}]],
                    "find": r"see (\w+)",
                },
                {"text": "It says {found}.", "find": r"see (\w+)"},
            ],
        }
    ]
}


@pytest.fixture(scope="module")
def model(model_path: Path) -> tuple[ScriptedClient, Completer]:
    return scripted(msgspec.convert(PLAN, Script), model_path, name=MODEL, template=TEMPLATE)


async def post(model: Any, path: str, body: dict[str, Any]) -> Any:
    async with client_for(service=service_over(model[1])) as http:
        r = await http.post(path, json={"model": MODEL, **body})
    assert r.status_code == 200, r.text
    return r.json()


async def test_by_chat_completions(model: tuple[ScriptedClient, Completer]):
    tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
    said: list[Any] = [{"role": "user", "content": "MEND it."}]
    for text, path, result in (("I look.", "a é.txt", "see one"), ("And again.", "one", "see two")):
        message = (await post(model, "/v1/chat/completions", {"messages": said, "tools": tools}))["choices"][0][
            "message"
        ]
        assert message["content"].strip() == text
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"path": path}
        said += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": result}]
    answer = await post(model, "/v1/chat/completions", {"messages": said, "tools": tools})
    assert answer["choices"][0]["message"]["content"].strip() == "It says two."
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert 0 < usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 64, "the rest was said before"


async def test_by_messages_with_reasoning(model: tuple[ScriptedClient, Completer]):
    tools = [{"name": "read", "input_schema": SCHEMA}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    said: list[Any] = [{"role": "user", "content": "MEND it."}]
    for path, result, thought in (("a é.txt", "see one", "Well."), ("one", "see two", "Twice is sure.")):
        body = {"messages": said, "tools": tools, "thinking": thinking, "max_tokens": 2000}
        content = (await post(model, "/v1/messages", body))["content"]
        assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
        assert (content[0]["thinking"].strip(), content[2]["input"]) == (thought, {"path": path})
        answer = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": result}
        said += [{"role": "assistant", "content": content}, {"role": "user", "content": [answer]}]
    body = {"messages": said, "tools": tools, "max_tokens": 2000}
    assert (await post(model, "/v1/messages", body))["content"][-1]["text"].strip() == "It says two."


async def test_by_responses(model: tuple[ScriptedClient, Completer]):
    tools = [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]
    said: list[Any] = [{"role": "user", "content": "MEND it."}]
    for path, result in (("a é.txt", "see one"), ("one", "see two")):
        output = (await post(model, "/v1/responses", {"input": said, "tools": tools, "store": False}))["output"]
        call = output[-1]
        assert (call["type"], json.loads(call["arguments"])) == ("function_call", {"path": path})
        said += [*output, {"type": "function_call_output", "call_id": call["call_id"], "output": result}]
    output = (await post(model, "/v1/responses", {"input": said, "tools": tools, "store": False}))["output"]
    assert output[-1]["content"][0]["text"].strip() == "It says two."


async def test_what_is_not_planned_is_an_error(model: Any):
    async with client_for(service=service_over(model[1])) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello."}]}
        r = await http.post("/v1/chat/completions", json=body)
    assert r.status_code == 400 and "the script has no answer" in r.text
