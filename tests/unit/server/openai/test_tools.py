"""Tools and reasoning in /v1/chat/completions: what the model is shown, what is enforced, what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from openai.lib.streaming._deltas import accumulate_delta
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quire.chat.tools.types import Tool, Tools
from quire.chat.types import Chunk
from quire.engine.types import Constraint
from tests.effort import at_most
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for, events
from tests.unit.server.scripts import CALLS, FUNCTION, OTHER, THINKS_AND_CALLS, Bench, bench, call, script, scripts

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
WITH_TOOLS = HI | {"tools": [FUNCTION, OTHER]}


def caller(chunks: list[Chunk] | None = None) -> FakeCompleter:
    made = FakeCompleter(context=400)
    made.answer_format = CALLER
    made.script = THINKS_AND_CALLS if chunks is None else chunks
    return made


async def answer(completer: FakeCompleter, **fields: Any) -> Any:
    async with client_for(completer) as http:
        r = await http.post(CHAT, json=WITH_TOOLS | fields)
    assert r.status_code == 200, r.text
    return events(r.text) if fields.get("stream") else r.json()


async def refused(fields: dict[str, Any], completer: FakeCompleter | None = None) -> dict[str, Any]:
    completer = completer or caller()
    async with client_for(completer, strict=True) as http:
        r = await http.post(CHAT, json=HI | fields)
    assert r.status_code == 400, r.text
    assert not completer.seen
    return r.json()["error"]


# What comes back


async def test_an_answer_that_thinks_speaks_and_calls():
    completer = caller()
    body = await answer(completer)
    ChatCompletion.model_validate(body, strict=True)
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "I ask.",
        "refusal": None,
        "reasoning_content": "Let me see.",
        "reasoning": "Let me see.",
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in CALLS
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    # Two pieces of thought and the marker that ends them.
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    assert body["usage"]["completion_tokens"] == 10
    assert completer.seen[0].reading == "a reading"


async def test_content_is_null_where_there_are_only_calls():
    body = await answer(caller(script(*call(0, "time", "{}"))))
    message = body["choices"][0]["message"]
    assert message["content"] is None and "reasoning" not in message
    body = await answer(caller(script(Chunk(reasoning="hm"), finish="length")))
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


async def test_deltas_say_what_a_call_is_once():
    found = await answer(caller(), stream=True)
    for chunk in found[:-1]:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [c["choices"][0]["delta"] for c in found[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me ", "reasoning": "Let me "},
        {"reasoning_content": "see.", "reasoning": "see."},
        {"content": "I ask."},
        {
            "tool_calls": [
                {"index": 0, "id": "call_0x", "type": "function", "function": {"name": "weather", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Pa'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ris"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_1x", "type": "function", "function": {"name": "time", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in found[:-1]] == [None] * 9 + ["tool_calls"]


def assembled(found: list[Any]) -> tuple[dict[str, Any], str]:
    """A message, by the rules of OpenAI's own client, and why it ended."""
    message: dict[object, object] = {}
    finish = ""
    for chunk in found[:-1]:
        for choice in chunk["choices"]:
            indices = [part["index"] for part in choice["delta"].get("tool_calls", [])]
            assert len(indices) == len(set(indices))  # clients go by it
            message = accumulate_delta(message, choice["delta"])
            finish = choice["finish_reason"] or finish
    for one in message.get("tool_calls", []):
        del one["index"]
    return message, finish


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    with bench() as one:
        yield one


@settings(max_examples=60, deadline=None)
@given(made=scripts())
def test_deltas_put_together_are_the_whole_answer(server: Bench, made: Any):
    chunks, reasoning, text, calls = made
    whole = server.post(chunks, CHAT, WITH_TOOLS).json()
    streamed = events(server.post(chunks, CHAT, WITH_TOOLS | {"stream": True}).text)
    message, finish = assembled(streamed)
    expected = whole["choices"][0]["message"]
    assert finish == whole["choices"][0]["finish_reason"]
    assert finish == ("tool_calls" if calls and chunks[-1].finish == "stop" else chunks[-1].finish)
    assert (expected.get("reasoning", ""), expected["content"] or "") == (reasoning, text)
    said = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in expected.get("tool_calls", [])]
    assert said == [(c.id, c.name, c.arguments) for c in calls]
    assert {**expected, "content": expected["content"] or ""} == {"refusal": None, **message}


async def test_several_choices_that_call():
    chunks = [
        Chunk(index=i, calls=c.calls, tokens=c.tokens, finish=c.finish, receipt=c.receipt)
        for i in (1, 0)
        for c in script(*call(0, f"f{i}", "{}"))
    ]
    for stream in (False, True):
        body = await answer(caller(chunks), n=2, stream=stream)
        if stream:
            news = [c["choices"][0] for c in body[:-1]]
            names = {
                c["index"]: t["function"]["name"] for c in news for t in c["delta"].get("tool_calls", []) if "id" in t
            }
        else:
            names = {c["index"]: c["message"]["tool_calls"][0]["function"]["name"] for c in body["choices"]}
        assert names == {0: "f0", 1: "f1"}


async def test_a_call_that_is_cut_says_length_or_stop():
    cut = call(0, "weather", '{"city": "Pa')
    for stream in (False, True):
        for finish, stop, expected in (
            ("length", None, "length"),
            ("stop", "ris", "stop"),
            ("stop", None, "tool_calls"),
        ):
            body = await answer(caller(script(*cut, finish=finish, stop_reason=stop)), stream=stream)
            choice = body[-2]["choices"][0] if stream else body["choices"][0]
            assert choice["finish_reason"] == expected
    # A stop string after a whole call leaves it one.
    body = await answer(caller(script(*call(0, "time", "{}"), stop_reason="</tool_call>")))
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("tool_calls", "</tool_call>")


async def test_logprobs_cover_every_token():
    completer = caller()
    body = await answer(completer, logprobs=True)
    assert completer.seen[0].sampling.logprobs == 0
    assert body["choices"][0]["logprobs"] == {"content": [], "refusal": None}  # the script has none


async def test_reasoning_may_be_left_out():
    for stream in (False, True):
        body = await answer(
            caller(), include_reasoning=False, stream=stream, stream_options={"include_usage": True} if stream else None
        )
        assert "Let me" not in str(body)
        usage = body[-2]["usage"] if stream else body["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_timings_are_the_receipts():
    expected = {
        "cache_n": 16,
        "prompt_n": 4,
        "prompt_ms": 250.0,
        "prompt_per_token_ms": 62.5,
        "prompt_per_second": 16.0,
        "predicted_n": 9,
        "predicted_ms": 500.0,
        "predicted_per_token_ms": pytest.approx(55.56, abs=0.01),
        "predicted_per_second": 18.0,
    }
    assert (await answer(caller(), timings_per_token=True))["timings"] == expected
    *news, last, _ = await answer(caller(), timings_per_token=True, stream=True)
    assert last["timings"] == expected
    assert [c["timings"]["predicted_n"] for c in news[1:]] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert "timings" not in await answer(caller())


async def test_a_prediction_is_told_to_be_unused():
    body = await answer(caller(), prediction={"type": "content", "content": "I ask."})
    assert body["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 3,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    assert (await refused({"prediction": {"type": "magic", "content": "x"}}))["param"] == "prediction.type"
    assert (await refused({"prediction": 5}))["param"] == "prediction"


async def test_the_service_tier_is_told_where_it_was_asked_for():
    assert (await answer(caller(), service_tier="auto"))["service_tier"] == "default"
    assert "service_tier" not in await answer(caller())
    assert (await refused({"service_tier": "flex"}))["param"] == "service_tier"


# What is asked


SHOWN = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": FUNCTION["function"]["parameters"],
        },
    },
    {
        "type": "function",
        "function": {"name": "time", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
TOOLS = (Tool("weather", "The weather in a city.", FUNCTION["function"]["parameters"]), Tool("time"))
NAMED = {"type": "function", "function": {"name": "time"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({}, Tools(TOOLS)),
        ({"tool_choice": None}, Tools(TOOLS)),
        ({"tool_choice": "auto"}, Tools(TOOLS)),
        ({"tool_choice": "required"}, Tools(TOOLS, "required")),
        ({"tool_choice": NAMED}, Tools(TOOLS, "named", "time")),
        ({"tool_choice": "none"}, Tools(choice="none")),
        ({"tools": []}, Tools(choice="none")),
        ({"tools": None, "tool_choice": "auto"}, Tools(choice="none")),
        ({"parallel_tool_calls": False}, Tools(TOOLS, parallel=False)),
        ({"parallel_tool_calls": True, "tool_choice": "required"}, Tools(TOOLS, "required")),
        ({"tool_choice": allowed("required", "time")}, Tools(TOOLS[1:], "required")),
        ({"tool_choice": allowed("auto", "time", "weather")}, Tools(TOOLS)),
    ],
)
async def test_what_is_chosen_is_shown_and_enforced(fields: dict[str, Any], tools: Tools):
    completer = caller()
    completer.enforces = Constraint(kind="lark", text="start: /x/", param="tools")
    await answer(completer, **fields)
    assert completer.asked == [(tools, None)]
    (_, kwargs) = completer.rendered[0]
    names = [one.name for one in tools.tools]
    assert kwargs.get("tools") == ([s for s in SHOWN if s["function"]["name"] in names] or None)
    assert completer.seen[0].constraint == completer.enforces


async def test_an_answers_form_goes_with_tools():
    completer = caller()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    await answer(completer, response_format=form)
    (_, constraint) = completer.asked[0]
    assert constraint == Constraint(kind="json_schema", text='{"type":"object"}', param="response_format")
    assert completer.seen[0].constraint == constraint


async def test_strict_and_raw_schemas_arrive():
    schema = {"type": "object", "properties": {"x": {"enum": [1, "a", None]}}, "additionalProperties": False}
    one = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True, "description": None}}
    completer = caller()
    await answer(completer, tools=[one])
    assert completer.asked[0][0].tools == (Tool("f", "", schema, strict=True),)


CALL = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


async def test_a_tool_loop_reaches_the_template():
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I ask.",
            "reasoning": "I ask.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "a1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Rain.", "tool_calls": [], "reasoning": "So."},
        {"role": "user", "content": "ok"},
    ]
    completer = caller()
    async with client_for(completer) as http:
        r = await http.post(CHAT, json={"messages": messages})  # the tools may be gone
    assert r.status_code == 200, r.text
    assert completer.rendered[0][0] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "a1", "name": "weather"},
        {"role": "assistant", "content": "Rain.", "reasoning_content": "So."},
        {"role": "user", "content": "ok"},
    ]


def said(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*HI["messages"], *messages]}


def one_tool(**function: Any) -> dict[str, Any]:
    return {"tools": [OTHER, {"type": "function", "function": {"name": "f", **function}}]}


DEEP: Any = {"type": "object"}
for _ in range(40):
    DEEP = {"type": "object", "properties": {"x": DEEP}}
AT = "tools[1].function"
CALL_AT = "messages[1].tool_calls[0]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "x": 1}]}, "tools[0].x"),
        (one_tool(name=""), f"{AT}.name"),
        (one_tool(name="a b"), f"{AT}.name"),
        (one_tool(name="<tool_call>"), f"{AT}.name"),
        (one_tool(name="x" * 129), f"{AT}.name"),
        (one_tool(name="time"), f"{AT}.name"),  # twice
        (one_tool(name=5), f"{AT}.name"),
        (one_tool(x=1), f"{AT}.x"),
        (one_tool(strict="yes"), f"{AT}.strict"),
        (one_tool(description="x" * 70_000), f"{AT}.description"),
        (one_tool(description="x" * 5_000_000), f"{AT}.description"),
        (one_tool(description="x" * 60_000), "tools"),  # more than the context holds
        (one_tool(parameters=5), f"{AT}.parameters"),
        (one_tool(parameters="{}"), f"{AT}.parameters"),
        (one_tool(parameters={"type": "string"}), f"{AT}.parameters.type"),
        (one_tool(parameters=DEEP), f"{AT}.parameters"),
        (one_tool(parameters={"enum": list(range(20_000))}), f"{AT}.parameters"),
        ({"tools": [OTHER] * 1025}, "tools"),
        ({"tools": [OTHER] * 100_000}, "tools"),
        ({"tools": [OTHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": 5}, "tool_choice"),
        ({"tools": [OTHER], "tool_choice": {"type": "mcp", "mcp": {"name": "x"}}}, "tool_choice.type"),
        ({"tools": [OTHER], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [FUNCTION], "tool_choice": NAMED}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": allowed("auto", "time")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [OTHER], "tool_choice": allowed("none", "time")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [OTHER], "parallel_tool_calls": 5}, "parallel_tool_calls"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        (said({"role": "function", "name": "f", "content": "x"}), "messages[1].role"),
        (said({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
        (said({"role": "tool", "content": "x", "tool_call_id": "nope"}), "messages[1].tool_call_id"),
        (said({"role": "tool", "tool_call_id": "a1"}), "messages[1].content"),
        (said({"role": "user", "content": "x", "tool_calls": [CALL]}), "messages[1].tool_calls"),
        (said({"role": "user", "content": "x", "tool_call_id": "a"}), "messages[1].tool_call_id"),
        (said({"role": "assistant", "content": None}), "messages[1].content"),
        (said({"role": "assistant", "tool_calls": [5]}), CALL_AT),
        (said({"role": "assistant", "tool_calls": [{"type": "mcp"}]}), f"{CALL_AT}.type"),
        (said({"role": "assistant", "tool_calls": [{"function": {}}]}), f"{CALL_AT}.function.name"),
        (said({"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}), f"{CALL_AT}.function.name"),
        (said({"role": "assistant", "tool_calls": [CALL] * 2000}), "messages[1].tool_calls"),
        (
            said(
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9000 + "]" * 9000}}]}
            ),
            f"{CALL_AT}.function.arguments",
        ),
        (
            said({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}),
            "messages[1].reasoning",
        ),
        (said({"role": "assistant", "content": "x", "function_call": {"name": "f"}}), "messages[1].function_call"),
        (said({"role": "assistant", "content": "x", "audio": {"id": "a"}}), "messages[1].audio"),
        (said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "messages[1].content[0].type"),
        (said({"role": "user", "content": [{"type": "input_audio"}]}), "messages[1].content[0].type"),
        (said({"role": "user", "content": [{"type": "file"}]}), "messages[1].content[0].type"),
        ({"documents": [{"text": "x"}]}, "documents"),  # the template has no place for them
        ({"documents": [5]}, "documents[0]"),
        ({"documents": [{}] * 2000}, "documents"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            said({"role": "assistant", "content": "x"})
            | {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "chat_template_kwargs"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"verbosity": "low"}, "verbosity"),
        ({"store": True}, "store"),
    ],
)
async def test_refusals_name_the_field_and_are_quick(fields: dict[str, Any], param: str):
    with at_most(2.0):
        error = await refused(fields)
    assert error["param"] == param, error


async def test_the_wrong_call_id_is_named():
    error = await refused(said({"role": "tool", "content": "x", "tool_call_id": "call_9"}))
    assert "call_9" in error["message"]
    assert "send tools" in (await refused({"functions": [{"name": "f"}]}))["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("own", [None, type(CALLER)(name="x", reasons=True, calls=False, markers=())])
async def test_a_template_without_tools_is_told(own: Any, stream: bool):
    completer = FakeCompleter()
    completer.answer_format = own
    async with client_for(completer) as http:
        r = await http.post(CHAT, json=HI | {"tools": [OTHER], "stream": stream})
        assert r.status_code == 200, r.text
        bodies = [b for b in events(r.text) if b != "[DONE]"] if stream else [r.json()]
        (notes,) = [b["quire"]["notes"] for b in bodies if "quire" in b]
        assert "general prompt" in notes[0] and len(notes) == 1
        r = await http.post(CHAT, json=HI | {"tools": [OTHER], "tool_choice": "none"})
        assert r.status_code == 200 and "quire" not in r.json()


async def test_continuing_and_documents_reach_the_template():
    completer = caller()
    completer.template = FakeTemplate("{{ messages }}{{ documents }}")
    documents = [{"title": "a", "text": "b"}]
    messages = [*HI["messages"], {"role": "assistant", "content": "Once"}]
    await answer(completer, messages=messages, continue_final_message=True, documents=documents, tools=None)
    assert completer.rendered[0][1] == {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "documents": documents,
    }


async def test_counting_tokens_shows_the_tools_too():
    completer = caller()
    async with client_for(completer) as http:
        r = await http.post("/tokenize", json={"messages": HI["messages"], "tools": [OTHER]})
        assert r.status_code == 200, r.text
        assert completer.rendered[0][1] == {"tools": SHOWN[1:], "add_generation_prompt": True}
        r = await http.post("/tokenize", json={"messages": HI["messages"], "tools": [{"type": "x"}]})
        assert r.json()["error"]["param"] == "tools[0].type"


# How much it reasons

SWITCH = "{{ messages }} {{ enable_thinking }}"
LEVEL = "{{ messages }} {{ reasoning_effort }}"
BOTH = "{{ messages }} {% if thinking %} {{ reasoning_effort == 'max' }}"


@pytest.mark.parametrize(
    ("source", "reasons", "effort", "kwargs"),
    [
        (SWITCH, True, None, {}),
        (SWITCH, True, "none", {"enable_thinking": False}),
        (SWITCH, True, "minimal", {"enable_thinking": False}),
        (SWITCH, True, "low", {"enable_thinking": True}),
        (SWITCH, True, "high", {"enable_thinking": True}),
        (LEVEL, True, "high", {"reasoning_effort": "high"}),
        (LEVEL, True, "none", None),  # it cannot be turned off
        (LEVEL + '"none"', True, "none", {"reasoning_effort": "none"}),
        (BOTH, True, "high", {"reasoning_effort": "high", "thinking": True}),
        (BOTH, True, "none", {"thinking": False}),
        ("{{ messages }}", False, "none", {}),
        ("{{ messages }}", False, "medium", None),
        ("{{ messages }}", True, "medium", None),
        ("{{ messages }}", True, "none", None),
        (SWITCH, True, "very", None),
        (SWITCH, True, 5, None),
    ],
)
async def test_reasoning_effort(source: str, reasons: bool, effort: Any, kwargs: dict[str, Any] | None):
    completer = caller()
    completer.template = FakeTemplate(source)
    completer.answer_format = type(CALLER)(name="x", reasons=reasons, calls=True, markers=())
    if kwargs is None:
        error = await refused({"reasoning_effort": effort}, completer)
        assert error["param"] == "reasoning_effort"
        return
    await answer(completer, tools=None, reasoning_effort=effort)
    assert completer.rendered[0][1] == kwargs | {"add_generation_prompt": True}


async def test_keywords_win_over_effort():
    completer = caller()
    completer.template = FakeTemplate(SWITCH)
    await answer(completer, tools=None, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert completer.rendered[0][1] == {"enable_thinking": True, "x": 1, "add_generation_prompt": True}
