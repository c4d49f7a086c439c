"""Tools and thinking at /v1/messages: blocks in, blocks out, every event of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from pydantic import TypeAdapter

from quire.chat.tools.types import Tool, Tools
from quire.chat.types import Chunk
from quire.engine.types import Constraint
from tests.effort import at_most
from tests.unit.server.anthropic.test_anthropic import events
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for
from tests.unit.server.scripts import THINKS_AND_CALLS, Bench, bench, call, script, scripts

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
TIME = {"name": "time", "input_schema": {"type": "object"}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def caller(chunks: list[Chunk] | None = None) -> FakeCompleter:
    made = FakeCompleter(context=400)
    made.answer_format = CALLER
    made.script = THINKS_AND_CALLS if chunks is None else chunks
    return made


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": USER, "tools": [WEATHER, TIME], **fields}


async def answer(completer: FakeCompleter, **fields: Any) -> Any:
    async with client_for(completer) as http:
        r = await http.post(MESSAGES, json=ask(**fields))
    assert r.status_code == 200, r.text
    return events(r.text) if fields.get("stream") else r.json()


def signature(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


async def test_thinking_text_and_calls_are_blocks():
    body = await answer(caller())
    Message.model_validate(body, strict=True)
    assert body["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": signature("Let me see.")},
        {"type": "text", "text": "I ask."},
        {"type": "tool_use", "id": "call_0x", "name": "weather", "input": {"city": "Paris"}},
        {"type": "tool_use", "id": "call_1x", "name": "time", "input": {}},
    ]
    assert (body["stop_reason"], body["stop_sequence"]) == ("tool_use", None)
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    assert body["usage"]["output_tokens"] == 10


async def test_every_event_of_a_stream():
    found = await answer(caller(), stream=True)
    for event in found:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    start = "content_block_start"
    assert [(e["type"], e.get("index"), e.get("delta", {}).get("type")) for e in found] == [
        ("message_start", None, None),
        ("ping", None, None),
        (start, 0, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        (start, 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        (start, 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        (start, 3, None),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert [e["content_block"] for e in found if e["type"] == start] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_0x", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_1x", "name": "time", "input": {}},
    ]
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def assembled(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that the events of a stream amount to."""
    content: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
            texts = []
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                content[-1]["signature"] = delta["signature"]
            else:
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                texts.append(delta[name[delta["type"]]])
        elif event["type"] == "content_block_stop":
            joined, kind = "".join(texts), content[-1]["type"]
            if kind == "tool_use":
                content[-1]["input"] = json.loads(joined)
            else:
                content[-1][kind] = joined
    return content


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as one:
        yield one


@settings(max_examples=60, deadline=None)
@given(made=scripts())
def test_a_stream_put_together_is_the_whole_answer(server: Bench, made: Any):
    chunks, reasoning, text, calls = made
    whole = server.post(chunks, MESSAGES, ask()).json()
    streamed = events(server.post(chunks, MESSAGES, ask(stream=True)).text)
    content = whole["content"]
    assert assembled(streamed) == content
    assert streamed[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert "".join(b["thinking"] for b in content if b["type"] == "thinking") == reasoning
    assert "".join(b["text"] for b in content if b["type"] == "text") == text
    assert [b["input"] for b in content if b["type"] == "tool_use"] == [json.loads(c.arguments) for c in calls]
    assert all(b.get("text", b.get("thinking", "x")) for b in content) or content == [{"type": "text", "text": ""}]


async def test_a_call_that_is_cut_has_what_came_of_it():
    cut = script(*call(0, "weather", '{"city": "Pa'), finish="length")
    body = await answer(caller(cut))
    assert body["stop_reason"] == "max_tokens"
    assert body["content"] == [
        {"type": "tool_use", "id": "call_0x", "name": "weather", "input": {}, "partial_json": '{"city": "Pa'}
    ]
    # And it may be sent back.
    completer = caller(script(Chunk(text="ok")))
    result = {"type": "tool_result", "tool_use_id": "call_0x", "content": "cut", "is_error": True}
    await answer(
        completer,
        messages=[*USER, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": [result]}],
    )
    assert completer.rendered[0][0][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Pa'


TOOLS = (Tool("weather", "The weather.", SCHEMA), Tool("time", "", {"type": "object"}))


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        (None, Tools(TOOLS)),
        ({"type": "auto"}, Tools(TOOLS)),
        ({"type": "auto", "disable_parallel_tool_use": True}, Tools(TOOLS, parallel=False)),
        ({"type": "any"}, Tools(TOOLS, "required")),
        ({"type": "any", "disable_parallel_tool_use": True}, Tools(TOOLS, "required", parallel=False)),
        ({"type": "tool", "name": "time"}, Tools(TOOLS, "named", "time")),
        ({"type": "none"}, Tools(choice="none")),
    ],
)
async def test_what_is_chosen_is_shown_counted_and_enforced(choice: Any, tools: Tools):
    completer = caller()
    fields = {} if choice is None else {"tool_choice": choice}
    await answer(completer, **fields)
    async with client_for(completer) as http:
        body = {k: v for k, v in ask(**fields).items() if k != "max_tokens"}
        assert (await http.post(COUNT, json=body)).status_code == 200
    assert completer.asked == [(tools, None)]
    for _, kwargs in completer.rendered:
        shown = [s["function"]["name"] for s in kwargs.get("tools", [])]
        assert shown == [one.name for one in tools.tools]


async def test_forms_of_tools():
    one = {
        "type": "custom",
        "name": "f",
        "input_schema": {"properties": {}},
        "strict": True,
        "cache_control": {"type": "ephemeral"},
        "eager_input_streaming": True,
        "input_examples": [],
        "defer_loading": False,
        "allowed_callers": ["direct"],
    }
    completer = caller()
    await answer(completer, tools=[one])
    assert completer.asked[0][0].tools == (Tool("f", "", {"properties": {}}, strict=True),)


USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
THOUGHT = {"type": "thinking", "thinking": "I ask.", "signature": "any"}


async def test_a_tool_loop_reaches_the_template():
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                THOUGHT,
                {"type": "text", "text": "Wait."},
                USE,
                USE | {"id": "t2", "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "assistant", "content": [USE | {"id": "t3"}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t3", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    completer = caller()
    await answer(completer, messages=messages)

    def called(id: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "weather", "arguments": '{"city":"Paris"}'}}

    assert completer.rendered[0][0] == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "I ask.",
            "tool_calls": [called("t1"), called("t2")],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "t1", "name": "weather"},
        {"role": "tool", "content": "Error: no such city", "tool_call_id": "t2", "name": "weather"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "", "tool_calls": [called("t3")]},
        {"role": "tool", "content": "", "tool_call_id": "t3", "name": "weather"},
    ]


async def test_turns_of_one_side_are_one():
    messages = [
        *USER,
        {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [THOUGHT, USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
    ]
    completer = caller()
    await answer(completer, messages=messages)
    merged = completer.rendered[0][0][1]
    assert (merged["content"], merged["reasoning_content"], len(merged["tool_calls"])) == ("a", "I ask.\nI ask.", 1)


async def test_an_answer_that_was_begun_goes_on():
    completer = caller(script(Chunk(text="B)")))
    messages = [*USER, {"role": "assistant", "content": "The best answer is ("}]
    body = await answer(completer, messages=messages)
    assert body["content"] == [{"type": "text", "text": "B)"}]
    assert completer.rendered[0][1] == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "tools": completer.rendered[0][1]["tools"],
    }


SWITCH = "{{ messages }} {{ enable_thinking }}"
LEVEL = "{{ messages }} {{ reasoning_effort }}"
ENABLED = {"type": "enabled", "budget_tokens": 2000}


@pytest.mark.parametrize(
    ("source", "reasons", "fields", "kwargs"),
    [
        (SWITCH, True, {}, {"enable_thinking": False}),  # no word is no thinking
        (SWITCH, True, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (SWITCH, True, {"thinking": ENABLED}, {"enable_thinking": True}),
        (SWITCH, True, {"thinking": ENABLED | {"display": "summarized"}}, {"enable_thinking": True}),
        (SWITCH, True, {"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (SWITCH, True, {"output_config": {"effort": "high"}}, {"enable_thinking": True}),
        (SWITCH + "thinking_budget", True, {"thinking": ENABLED}, {"enable_thinking": True, "thinking_budget": 2000}),
        (LEVEL, True, {}, {}),
        (LEVEL, True, {"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (LEVEL, True, {"output_config": {"effort": "low"}, "thinking": ENABLED}, {"reasoning_effort": "low"}),
        (LEVEL, True, {"thinking": ENABLED}, {}),  # it does in any case
        (LEVEL, True, {"thinking": {"type": "disabled"}}, "thinking"),
        ("{{ messages }}", False, {"thinking": {"type": "disabled"}}, {}),
        (SWITCH, True, {"output_config": {"effort": "x"}}, "output_config.effort"),
        (SWITCH, True, {"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        (SWITCH, True, {"thinking": ENABLED | {"budget_tokens": 0}}, "thinking.budget_tokens"),
        (SWITCH, True, {"thinking": ENABLED | {"display": "loud"}}, "thinking.display"),
        (SWITCH, True, {"thinking": {"type": "between_tools"}}, "thinking.type"),
        (SWITCH, True, {"thinking": {"type": "enabled", "x": 1}}, "thinking.x"),
    ],
)
async def test_thinking(source: str, reasons: bool, fields: dict[str, Any], kwargs: dict[str, Any] | str):
    completer = caller()
    completer.template = FakeTemplate(source)
    completer.answer_format = type(CALLER)(name="x", reasons=reasons, calls=True, markers=())
    async with client_for(completer, strict=True) as http:
        r = await http.post(MESSAGES, json=ask(tools=[], **fields))
    if isinstance(kwargs, str):
        assert r.status_code == 400
        assert r.json()["error"]["message"].startswith(kwargs), r.text
        return
    assert r.status_code == 200, r.text
    assert completer.rendered[0][1] == kwargs | {"add_generation_prompt": True}
    assert "quire" not in r.json()


@pytest.mark.parametrize(
    ("source", "reasons", "fields", "begins"),
    [
        ("", False, {"output_config": {"effort": "low"}}, ["output_config.effort is low"]),
        ("", True, {"output_config": {"effort": "high"}}, ["output_config.effort is high"]),  # as much as it will
        ("", True, {"output_config": {"effort": "minimal"}}, ["output_config.effort: the reasoning of"]),
        ("", False, {"thinking": ENABLED}, ["thinking: "]),
        ("", False, {"thinking": {"type": "adaptive"}}, ["thinking: "]),
        ("", False, {"thinking": ENABLED, "output_config": {"effort": "max"}}, ["output_config.effort", "thinking: "]),
        (LEVEL, False, {"thinking": {"type": "adaptive"}}, ["thinking: "]),
    ],
)
async def test_reasoning_that_a_model_cannot_do_is_told(
    source: str, reasons: bool, fields: dict[str, Any], begins: list[str]
):
    completer = caller(script(Chunk(text="ok")))
    completer.template = FakeTemplate("{{ messages }}" + source)
    completer.answer_format = type(CALLER)(name="x", reasons=reasons, calls=True, markers=())
    whole = await answer(completer, **fields)
    stream = await answer(completer, stream=True, **fields)
    async with client_for(completer) as http:
        count = await http.post(COUNT, json={k: v for k, v in ask(**fields).items() if k != "max_tokens"})
    for body in (whole, stream[0]["message"], count.json()):
        notes = body["quire"]["notes"]
        assert len(notes) == len(begins)
        for note, beginning in zip(notes, begins, strict=True):
            assert note.startswith(beginning) and note.endswith("; no effect")
    assert all(kwargs.keys() <= {"tools", "add_generation_prompt"} for _, kwargs in completer.rendered)


async def test_thinking_that_is_omitted_is_a_block_without_text():
    omitted = ENABLED | {"display": "omitted"}
    whole = await answer(caller(), thinking=omitted)
    streamed = await answer(caller(), thinking=omitted, stream=True)
    assert whole["content"][0] == {"type": "thinking", "thinking": "", "signature": signature("")}
    assert [b["type"] for b in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert assembled(streamed) == whole["content"] and "Let me see" not in json.dumps([whole, streamed])
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
    assert [note[:17] for note in whole["quire"]["notes"]] == ["thinking.display:"]


async def test_the_form_of_the_answer():
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields, param in (
        ({"output_config": {"format": form}}, "output_config.format"),
        ({"output_format": form}, "output_format"),
    ):
        completer = caller()
        await answer(completer, **fields)
        assert completer.asked[0][1] == Constraint(kind="json_schema", text='{"type":"object"}', param=param)


SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
LATER = TIME | {"defer_loading": True}
FOUND = {"type": "tool_reference", "tool_name": "time", "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    ("tools", "choice", "shown", "begins"),
    [
        ([WEATHER, SEARCH], None, ["weather"], ["tools.1: web_search_20250305 is a tool that a server runs"]),
        ([SEARCH, WEATHER], "any", ["weather"], ["tools.0: web_search_20250305 is a tool that a server runs"]),
        ([SEARCH], "auto", [], ["tools.0: web_search_20250305 is a tool that a server runs"]),
        ([SEARCH, WEATHER], "none", [], []),
        ([WEATHER, LATER], None, ["weather"], []),
        ([LATER], "auto", [], []),
        (
            [{"type": "tool_search_tool_regex_20251119", "name": "search"}, WEATHER, LATER],
            None,
            ["weather", "time"],
            ["tools.0: tool_search_tool_regex_20251119 is a tool that a server runs", "tools: nothing can search"],
        ),
    ],
)
async def test_tools_that_are_not_shown(tools: list[Any], choice: str | None, shown: list[str], begins: list[str]):
    completer = caller(script(Chunk(text="ok")))
    body = await answer(completer, tools=tools, **({"tool_choice": {"type": choice}} if choice else {}))
    assert [one.name for one in completer.asked[0][0].tools] == shown
    assert [s["function"]["name"] for s in completer.rendered[0][1].get("tools", [])] == shown
    notes = body.get("quire", {"notes": []})["notes"]
    assert len(notes) == len(begins) and all(n.startswith(b) for n, b in zip(notes, begins, strict=True)), notes


@pytest.mark.parametrize("found", [False, True])
async def test_a_deferred_tool_is_shown_once_a_result_refers_to_it(found: bool):
    completer = caller(script(Chunk(text="ok")))
    content = [{"type": "text", "text": "found"}, FOUND, FOUND] if found else "nothing"
    body = await answer(completer, tools=[LATER, WEATHER], **turn(RESULT | {"content": content}))
    assert [one.name for one in completer.asked[0][0].tools] == (["time", "weather"] if found else ["weather"])
    assert completer.rendered[0][0][-1]["content"] == ("found\ntime\ntime" if found else "nothing")
    assert "quire" not in body


async def test_a_deferred_tool_can_be_demanded():
    completer = caller()
    await answer(completer, tools=[LATER, WEATHER], tool_choice={"type": "tool", "name": "time"})
    assert completer.asked[0][0].name == "time" and len(completer.asked[0][0].tools) == 2


DEEP: Any = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*USER, {"role": "assistant", "content": [USE]}, {"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"tools": [{}]}, "tools.0.name: Field required"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [TIME | {"x": 1}]}, "tools.0.x: Extra inputs are not permitted"),
        ({"tools": [TIME | {"name": "a b"}]}, "tools.0.name is 'a b'"),
        ({"tools": [TIME, TIME]}, "tools.1.name: there is a tool 'time' already"),
        ({"tools": [TIME | {"input_schema": 5}]}, "tools.0.input_schema must be a JSON schema"),
        ({"tools": [TIME | {"input_schema": {"type": "array"}}]}, "tools.0.input_schema.type must be object"),
        ({"tools": [TIME | {"input_schema": DEEP}]}, "tools.0.input_schema is nested over 32 levels"),
        ({"tools": [TIME | {"description": "x" * 70_000}]}, "tools.0.description has 70000 characters"),
        ({"tools": [TIME] * 5000}, "tools has 5000 items"),
        (
            {"tools": [TIME, SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
            "tools.1.type: web_search_20250305 is a tool that a server runs",
        ),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tools.0.type: web_search_20250305 is a tool that a"),
        ({"tools": [SEARCH, {"name": "web_search", "input_schema": {}}]}, "tools.1.name: there is a tool 'web_search'"),
        ({"tools": [{"type": "web_search_20250305"}]}, "tools.0.name: Field required"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: bash_20250124: its schema is not here"),
        ({"tools": [{"type": "mcp_toolset", "name": "x"}]}, "tools.0.type: mcp_toolset: there are no such tools here"),
        ({"tools": [TIME | {"input_examples": [{}]}]}, "tools.0.input_examples: not supported yet"),
        ({"tools": [TIME | {"allowed_callers": ["code"]}]}, "tools.0.allowed_callers: not supported yet"),
        ({"tools": [LATER], "tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: must be one of"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: belongs to the type tool"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice needs tools"),
        (
            turn(RESULT | {"tool_use_id": "t9"}),
            "messages.2.content.0.tool_use_id: no earlier message has a call with the id 't9'",
        ),
        (
            turn(RESULT | {"content": [{"type": "image"}]}),
            "messages.2.content.0.content.0.type: this model takes text only",
        ),
        (
            turn(RESULT | {"content": [{"type": "tool_reference"}]}),
            "messages.2.content.0.content.0.tool_name: Field required",
        ),
        (
            turn(RESULT | {"content": [FOUND | {"tool_name": "lost"}]}),
            "messages.2.content.0.content.0.tool_name: there is no tool 'lost'",
        ),
        (turn(FOUND), "messages.2.content.0.type: this model takes text only"),
        (turn(RESULT | {"x": 1}), "messages.2.content.0.x: Extra inputs"),
        (turn({"type": "tool_result"}), "messages.2.content.0.tool_use_id: Field required"),
        (turn(USE), "messages.2.content.0.type: tool_use blocks belong in messages of the role assistant"),
        (turn(RESULT, role="assistant"), "messages.2.content.0.type: tool_result blocks belong"),
        (
            turn({"type": "redacted_thinking", "data": "x"}, role="assistant"),
            "messages.2.content.0.type: redacted_thinking blocks",
        ),
        (turn({"type": "server_tool_use"}, role="assistant"), "messages.2.content.0.type: server_tool_use blocks"),
        ({"messages": [*USER, {"role": "assistant", "content": [USE]}]}, "messages: the last message calls tools"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [USE | {"name": "a b"}]}]},
            "messages.1.content.0.name is 'a b'",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": [USE | {"input": 5}]}]},
            "messages.1.content.0.input: Expected",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": [USE | {"input": DEEP}]}]},
            "messages.1.content.0.input is nested",
        ),
        (
            {"messages": [*USER, {"role": "assistant", "content": "So"}], "thinking": ENABLED},
            "messages: thinking cannot go before",
        ),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type must be json_schema"),
        ({"output_config": {"x": 1}}, "output_config.x: Extra inputs"),
    ],
)
async def test_refusals_in_anthropics_words(fields: dict[str, Any], begins: str):
    completer = caller()
    async with client_for(completer, strict=True) as http:
        with at_most(2.0):
            r = await http.post(MESSAGES, json=ask(**fields))
    assert r.status_code == 400 and not completer.seen
    assert r.json()["error"]["message"].startswith(begins), r.text


async def test_a_template_without_tools_is_told():
    async with client_for(FakeCompleter()) as http:
        r = await http.post(MESSAGES, json=ask())
        assert r.status_code == 200 and "general prompt" in r.json()["quire"]["notes"][0]
        r = await http.post(MESSAGES, json=ask(stream=True))
        assert r.text.count("general prompt") == 1
