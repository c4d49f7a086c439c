"""`custom` tools in /v1/chat/completions: texts in place of arguments, whole and streamed, read by OpenAI's own client."""

from __future__ import annotations

import copy
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion

from quire.chat.types import CallPart, Chunk
from tests.unit.server.fakes import MODEL, client_for, events
from tests.unit.server.openai.test_responses_calls import calls

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
DEFINITION = 'start: "a" "b"+\n'
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": DEFINITION}}
WRITE = {"type": "custom", "custom": {"name": "write", "description": "Writes.", "format": LARK}}
SAY = {"type": "custom", "custom": {"name": "say"}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TOOLS = [WRITE, SAY, LOOK]


async def post(http: httpx.AsyncClient, **fields: Any) -> Any:
    r = await http.post(CHAT, json=HI | fields)
    assert r.status_code == 200, r.text
    return r.json()


async def streamed(http: httpx.AsyncClient, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The deltas of calls, and what OpenAI's client makes of them all."""
    r = await http.post(CHAT, json=HI | fields | {"stream": True})
    assert r.status_code == 200, r.text
    whole: dict[Any, Any] = {}
    told: list[dict[str, Any]] = []
    for chunk in events(r.text):
        if chunk == "[DONE]" or not chunk["choices"]:
            continue
        delta = chunk["choices"][0]["delta"]
        told += copy.deepcopy(delta.get("tool_calls", []))
        whole = accumulate_delta(whole, delta)
    return told, whole


@pytest.mark.parametrize("cut", [1, 3, 7, 100])
async def test_texts_come_back_as_texts(cut: int):
    completer = calls(
        ("write", '{"input": "a\\n\\"é\\ud83d\\ude00"}'),
        ("look", '{"input": "x"}'),
        ("say", '{"input":""}'),
        ("say", "just so"),
        cut=cut,
    )
    async with client_for(completer) as http:
        body = await post(http, tools=TOOLS)
        told, whole = await streamed(http, tools=TOOLS)
    ChatCompletion.model_validate(body, strict=True)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"] == [
        {"id": "call_0", "type": "custom", "custom": {"name": "write", "input": 'a\n"é😀'}},
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"input": "x"}'}},
        {"id": "call_2", "type": "custom", "custom": {"name": "say", "input": ""}},
        {"id": "call_3", "type": "custom", "custom": {"name": "say", "input": "just so"}},
    ]
    joined = [{k: v for k, v in one.items() if k != "index"} for one in whole["tool_calls"]]
    assert joined == choice["message"]["tool_calls"]
    assert [one["index"] for one in told] == sorted(one["index"] for one in told)
    assert all("function" not in one for one in told if one["index"] != 1)
    if cut == 3:
        assert len([one for one in told if one["index"] == 0]) > 3


async def test_a_text_whose_end_comes_with_the_next_call():
    """One chunk may have the end of one call and the beginning of the next; each call is told once in it."""
    completer = calls(("say", "x"))
    completer.script = [
        Chunk(calls=[CallPart(0, "c0", "say")], tokens=[65]),
        Chunk(calls=[CallPart(0, arguments="ju"), CallPart(0, arguments="st"), CallPart(1, "c1", "say")], tokens=[66]),
        Chunk(calls=[CallPart(1, arguments='{"cmd": "y"}')], tokens=[67], finish="stop"),
    ]
    async with client_for(completer) as http:
        told, whole = await streamed(http, tools=TOOLS)
    assert [(one["index"], one["custom"]["input"]) for one in told] == [(0, ""), (0, "just"), (1, ""), (1, "y")]
    assert [one["custom"]["input"] for one in whole["tool_calls"]] == ["just", "y"]


async def test_the_official_client():
    completer = calls(("write", '{"input": "ab"}'))
    async with client_for(completer) as http:
        theirs: Any = http
        client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=theirs, max_retries=0)
        asked: Any = HI | {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "write"}}}
        whole = await client.chat.completions.create(**asked)
        found: Any = whole.choices[0].message.tool_calls
        (call,) = found
        assert call.type == "custom" and (call.custom.name, call.custom.input) == ("write", "ab")
        joined: Any = {}
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            if chunk.choices:
                delta: Any = chunk.choices[0].delta.to_dict()
                joined = accumulate_delta(joined, delta)
        assert joined["tool_calls"][0]["custom"] == {"name": "write", "input": "ab"}
        # and its answer goes back as it came
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        back: Any = asked | {"messages": [*HI["messages"], whole.choices[0].message.to_dict(), result]}
        await client.chat.completions.create(**back)
    turns = completer.rendered[-1][0]
    assert turns[1]["tool_calls"][0]["function"] == {"name": "write", "arguments": '{"input": "ab"}'}
    assert (turns[2]["role"], turns[2]["name"], turns[2]["content"]) == ("tool", "write", "done")
    tools = completer.asked[-1][0]
    written, said, _ = tools.tools
    assert (tools.choice, tools.name) == ("named", "write")
    assert written.grammar and (written.grammar.kind, written.grammar.text) == ("lark", DEFINITION)
    assert written.strict and said.grammar is None and "Lark grammar" in written.description


async def test_allowed_tools_and_text_formats():
    completer = calls(("say", '{"input": "x"}'))
    plain = {"type": "custom", "custom": {"name": "note", "format": {"type": "text"}}}
    mode = {
        "mode": "required",
        "tools": [{"type": "custom", "custom": {"name": "note"}}, LOOK | {"function": {"name": "look"}}],
    }
    async with client_for(completer) as http:
        await post(http, tools=[*TOOLS, plain], tool_choice={"type": "allowed_tools", "allowed_tools": mode})
    tools = completer.asked[-1][0]
    assert (tools.choice, [one.name for one in tools.tools]) == ("required", ["look", "note"])
    assert tools.tools[1].grammar is None


def custom(**fields: Any) -> dict[str, Any]:
    return {"tools": [LOOK, {"type": "custom", "custom": {"name": "f", **fields}}]}


AT = "tools[1].custom"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [SAY, SAY]}, "tools[1].function.name"),
        (custom(name="a b"), f"{AT}.name"),
        (custom(name="look"), "tools[1].function.name"),
        (custom(x=1), f"{AT}.x"),
        (custom(format={"type": "json"}), f"{AT}.format.type"),
        (custom(format={"type": "grammar"}), f"{AT}.format.grammar"),
        (custom(format={"type": "grammar", "grammar": {"syntax": "gbnf", "definition": "x"}}), f"{AT}.format.syntax"),
        (custom(format={"type": "grammar", "grammar": {"syntax": "lark"}}), f"{AT}.format.grammar.definition"),
        ({"tools": [SAY], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tools": [SAY], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"messages": [*HI["messages"], {"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}]}, "messages[1].tool_calls[0].custom.input"),
    ],
)  # fmt: skip
async def test_what_is_refused(fields: dict[str, Any], param: str):
    completer = calls(("say", "{}"))
    async with client_for(completer, strict=True) as http:
        r = await http.post(CHAT, json=HI | fields)
    assert r.status_code == 400 and r.json()["error"]["param"] == param, r.text
    assert not completer.seen
