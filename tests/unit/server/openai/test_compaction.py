"""Summaries in place of conversations: /v1/responses/compact, and a compaction_trigger at the end of the input, as Codex sends it."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.chat.types import Chunk
from quire.server.openai.responses.items import FIELDS
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for
from tests.unit.server.openai.openai_schema import conforms
from tests.unit.server.openai.test_responses import DONE, HI, TOOL, caller, kinds, noted, post, told
from tests.unit.server.scripts import bench

TRIGGER = {"type": "compaction_trigger"}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Fix a.py."},
    {"role": "assistant", "content": "I did."},
]


def summarizer(text: str = "a.py is fixed.", finish: str = "stop") -> FakeCompleter:
    parts = (
        Chunk(reasoning="What matters?", tokens=[1, 2]),
        Chunk(text=text[:4], tokens=[3]),
        Chunk(text=text[4:], tokens=[4]),
    )
    completer = caller(*parts, Chunk(finish=finish, receipt=DONE))
    completer.info = msgspec.structs.replace(completer.info, context=20_000)
    return completer


async def test_a_trigger_makes_a_summary_that_goes_on_in_place_of_the_conversation():
    completer = summarizer()
    async with client_for(completer) as http:
        asked = {"input": [*TALK, TRIGGER], "tools": [TOOL], "stream": True, "store": False}
        events = told((await http.post("/v1/responses", json=HI | asked)).text)
        response = events[-1]["response"]
        (item,) = response["output"]
        assert kinds(events)[2:] == ["output_item.added", "compaction.compacting", "output_item.done", "completed"]
        assert item["type"] == "compaction" and item.keys() == {"id", "type", "encrypted_content"}
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
        # the tools stay in the prompt, so that its beginning is found; they cannot be called
        (turns, kwargs), (offered, must) = completer.rendered[-1], completer.asked[-1]
        assert [one["function"]["name"] for one in kwargs["tools"]] == ["weather"]
        assert (offered.tools, offered.choice, must) == ((), "none", None)
        assert turns[-1]["role"] == "user" and "summary" in turns[-1]["content"]
        assert completer.seen[-1].sampling.max_tokens == 4096
        await post(http, input=[TALK[0], TALK[1], item, {"role": "user", "content": "And b.py?"}])
    before = [one["content"] for one in completer.rendered[-1][0]]
    assert before[:2] == ["Be brief.", "Fix a.py."] and before[-1] == "And b.py?"
    assert before[2].startswith("This is a summary") and before[2].endswith("\na.py is fixed.")


async def test_the_route_answers_with_what_the_user_said_and_the_summary():
    completer = summarizer()
    async with client_for(completer) as http:
        r = await http.post("/v1/responses/compact", json={"model": MODEL, "input": TALK, "instructions": "Kindly."})
        assert r.status_code == 200, r.text
        conforms("CompactResource", r.json())
        said, item = r.json()["output"]
        assert said["content"] == [{"type": "input_text", "text": "Fix a.py."}] and item["type"] == "compaction"
        assert r.json()["usage"]["output_tokens"] == 4
        await post(http, input=[*r.json()["output"], {"role": "user", "content": "go on"}])
        missing = await http.post("/v1/responses/compact", json={"model": MODEL})
    assert [one["role"] for one in completer.rendered[-1][0]] == ["user"] * 3
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "input")


async def test_a_stored_conversation_goes_on_from_its_summary():
    completer = summarizer()
    async with client_for(completer) as http:
        first = await post(http, input=TALK)
        cut = await post(http, input=[TRIGGER], previous_response_id=first["id"])
        last = await post(http, input="more", previous_response_id=cut["id"])
        listed = (await http.get(f"/v1/responses/{last['id']}/input_items?order=asc&limit=100")).json()
    assert cut["output"][0]["type"] == "compaction"
    turns = completer.rendered[-1][0]
    assert [one["content"].split(":")[0] for one in turns] == [
        "Be brief.",
        "Fix a.py.",
        "This is a summary of the conversation so far, which was too long to be kept",
        "more",
    ]
    assert "compaction_trigger" not in {one["type"] for one in listed["data"]}


@pytest.mark.parametrize("stream", [False, True])
async def test_no_summary_is_an_error(stream: bool):
    """An empty one would throw the conversation away."""
    completer = caller(Chunk(reasoning="Hm.", tokens=[1]), Chunk(finish="stop", receipt=DONE))
    completer.info = msgspec.structs.replace(completer.info, context=20_000)
    async with client_for(completer) as http:
        r = await http.post("/v1/responses", json=HI | {"input": [*TALK, TRIGGER], "stream": stream})
    assert "no summary" in r.text and (stream or r.status_code == 500)
    if stream:
        assert kinds(told(r.text))[-2:] == ["error", "failed"]


async def test_a_summary_that_was_cut_is_told():
    async with client_for(summarizer(finish="length")) as http:
        body = await post(http, input=[*TALK, TRIGGER])
    assert body["status"] == "completed" and body["quire"]["notes"] == ["the summary was cut after 4 tokens"]


async def test_what_another_server_wrote_is_set_aside_and_told():
    sealed = base64.b64encode(b"elsewhere").decode()
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "encrypted_content": sealed},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "I thought."}],
            "encrypted_content": "gAAAA",
        },
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"role": "assistant", "content": "hello"},
        {"type": "compaction", "encrypted_content": sealed},
        {"role": "user", "content": "on"},
    ]
    completer = summarizer()
    async with client_for(completer) as http:
        body = await post(http, input=items)
    assert noted(body) == [
        *("input[1].encrypted_content", "input[2].encrypted_content", "input[3]", "input[4].encrypted_content")
    ] or noted(body) == [
        "input[1].encrypted_content",
        "input[2].encrypted_content",
        "input[3]",
        "input[5].encrypted_content",
    ]
    turns = completer.rendered[-1][0]
    assert [one["role"] for one in turns] == ["user", "assistant", "user", "user"]
    assert turns[1]["reasoning_content"] == "I thought." and "another server" in turns[2]["content"]


async def test_settings_and_tools_that_items_bring():
    completer = summarizer()
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [TOOL]},
        {"role": "user", "content": "hi"},
        {"type": "configuration_update", "reasoning": {"effort": "none"}, "text": {"format": schema}},
        {"role": "user", "content": "on"},
    ]
    async with client_for(completer) as http:
        body = await post(http, input=items, reasoning={"effort": "high"})
        over = await post(http, context_management=[{"type": "compaction", "compact_threshold": 5}])
        under = await post(http, context_management=[{"type": "compaction", "compact_threshold": 5000}])
    assert body["reasoning"]["effort"] == "none" and completer.rendered[0][1]["enable_thinking"] is False
    assert body["text"]["format"]["name"] == "x" and completer.asked[0][1] is not None
    assert [one["function"]["name"] for one in completer.rendered[0][1]["tools"]] == ["weather"]
    assert noted(over) == ["context_management"] and "quire" not in under


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": [TRIGGER, *TALK]}, "input[0].type"),
    ({"input": [TRIGGER]}, "input"),
    ({"context_management": [{"type": "forget"}]}, "context_management.type"),
    ({"input": [{"type": "configuration_update", "reasoning": {"effort": 5}}, *TALK]}, "input[0].reasoning.effort"),
    (
        {"input": [{"type": "additional_tools", "role": "developer", "tools": [{"type": "mcp"}]}]},
        "input[0].tools[0].type",
    ),
    ({"input": [{"type": "shell_call", "call_id": "a", "action": {}}]}, "input[0].action.commands"),
    ({"input": [{"type": "apply_patch_call", "call_id": "a", "operation": {}}]}, "input[0].operation.type"),
    ({"input": [{"type": "apply_patch_call_output", "call_id": "a", "status": "x"}]}, "input[0].status"),
    ({"input": [{"type": "tool_search_call", "arguments": {}}]}, "input[0].call_id"),
    ({"input": [{"type": "computer_call", "call_id": "a"}]}, "input[0].type"),
]


@pytest.mark.parametrize(("more", "param"), REFUSED)
async def test_what_is_refused(more: dict[str, Any], param: str):
    completer = summarizer()
    async with client_for(completer) as http:
        r = await http.post("/v1/responses", json=HI | more)
    assert (r.status_code, r.json()["error"]["param"]) == (400, param), r.text
    assert completer.seen == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "client", "server", "x\ud800"[:1]]),
    lambda one: (
        st.lists(one, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "name", "tools", "command", "commands", "query", "path"]), one, max_size=3
        )
    ),
    max_leaves=5,
)
ITEM = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda kind: st.fixed_dictionaries({"type": st.just(kind)}, optional=dict.fromkeys(FIELDS[kind] - {"type"}, JSON))
)
TOOLS = st.sampled_from(
    ["custom", "local_shell", "shell", "apply_patch", "tool_search", "namespace", "function"]
).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"type": st.just(kind)},
        optional=dict.fromkeys(
            (
                "name",
                "format",
                "environment",
                "execution",
                "parameters",
                "tools",
                "output_schema",
                "defer_loading",
                "description",
            ),
            JSON,
        ),
    )
)


def test_nothing_that_is_sent_breaks_the_server():
    with bench() as desk:

        @settings(
            max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
        )
        @given(st.lists(ITEM, max_size=4), st.lists(TOOLS, max_size=2))
        def holds(items: list[Any], tools: list[Any]) -> None:
            body = HI | {"input": [{"role": "user", "content": "hi"}, *items], "tools": tools}
            desk._completer.script = None
            for path in ("/v1/responses", "/v1/responses/input_tokens"):
                r = desk._runner.run(desk._http.post(path, json=body))
                assert r.status_code in (200, 400), (body, r.text)

        holds()
