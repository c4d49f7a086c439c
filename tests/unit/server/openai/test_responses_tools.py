"""Namespaces of functions and web search in requests of /v1/responses: what the model is shown, what comes back, what is told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire.chat.types import CallPart, Chunk
from tests.unit.server.fakes import FakeCompleter, client_for
from tests.unit.server.openai.test_responses import DONE, HI, TOOL, caller, noted, post, told

OBJECT = {"type": "object", "properties": {}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": f"does {name}", "parameters": OBJECT, **more}


def namespace(name: str, *functions: dict[str, Any], description: str = "") -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": description, "tools": list(functions)}


def calls(*names: str) -> FakeCompleter:
    """A model that calls these, as it knows them."""
    parts = [Chunk(calls=[CallPart(i, f"call_{i}", name, '{"a":1}')], tokens=[65]) for i, name in enumerate(names)]
    completer = caller(*parts, Chunk(finish="stop", receipt=DONE))
    completer.info = msgspec.structs.replace(completer.info, context=4000)
    return completer


def shown(completer: FakeCompleter) -> list[str]:
    """The names that the template was given last."""
    return [one["function"]["name"] for one in completer.rendered[-1][1]["tools"]]


CRM = namespace("crm", function("find"), function("drop", strict=True), description="Tools about customers.")


async def test_functions_of_a_namespace_are_shown_by_one_name_and_called_by_two():
    completer = calls("crm__find", "find")
    async with client_for(completer) as http:
        asked = {"tools": [function("find"), CRM], "stream": True}
        events = told((await http.post("/v1/responses", json=HI | asked)).text)
    assert shown(completer) == ["find", "crm__find", "crm__drop"]
    descriptions = [one["function"]["description"] for one in completer.rendered[-1][1]["tools"]]
    assert descriptions == ["does find", "crm: Tools about customers.\n\ndoes find", "does drop"]
    assert [one.strict for one in completer.asked[-1][0].tools] == [False, False, True]
    inside, outside = events[-1]["response"]["output"]
    assert (inside["namespace"], inside["name"], inside["arguments"]) == ("crm", "find", '{"a":1}')
    assert outside["name"] == "find" and "namespace" not in outside
    items = [e["item"] for e in events if e["type"].startswith("response.output_item.")]
    assert [(one.get("namespace"), one["name"]) for one in items] == [("crm", "find")] * 2 + [(None, "find")] * 2
    (first, _) = [e for e in events if e["type"] == "response.function_call_arguments.done"]
    assert first["name"] == "find"
    plain, space = events[-1]["response"]["tools"]
    assert plain["name"] == "find" and space["type"] == "namespace" and space["name"] == "crm"
    assert [(one["name"], one["description"], one["strict"]) for one in space["tools"]] == [
        *(("find", "does find", False), ("drop", "does drop", True))
    ]


async def test_no_two_functions_have_one_name():
    """Not even where a namespace and a name run together into those of another."""
    tools = [
        *(namespace("a", function("b__c")), namespace("a__b", function("c")), function("a__b__c")),
        *(namespace("x" * 100, function("y" * 100)), namespace("x" * 100, function("y" * 99 + "z"))),
        namespace("mcp__files__", function("read")),
    ]
    completer = calls("mcp__files__read")
    async with client_for(completer) as http:
        body = await post(http, tools=tools)
        names = shown(completer)
        assert len(set(names)) == 6 and max(map(len, names)) == 128
        assert names[2] == "a__b__c" and names[-1] == "mcp__files__read"
        completer.script = calls(*names).script
        called = (await post(http, tools=tools))["output"]
    assert (body["output"][0]["namespace"], body["output"][0]["name"]) == ("mcp__files__", "read")
    assert [(one.get("namespace"), one["name"]) for one in called] == [
        *(("a", "b__c"), ("a__b", "c"), (None, "a__b__c")),
        *(("x" * 100, "y" * 100), ("x" * 100, "y" * 99 + "z"), ("mcp__files__", "read")),
    ]


async def test_calls_of_a_conversation_have_the_names_that_the_model_knows():
    completer = calls("crm__find")
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "c1", "namespace": "crm", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "namespace": "crm", "name": "find", "output": "none"},
        {"type": "function_call", "call_id": "c2", "namespace": "gone", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "none"},
    ]
    async with client_for(completer) as http:
        taken = [function("crm__find"), CRM]  # so that crm's find is known by another name
        body = await post(http, input=said, tools=taken)
        first, turns = shown(completer), completer.rendered[-1][0]
        kept = (await http.get(f"/v1/responses/{body['id']}/input_items?order=asc")).json()["data"]
        answer = {"type": "function_call_output", "call_id": "call_0", "output": "x"}
        await post(http, input=[answer], tools=[CRM], previous_response_id=body["id"])
    names = [call["function"]["name"] for turn in turns for call in turn.get("tool_calls", ())]
    assert names == [first[1], "gone__find"] and first[1] != "crm__find"
    assert [turn["name"] for turn in turns if turn["role"] == "tool"] == names
    assert [one.get("namespace") for one in kept] == [None, "crm", None, "gone", None]
    assert shown(completer) == ["crm__find", "crm__drop"]


async def test_a_choice_names_a_function_in_a_namespace():
    completer = calls("crm__find")
    async with client_for(completer) as http:
        both = [function("find"), CRM]
        await post(http, tools=both, tool_choice={"type": "function", "namespace": "crm", "name": "find"})
        await post(http, tools=both, tool_choice={"type": "function", "name": "find"})
        drop = {"type": "function", "namespace": "crm", "name": "drop"}
        await post(http, tools=both, tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [drop]})
    named, plain, some = (tools for tools, _ in completer.asked)
    assert (named.name, plain.name) == ("crm__find", "find")
    assert [one.name for one in some.tools] == ["crm__drop"]
    assert some.tools[0].description == "crm: Tools about customers.\n\ndoes drop"  # the first that is left tells it


SEARCHES = ("web_search", "web_search_preview", "web_search_2025_08_26")


@pytest.mark.parametrize("kind", SEARCHES)
async def test_a_web_search_is_left_out_and_told(kind: str):
    search = {"type": kind, "external_web_access": True, "search_context_size": "low"}
    completer, silent = calls("weather"), FakeCompleter()
    async with client_for(completer) as http:
        body = await post(http, tools=[search, TOOL])
        some = {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": kind}, {"type": "function", "name": "weather"}],
        }
        await post(http, tools=[search, TOOL], tool_choice=some)
        assert all([one.name for one in tools.tools] == ["weather"] for tools, _ in completer.asked)
    async with client_for(silent) as http:
        alone = await post(http, tools=[search])  # of a model that calls nothing, too
    assert body["quire"]["notes"] == [f"tools[0]: {kind} is left out: nothing here searches the web; no effect"]
    assert [one["type"] for one in body["tools"]] == ["function"]
    assert alone["quire"] == body["quire"] and alone["tools"] == []


async def test_deferred_functions_are_shown_and_that_is_told():
    completer = calls("crm__find")
    async with client_for(completer) as http:
        body = await post(http, tools=[namespace("crm", function("find", defer_loading=True))])
    assert shown(completer) == ["crm__find"]
    assert noted(body) == ["tools[0].tools[0].defer_loading"]


SEARCH = {"type": "web_search"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [SEARCH, TOOL], "tool_choice": SEARCH}, "tool_choice"),
    (
        {"tools": [SEARCH, TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]}},
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SEARCH]}},
        "tool_choice.tools[0].name",
    ),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"tools": [namespace("a", {"type": "shell"})]}, "tools[0].tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "regex"}}]}, "tools[0].format.type"),
    (
        {
            "tools": [
                {"type": "custom", "name": "x", "format": {"type": "grammar", "syntax": "gbnf", "definition": "a"}}
            ]
        },
        "tools[0].format.syntax",
    ),
    ({"tools": [{"type": "custom", "name": "x"}, function("x")]}, "tools[1].name"),
    ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment.type"),
    ({"tools": [function("x", allowed_callers=["programmatic"])]}, "tools[0].allowed_callers"),
    ({"tools": [{"type": "tool_search", "execution": "cloud"}]}, "tools[0].execution"),
    ({"tools": [TOOL], "tool_choice": {"type": "apply_patch"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "weather"}}, "tool_choice"),
    ({"tools": [namespace("a b", function("x"))]}, "tools[0].name"),
    ({"tools": [namespace("a", function("x y"))]}, "tools[0].tools[0].name"),
    ({"tools": [namespace("a", function("x"), function("x"))]}, "tools[0].tools[1].name"),
    ({"tools": [namespace("a", function("x")), namespace("a", function("x"))]}, "tools[1].tools[0].name"),
    ({"tools": [function("x"), function("x")]}, "tools[1].name"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    ({"tools": [namespace("a", *[function(f"f{i}") for i in range(1024)]), TOOL]}, "tools"),
    ({"tools": [CRM], "tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
    ({"tools": [CRM], "tool_choice": {"type": "function", "name": "crm__find"}}, "tool_choice"),
    ({"tools": [CRM], "tool_choice": {"type": "function", "namespace": "cr", "name": "find"}}, "tool_choice"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "namespace": "a b", "name": "x", "arguments": "{}"}]},
        "input[0].name",
    ),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
async def test_what_is_refused(more: dict[str, Any], param: str):
    completer = calls("weather")
    async with client_for(completer) as http:
        r = await http.post("/v1/responses", json=HI | more)
    assert (r.status_code, r.json()["error"]["param"]) == (400, param), r.text
    assert completer.seen == []
