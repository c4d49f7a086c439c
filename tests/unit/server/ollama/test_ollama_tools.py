"""Tools and thinking at /api/chat and /api/generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from ollama import ChatResponse, GenerateResponse

from quire.chat.tools.types import Tool, Tools
from quire.chat.types import Chunk
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for
from tests.unit.server.ollama.test_ollama import lines
from tests.unit.server.scripts import FUNCTION, OTHER, THINKS_AND_CALLS, Bench, bench, call, script, scripts

CHAT, GENERATE = "/api/chat", "/api/generate"
TALK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TOLD = [
    {"id": "call_0x", "function": {"index": 0, "name": "weather", "arguments": {"city": "Paris"}}},
    {"id": "call_1x", "function": {"index": 1, "name": "time", "arguments": {}}},
]


def caller(chunks: list[Chunk] | None = None) -> FakeCompleter:
    made = FakeCompleter(context=400)
    made.answer_format = CALLER
    made.script = THINKS_AND_CALLS if chunks is None else chunks
    return made


async def answer(completer: FakeCompleter, path: str = CHAT, **fields: Any) -> Any:
    async with client_for(completer) as http:
        r = await http.post(path, json=TALK | fields if path == CHAT else {"model": MODEL, "prompt": "hi"} | fields)
    assert r.status_code == 200, r.text
    return lines(r.text) if fields.get("stream", True) else r.json()


async def test_whole():
    completer = caller()
    body = await answer(completer, stream=False, tools=[FUNCTION, OTHER])
    ChatResponse.model_validate(body)
    assert body["message"] == {
        "role": "assistant",
        "content": "I ask.",
        "thinking": "Let me see.",
        "tool_calls": TOLD,
    }
    assert (body["done_reason"], body["eval_count"]) == ("stop", 10)
    # From the receipt.
    assert (body["prompt_eval_duration"], body["eval_duration"]) == (250_000_000, 500_000_000)
    weather = Tool("weather", "The weather in a city.", FUNCTION["function"]["parameters"])
    assert completer.asked == [(Tools((weather, Tool("time"))), None)]
    assert [t["function"]["name"] for t in completer.rendered[0][1]["tools"]] == ["weather", "time"]


async def test_lines():
    found = await answer(caller(), tools=[FUNCTION])
    for line in found:
        ChatResponse.model_validate(line)
    # A call is told when it is whole: when the next begins, or the answer ends.
    assert [n["message"] for n in found] == [
        {"role": "assistant", "content": "", "thinking": "Let me "},
        {"role": "assistant", "content": "", "thinking": "see."},
        {"role": "assistant", "content": "I ask."},
        {"role": "assistant", "content": "", "tool_calls": TOLD[:1]},
        {"role": "assistant", "content": "", "tool_calls": TOLD[1:]},
        {"role": "assistant", "content": ""},
    ]
    assert [n["done"] for n in found] == [False] * 5 + [True]


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as one:
        yield one


@settings(max_examples=60, deadline=None)
@given(made=scripts())
def test_lines_put_together_are_the_whole_answer(server: Bench, made: Any):
    chunks, reasoning, text, calls = made
    whole = server.post(chunks, CHAT, TALK | {"stream": False}).json()
    found = lines(server.post(chunks, CHAT, TALK).text)
    messages = [n["message"] for n in found]
    assert "".join(m["content"] for m in messages) == whole["message"]["content"] == text
    assert "".join(m.get("thinking", "") for m in messages) == whole["message"].get("thinking", "") == reasoning
    told = [c for m in messages for c in m.get("tool_calls", [])]
    assert told == whole["message"].get("tool_calls", [])
    assert [c["function"]["arguments"] for c in told] == [json.loads(c.arguments) for c in calls]
    assert found[-1]["done_reason"] == whole["done_reason"]


async def test_a_call_that_is_cut_is_told_in_a_note():
    cut = script(*call(0, "time", "{}"), *call(1, "weather", '{"city": "Pa'), finish="length")
    for stream in (False, True):
        body = await answer(caller(cut), stream=stream)
        last = body[-1] if stream else body
        assert last["done_reason"] == "length"
        (note,) = last["quire"]["notes"]
        assert "weather" in note and '{"city": "Pa' in note
        found = [n["message"] for n in body] if stream else [body["message"]]
        assert [c["function"]["name"] for m in found for c in m.get("tool_calls", [])] == ["time"]


async def test_generate_thinks():
    thoughts = script(Chunk(reasoning="Hm."), Chunk(text="Yes."))
    body = await answer(caller(thoughts), GENERATE, stream=False)
    GenerateResponse.model_validate(body)
    assert (body["response"], body["thinking"]) == ("Yes.", "Hm.")
    found = await answer(caller(thoughts), GENERATE)
    assert [(n["response"], n.get("thinking")) for n in found] == [("", "Hm."), ("Yes.", None), ("", None)]
    raw = caller(thoughts)
    await answer(raw, GENERATE, raw=True)
    assert raw.asked == [] and raw.seen[0].reading is None  # told as it comes


@pytest.mark.parametrize("ids", [{}, {"tool_call_id": "one-that-no-call-has"}])
async def test_a_tool_loop_reaches_the_template(ids: dict[str, str]):
    asks = [{"function": {"name": "weather", "arguments": {"city": c}}} for c in ("Paris", "Rome")]
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "thinking": "I ask.",
            "tool_calls": [*asks, {"function": {"name": "time"}}],
        },
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "tool_name": "weather", "content": "rain", **ids},
        {"role": "tool", "content": "sun", **ids},
    ]
    completer = caller()
    await answer(completer, messages=messages)
    turns = completer.rendered[0][0]
    calls = turns[1].pop("tool_calls")
    assert turns[1] == {"role": "assistant", "content": "", "reasoning_content": "I ask."}
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("weather", '{"city":"Paris"}'),
        ("weather", '{"city":"Rome"}'),
        ("time", "{}"),
    ]
    paris, rome, noon = (c["id"] for c in calls)
    assert all(len(i) == 9 and i.isalnum() for i in (paris, rome, noon))
    assert turns[2:] == [
        {"role": "tool", "content": "noon", "tool_call_id": noon, "name": "time"},
        {"role": "tool", "content": "rain", "tool_call_id": paris, "name": "weather"},
        {"role": "tool", "content": "sun", "tool_call_id": rome, "name": "weather"},
    ]


SWITCH = "{{ messages }} {{ enable_thinking }}"
LEVEL = "{{ messages }} {{ reasoning_effort }}"


@pytest.mark.parametrize(
    ("source", "reasons", "think", "kwargs"),
    [
        (SWITCH, True, None, {}),
        (SWITCH, True, True, {"enable_thinking": True}),
        (SWITCH, True, "true", {"enable_thinking": True}),
        (SWITCH, True, False, {"enable_thinking": False}),
        (SWITCH, True, "high", {"enable_thinking": True}),
        (LEVEL, True, "low", {"reasoning_effort": "low"}),
        (LEVEL, True, True, {}),
        (LEVEL, True, False, None),
        ("{{ messages }}", False, False, {}),
        ("{{ messages }}", False, True, None),
        ("{{ messages }}", False, "low", None),
        (SWITCH, True, "much", None),
    ],
)
@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_think(path: str, source: str, reasons: bool, think: Any, kwargs: dict[str, Any] | None):
    completer = caller()
    completer.template = FakeTemplate(source)
    completer.answer_format = type(CALLER)(name="x", reasons=reasons, calls=True, markers=())
    async with client_for(completer) as http:
        body = (TALK if path == CHAT else {"model": MODEL, "prompt": "hi"}) | {"think": think}
        r = await http.post(path, json=body)
    if kwargs is None:
        assert r.status_code == 400 and "think" in r.json()["error"]
        return
    assert r.status_code == 200, r.text
    assert completer.rendered[0][1] == kwargs | {"add_generation_prompt": True}


NUMBERED = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "weather"}}]}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [*TALK["messages"], message]}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [OTHER, OTHER]}, "already"),
        ({"tools": 5}, "tools"),
        (said(role="tool", content="x"), "messages[1]: there is no call before it"),
        (said(role="tool", content="x", tool_name="f"), "'f'"),
        (said(role="tool", content="x", tool_call_id="c9"), "'c9'"),
        ({"messages": [*TALK["messages"], NUMBERED, {"role": "tool", "content": "x", "tool_call_id": "c9"}]}, "'c9'"),
        (said(role="user", content="x", thinking="y"), "messages[1].thinking"),
        (said(role="user", content="x", tool_name="y"), "messages[1].tool_name"),
        (said(role="user", content="x", images=["aGk="]), "messages[1].images"),
        (said(role="assistant", tool_calls=[{"function": {"name": "a b"}}]), "messages[1].tool_calls[0].function.name"),
        (said(role="assistant", tool_calls=[{}]), "tool_calls[0]"),
        (said(role="robot", content="x"), "messages[1].role"),
    ],
)
async def test_refusals(fields: dict[str, Any], names: str):
    completer = caller()
    async with client_for(completer) as http:
        r = await http.post(CHAT, json=TALK | fields)
    assert r.status_code == 400 and not completer.seen
    assert names in r.json()["error"], r.text


async def test_a_model_whose_template_has_no_tools_and_no_thinking():
    async with client_for(FakeCompleter()) as http:
        r = await http.post(CHAT, json=TALK | {"tools": [OTHER], "stream": False})
        assert r.status_code == 200 and "general prompt" in r.json()["quire"]["notes"][0]
