"""Every kind of request that six coding agents really send, replayed: answered in full, streamed and not, as each one's API has it.

The requests were recorded from the agents themselves and made fit to be kept: python -m tests.e2e.clients.agents.record
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.chat.types import Chunk
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for, events
from tests.unit.server.scripts import call, script

REQUESTS: list[dict[str, Any]] = json.loads(lzma.decompress((Path(__file__).parent / "requests.json.xz").read_bytes()))
SAID = "It is done."
COUNT = "/v1/messages/count_tokens"


def name_of(request: dict[str, Any]) -> str:
    """The agent and the number of its request."""
    own = [one for one in REQUESTS if one["agent"] == request["agent"]]
    return f"{request['agent']}-{own.index(request) + 1}"


def tools_of(body: dict[str, Any]) -> list[str]:
    """The tools of a request as the model sees them, in any of the APIs' shapes."""
    names = []
    for tool in body.get("tools") or []:
        if tool.get("type") == "namespace":
            names += [f"{tool['name']}__{inner['name']}" for inner in tool["tools"]]
        elif tool.get("type") != "web_search":  # of the servers of OpenAI
            names.append(tool.get("function", tool)["name"])
    return names


def completer_for(tools: list[str]) -> FakeCompleter:
    """A model that says something, and calls the first tool if there is one."""
    made = FakeCompleter()
    made.info = msgspec.structs.replace(made.info, context=4_000_000)
    made.template = FakeTemplate("{{ messages }} {{ tools }}")
    made.answer_format = type(CALLER)(name="fake", reasons=False, calls=True, markers=())
    made.script = script(Chunk(text=SAID), *(call(0, tools[0], '{"a": ', "1}") if tools else []))
    return made


def chat(told: list[Any]) -> tuple[str, str, str]:
    choice = [one["choices"][0] for one in told if one.get("choices")]
    parts = [one["delta"] if "delta" in one else one["message"] for one in choice]
    calls = [c["function"] for part in parts for c in part.get("tool_calls") or []]
    return (
        "".join(part.get("content") or "" for part in parts),
        "".join(c.get("name") or "" for c in calls),
        "".join(c.get("arguments") or "" for c in calls),
    )


def responses(told: list[Any]) -> tuple[str, str, str]:
    whole = told[-1].get("response", told[-1])
    assert whole["status"] == "completed"
    texts = [part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    names = [f"{c['namespace']}__{c['name']}" if c.get("namespace") else c["name"] for c in calls]
    return "".join(texts), "".join(names), "".join(c["arguments"] for c in calls)


def messages(told: list[Any]) -> tuple[str, str, str]:
    if told[0]["type"] == "message":  # whole
        blocks = told[0]["content"]
        calls = [b for b in blocks if b["type"] == "tool_use"]
        texts = [b["text"] for b in blocks if b["type"] == "text"]
        return "".join(texts), "".join(c["name"] for c in calls), "".join(json.dumps(c["input"]) for c in calls)
    assert [told[0]["type"], told[-1]["type"]] == ["message_start", "message_stop"]
    begun = [e["content_block"] for e in told if e["type"] == "content_block_start"]
    deltas = [e["delta"] for e in told if e["type"] == "content_block_delta"]
    return (
        "".join(d.get("text", "") for d in deltas),
        "".join(b["name"] for b in begun if b["type"] == "tool_use"),
        "".join(d.get("partial_json", "") for d in deltas),
    )


READ = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": messages}


def test_each_agent_and_each_kind_of_request_is_there():
    kinds = {(one["agent"], one["path"].partition("?")[0]) for one in REQUESTS}
    chats = {(name, "/v1/chat/completions") for name in ("opencode", "qwen", "aider", "llm")}
    assert kinds == {*chats, ("codex", "/v1/responses"), ("claude", "/v1/messages"), ("claude", COUNT)}
    for name in ("codex", "claude", "opencode", "qwen"):
        bodies = [one["body"] for one in REQUESTS if one["agent"] == name]
        assert {True, False} == {bool(tools_of(body)) for body in bodies}, (
            "a task with tools, and a title or summary without"
        )


def test_nothing_is_kept_of_the_machine_and_of_the_prompts():
    text = json.dumps([one["body"] for one in REQUESTS])
    for word in ("/tmp", "/home", "/root", "You are", "Claude", "Codex", "the user"):
        assert word not in text, word


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("request_", [r for r in REQUESTS if not r["path"].startswith(COUNT)], ids=name_of)
async def test_a_request_is_answered(request_: dict[str, Any], stream: bool):
    path = request_["path"].partition("?")[0]
    body = request_["body"] | {"model": MODEL, "stream": stream}
    if not stream:
        body.pop("stream_options", None)
    tools = tools_of(body)
    completer = completer_for(tools)
    async with client_for(completer) as http:
        r = await http.post(request_["path"], headers=request_["headers"], json=body)
    assert r.status_code == 200, r.text
    if stream:
        assert r.headers["content-type"].startswith("text/event-stream")
        told = [one for one in events_of(r.text) if one != "[DONE]"]
    else:
        told = [r.json()]
    said, called, arguments = READ[path](told)
    assert (said, called) == (SAID, tools[0] if tools else "")
    assert not tools or json.loads(arguments) == {"a": 1}
    turns, kwargs = completer.rendered[0]
    assert [one["function"]["name"] for one in kwargs.get("tools") or []] == tools
    assert {turn["role"] for turn in turns} <= {"system", "user", "assistant", "tool"}


@pytest.mark.parametrize("request_", [r for r in REQUESTS if r["path"].startswith(COUNT)], ids=name_of)
async def test_a_request_is_counted(request_: dict[str, Any]):
    async with client_for(completer_for([])) as http:
        r = await http.post(request_["path"], headers=request_["headers"], json=request_["body"] | {"model": MODEL})
    assert r.status_code == 200, r.text
    assert r.json()["input_tokens"] > 0


def events_of(text: str) -> list[Any]:
    """The data of an event stream, with or without names of events."""
    blocks = [block.partition("data: ")[2] for block in text.split("\n\n") if "data: " in block]
    return [one for data in blocks for one in events(f"data: {data}")]
