"""Tools of /v1/responses that are no functions: texts, shells, patches, searches for tools. Streams are put together by OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from quire.chat.tools.types import TEXT
from quire.chat.types import CallPart, Chunk
from tests.unit.server.fakes import FakeCompleter, client_for
from tests.unit.server.openai.test_responses import DONE, HI, TOOL, caller, kinds, noted, post, told
from tests.unit.server.openai.test_responses_tools import function, namespace, shown

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" "b"+\n'}
CUSTOM = {"type": "custom", "name": "write", "description": "Writes.", "format": LARK}
FREE = {"type": "custom", "name": "say"}
BUILT_IN = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds.",
    "parameters": {"type": "object", "properties": {}},
}


def calls(*said: tuple[str, str], cut: int = 7, finish: str = "stop") -> FakeCompleter:
    """A model that writes these calls, name and arguments, in pieces."""
    chunks: list[Chunk] = []
    for i, (name, arguments) in enumerate(said):
        chunks.append(Chunk(calls=[CallPart(i, f"call_{i}", name)], tokens=[65]))
        pieces = [arguments[at : at + cut] for at in range(0, len(arguments), cut)]
        chunks += [Chunk(calls=[CallPart(i, arguments=piece)], tokens=[66]) for piece in pieces]
    completer = caller(*chunks, Chunk(finish=finish, receipt=DONE))
    completer.info = msgspec.structs.replace(completer.info, context=20_000)
    return completer


async def both(http: httpx.AsyncClient, **more: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The output, without ids of items, and the events. What the official client makes of the stream is the same as what comes whole."""
    whole = await post(http, **more)
    wired: Any = http
    client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="x", http_client=wired, max_retries=0)
    asked: Any = HI | more
    async with client.responses.stream(**asked) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_response()).to_dict()
    output = [{k: v for k, v in item.items() if k != "id"} for item in whole["output"]]
    official: Any = streamed["output"]
    for item, one in zip(output, official, strict=True):
        same = {k: v for k, v in one.items() if k not in ("id", "parsed_arguments")}
        assert {k: v for k, v in same.items() if v is not None} == {k: v for k, v in item.items() if v is not None}
    return output, told((await http.post("/v1/responses", json=HI | more | {"stream": True})).text)


async def test_a_text_is_told_as_it_comes():
    completer = calls(("write", '{"input": "a\\n\\"é\\ud83d\\ude00"}'), ("say", '{"input":""}'))
    async with client_for(completer) as http:
        output, events = await both(http, tools=[CUSTOM, FREE, TOOL])
        body = await post(http, tools=[CUSTOM, FREE])
    first = {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_0",
        "name": "write",
        "input": 'a\n"é😀',
    }
    assert output == [first, first | {"call_id": "call_1", "name": "say", "input": ""}]
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == 'a\n"é😀' and len(deltas) > 2
    assert kinds(events)[2:6] == [
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done")
    ]
    assert [one["format"] for one in body["tools"]] == [LARK, {"type": "text"}]
    written, said, _ = completer.asked[0][0].tools
    assert (written.strict, written.grammar and written.grammar.kind, said.grammar) == (True, "lark", None)
    assert written.description == 'Writes.\n\nThe input must satisfy this Lark grammar:\nstart: "a" "b"+\n'
    assert written.parameters == said.parameters and list((said.parameters or {})["properties"]) == [TEXT]


@pytest.mark.parametrize("cut", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"cmd": "x y"}', "x y"),  # a model without a grammar writes what it will
        ('"x"', "x"),
        ("just so", "just so"),
        ('{"input": "a\\qb\\ud83d!"}', "a\\qb\\ud83d!"),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        ("{}", ""),
    ],
)
async def test_a_text_that_is_written_otherwise(arguments: str, text: str, cut: int):
    async with client_for(calls(("say", arguments), cut=cut)) as http:
        output, _ = await both(http, tools=[FREE])
    assert output[0]["input"] == text


async def test_shells_and_patches():
    patch = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
    completer = calls(
        ("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
        ("shell", '{"commands": ["ls", "pwd"]}'),
        ("apply_patch", json.dumps(patch)),
        ("apply_patch", '{"type": "delete_file", "path": "b", "diff": ""}'),
        ("shell", '{"what": 1}'),
    )
    async with client_for(completer) as http:
        output, events = await both(http, tools=BUILT_IN)
    local, shell, change, gone, other = output
    assert local["action"] == {
        "type": "exec",
        "command": ["ls", "-l"],
        "env": {},
        "timeout_ms": 5,
        "user": None,
        "working_directory": None,
    }
    assert shell["action"] == {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None}
    assert (change["operation"], gone["operation"]) == (patch, {"type": "delete_file", "path": "b"})
    assert [one["type"] for one in output] == [
        *("local_shell_call", "shell_call", "apply_patch_call", "apply_patch_call", "function_call")
    ]
    assert (other["name"], other["arguments"]) == ("shell", '{"what": 1}')
    commands = [e["command"] for e in events if e["type"] == "response.shell_call_command.done"]
    assert commands == ["ls", "pwd"]
    assert all(one.strict for one in completer.asked[0][0].tools)


async def test_a_call_that_was_cut():
    async with client_for(calls(("shell", '{"commands": ["l'), finish="length")) as http:
        body = await post(http, tools=BUILT_IN)
    assert (body["status"], body["output"]) == ("incomplete", [])
    async with client_for(calls(("say", '{"input": "half'), finish="length")) as http:
        body = await post(http, tools=[FREE])
    assert (body["status"], body["output"][0]["status"], body["output"][0]["input"]) == (
        "incomplete",
        "incomplete",
        "half",
    )


RESULTS: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    (
        {"type": "custom_tool_call", "name": "say", "input": 'a"'},
        '{"input": "a\\""}',
        {"type": "custom_tool_call_output", "output": [{"type": "input_text", "text": "fine"}]},
        "fine",
    ),
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"], "env": {}}, "status": "completed"},
        '{"command":["ls"]}',
        {"type": "local_shell_call_output", "output": "{}"},
        "{}",
    ),
    (
        {"type": "shell_call", "action": {"commands": ["ls"], "timeout_ms": 9}},
        '{"commands":["ls"],"timeout_ms":9}',
        {
            "type": "shell_call_output",
            "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}, "created_by": "x"}],
        },
        '[{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]',
    ),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "b"}, "status": "completed"},
        '{"type":"delete_file","path":"b"}',
        {"type": "apply_patch_call_output", "status": "failed", "output": "no b"},
        "failed: no b",
    ),
    (
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "q"}},
        '{"query":"q"}',
        {"type": "tool_search_output", "execution": "client", "tools": [function("late")]},
        "These tools can be called now: late",
    ),
]


@pytest.mark.parametrize(("call", "arguments", "result", "text"), RESULTS)
async def test_calls_and_results_of_a_conversation(call: Any, arguments: str, result: Any, text: str):
    completer = calls(("say", '{"input":""}'))
    items = [{"role": "user", "content": "go"}, call | {"call_id": "c1"}, result | {"call_id": "c1"}]
    async with client_for(completer) as http:
        body = await post(http, input=items, tools=[FREE, *BUILT_IN, SEARCH])
        kept = (await http.get(f"/v1/responses/{body['id']}/input_items?order=asc")).json()["data"]
    _, asked, answered = completer.rendered[-1][0]
    (made,) = asked["tool_calls"]
    assert (made["function"]["arguments"], answered["content"]) == (arguments, text)
    assert made["function"]["name"] == answered["name"]
    assert [one["type"] for one in kept[1:]] == [call["type"], result["type"]]


async def test_a_local_shells_result_may_name_its_call_by_the_item():
    items = [
        {"role": "user", "content": "go"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "a"},
    ]
    completer = calls(("say", "{}"))
    async with client_for(completer) as http:
        await post(http, input=items, tools=[FREE])
    assert completer.rendered[-1][0][-1]["tool_call_id"] == "c1"


async def test_a_choice_names_any_tool():
    completer = calls(("say", "{}"))
    async with client_for(completer) as http:
        tools = [CUSTOM, FREE, *BUILT_IN, TOOL]
        await post(http, tools=tools, tool_choice={"type": "custom", "name": "say"})
        await post(http, tools=tools, tool_choice={"type": "apply_patch"})
        some = [{"type": "custom", "name": "write"}, {"type": "shell"}]
        await post(http, tools=tools, tool_choice={"type": "allowed_tools", "mode": "required", "tools": some})
    named, built_in, left = (asked for asked, _ in completer.asked)
    assert (named.name, built_in.name, left.choice) == ("say", "apply_patch", "required")
    assert [one.name for one in left.tools] == ["write", "shell"]


async def test_a_built_in_tool_gives_way_to_a_function_of_its_name():
    completer = calls(("shell", '{"a":1}'))
    async with client_for(completer) as http:
        body = await post(http, tools=[{"type": "shell"}, function("shell")])
    assert body["output"][0]["type"] == "function_call" and shown(completer)[0].startswith("shell__shell_")


async def test_output_schemas_and_remarks_are_taken():
    tool = function("f", output_schema={"type": "object"}, allowed_callers=["direct"], **{"async": True})
    said = {"role": "user", "content": "hi", "internal_chat_message_metadata_passthrough": {"turn_id": "1"}}
    call = {
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "arguments": "{}",
        "created_by": "x",
        "caller": {"type": "direct"},
    }
    async with client_for(calls(("f", "{}"))) as http:
        body = await post(http, tools=[tool], input=[said, call])
    assert noted(body) == ["tools[0].async", "tools[0].output_schema"]
    assert body["tools"][0]["output_schema"] == {"type": "object"}


# ---- searches for tools

LATE = [
    function("get_invoice", defer_loading=True),
    namespace("crm", function("find_customer", defer_loading=True), description="Customers."),
]


async def test_tools_wait_for_a_search_of_the_clients():
    completer = calls(("tool_search", '{"query": "invoice"}'))
    async with client_for(completer) as http:
        output, _ = await both(http, tools=[TOOL, SEARCH, *LATE])
        assert shown(completer) == ["weather", "tool_search"]
        call = output[0]
        assert (
            call["arguments"] == {"query": "invoice"} and call["execution"] == "client" and call["call_id"] == "call_0"
        )
        result = {
            "type": "tool_search_output",
            "call_id": "call_0",
            "execution": "client",
            "tools": [LATE[1], function("new", defer_loading=True)],
        }
        asked = [{"role": "user", "content": "go"}, call, result]
        completer.script = calls(("crm__find_customer", "{}")).script
        body = await post(http, tools=[TOOL, SEARCH, *LATE], input=asked)
        assert shown(completer) == ["weather", "tool_search", "crm__find_customer", "new"]
        assert completer.rendered[-1][0][-1]["content"] == "These tools can be called now: crm__find_customer, new"
        assert (body["output"][0]["namespace"], body["output"][0]["name"]) == ("crm", "find_customer")
        # ... as they are in the next request, and where a choice names one
        await post(http, tools=[TOOL, SEARCH, *LATE], input="more", previous_response_id=body["id"])
        assert shown(completer) == ["weather", "tool_search", "crm__find_customer", "new"]
        await post(http, tools=[TOOL, SEARCH, *LATE], tool_choice={"type": "function", "name": "get_invoice"})
        assert shown(completer) == ["weather", "tool_search", "get_invoice"]


class Searcher(FakeCompleter):
    """A model that searches, then calls what it found, then is done."""

    def __init__(self, *turns: FakeCompleter):
        super().__init__(context=20_000)
        self.answer_format = turns[0].answer_format
        self.template = turns[0].template
        self._turns = [turn.script for turn in turns]

    async def encode_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        after = max((i for i, one in enumerate(messages) if one["role"] == "user"), default=0)
        self.script = self._turns[sum(one["role"] == "assistant" for one in messages[after:])]
        return await super().encode_chat([m | {"content": m["content"] or ""} for m in messages], **kwargs)


SERVED = [TOOL, {"type": "tool_search"}, *LATE]


async def test_a_search_that_is_done_here():
    completer = Searcher(
        calls(("tool_search", '{"query": "find customers"}')), calls(("crm__find_customer", '{"a":1}'))
    )
    async with client_for(completer) as http:
        output, events = await both(http, tools=SERVED)
        body = await post(http, tools=SERVED)
        search, found, call = output
        assert (search["type"], search["execution"], search["call_id"]) == ("tool_search_call", "server", None)
        assert search["arguments"] == {"query": "find customers"}
        assert [(one["name"], [t["name"] for t in one["tools"]]) for one in found["tools"]] == [
            ("crm", ["find_customer"])
        ]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "find_customer")
        assert shown(completer) == ["weather", "tool_search", "crm__find_customer"]
        told_of = completer.rendered[-1][1]["tools"][-1]["function"]["description"]
        assert told_of == "crm: Customers.\n\ndoes find_customer"
        first, second = (g.prompt for g in completer.seen[-2:])
        assert body["usage"]["input_tokens"] == len(first) + len(second)
        turns = completer.rendered[-1][0]
        assert turns[-1]["content"] == "These tools can be called now: crm__find_customer"
        assert kinds(events)[-1] == "completed"
        # the conversation goes on with what it found
        answer = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        completer._turns[0] = calls(("weather", "{}")).script
        await post(
            http, tools=SERVED, input=[answer, {"role": "user", "content": "and?"}], previous_response_id=body["id"]
        )
        assert shown(completer) == ["weather", "tool_search", "crm__find_customer"]


async def test_searches_are_bounded_and_leave_other_calls_to_the_client():
    again = calls(("tool_search", '{"query": "nothing like it"}'))
    completer = Searcher(*[again] * 20)
    async with client_for(completer) as http:
        body = await post(http, tools=SERVED)
        assert len(body["output"]) == 18 and all(one.get("tools") in (None, []) for one in body["output"])
        body = await post(http, tools=SERVED, max_tool_calls=2)
        assert len(body["output"]) == 6
        both_kinds = calls(("tool_search", '{"query": "invoice"}'), ("weather", "{}"))
        completer._turns = [both_kinds.script]
        body = await post(http, tools=SERVED)
    assert [one["type"] for one in body["output"]] == ["tool_search_call", "tool_search_output", "function_call"]


async def test_a_search_with_nothing_to_find_is_told():
    async with client_for(calls(("weather", "{}"))) as http:
        body = await post(http, tools=[TOOL, {"type": "tool_search"}])
    assert noted(body) == ["tools[1]"] and "nothing to search" in body["quire"]["notes"][0]


async def test_a_search_cuts_what_no_longer_fits_where_that_is_asked_for():
    """What the search adds to the prompt makes it too long: more of the conversation is left out then, and the end of the answer tells."""
    found = calls(("tool_search", '{"query": "find customers"}')), calls(("crm__find_customer", '{"a":1}'))
    completer = Searcher(*found)
    said = [{"role": role, "content": f"{role} {i} " + "x" * 60} for i in range(10) for role in ("user", "assistant")]
    asked: Any = {"tools": SERVED, "input": [*said, {"role": "user", "content": "now"}], "max_output_tokens": 20}
    async with client_for(completer) as http:
        await post(http, **asked)
        first, second = (len(g.prompt) for g in completer.seen)
        assert first < second
        completer.info = msgspec.structs.replace(completer.info, context=first + 25)
        refused = await http.post("/v1/responses", json=HI | asked)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        body = await post(http, **asked, truncation="auto")
        whole = told((await http.post("/v1/responses", json=HI | asked | {"truncation": "auto", "stream": True})).text)
    assert [one["type"] for one in body["output"]] == ["tool_search_call", "tool_search_output", "function_call"]
    assert [note.partition(":")[0] for note in body["quire"]["notes"]] == ["truncation"]
    assert body["quire"]["dropped"]["messages"] > 0 and len(completer.seen[-1].prompt) <= first + 5
    assert "quire" not in whole[0]["response"] and whole[-1]["response"]["quire"] == body["quire"]
