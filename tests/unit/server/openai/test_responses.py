"""/v1/responses against a scripted engine: objects, events, items, refusals. Shapes are checked by OpenAI's own types."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent

from quire.chat.types import CallPart, Chunk
from quire.engine.types import Receipt
from quire.observe.errors import Busy, EngineDead
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for, opened_by
from tests.unit.server.openai.openai_schema import conforms, conforms_event
from tests.unit.server.scripts import bench, scripts

# By their names: a union of sixty would be tried one by one.
EVENTS = {get_args(one.model_fields["type"].annotation)[0]: one for one in get_args(get_args(ResponseStreamEvent)[0])}
HI = {"model": MODEL, "input": "hi"}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "tells it",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
DONE = Receipt(prompt_tokens=8, output_tokens=9, cached_tokens=3)


def caller(*chunks: Chunk, source: str = "{{ messages }} tools enable_thinking") -> FakeCompleter:
    """A model that reasons and calls, with a script."""
    completer = FakeCompleter()
    completer.answer_format = CALLER
    completer.template = FakeTemplate(source)
    completer.script = list(chunks)
    return completer


THINKS_AND_CALLS = (
    Chunk(tokens=[1]),
    Chunk(reasoning="I should ", tokens=[2, 3]),
    Chunk(reasoning="look.", tokens=[4]),
    Chunk(tokens=[5]),
    Chunk(text="Looking", tokens=[6]),
    Chunk(calls=[CallPart(0, "call_a", "weather")], tokens=[7]),
    Chunk(calls=[CallPart(0, arguments='{"city":'), CallPart(0, arguments='"Rome"}')], tokens=[8]),
    Chunk(calls=[CallPart(1, "call_b", "weather", '{"city":"Oslo"}')], tokens=[9]),
    Chunk(finish="stop", receipt=DONE),
)


def told(text: str) -> list[dict[str, Any]]:
    """The events of a stream: named by their type, numbered without a gap, in OpenAI's shapes."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("event: "):
            name, _, data = block.removeprefix("event: ").partition("\ndata: ")
            event = json.loads(data)
            assert event["type"] == name
            if name == "keepalive":  # sent by OpenAI's servers, and in none of its types
                assert event.keys() == {"type", "sequence_number"}
            else:
                EVENTS[name].model_validate(event)
                if name != "response.compaction.compacting":  # in OpenAI's types, and not yet in its document
                    conforms_event(event)
            found.append(event)
        else:
            assert not block or block.startswith(":"), block
    assert [e["sequence_number"] for e in found] == list(range(len(found)))
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Their types, a run of equal ones once, without the common beginning."""
    short = [e["type"].removeprefix("response.") for e in events]
    return [k for i, k in enumerate(short) if i == 0 or short[i - 1] != k]


def noted(body: dict[str, Any]) -> list[str]:
    """The fields that the answer says had no effect."""
    assert all(note.endswith("; no effect") for note in body["quire"]["notes"])
    return [note.partition(": ")[0] for note in body["quire"]["notes"]]


async def post(http: Any, **more: Any) -> dict[str, Any]:
    r = await http.post("/v1/responses", json=HI | more)
    assert r.status_code == 200, r.text
    Response.model_validate(r.json())
    conforms("Response", r.json())
    return r.json()


async def test_a_whole_answer():
    async with client_for() as http:
        body = await post(http, instructions="Be kind.", metadata={"a": "b"}, user="u", temperature=0.5)
    assert body["object"] == "response"
    assert body["status"] == "completed"
    assert body["id"].startswith("resp_") and len(body["id"]) > 40
    (message,) = body["output"]
    assert message["role"] == "assistant" and message["status"] == "completed"
    assert message["content"] == [{"type": "output_text", "text": "Hello, wörld", "annotations": [], "logprobs": []}]
    prompt = len(b"system:Be kind.\nuser:hi\n")
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 13,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + 13,
    }
    assert (body["temperature"], body["top_p"], body["instructions"]) == (0.5, 1.0, "Be kind.")
    assert (body["metadata"], body["user"], body["tool_choice"], body["tools"]) == ({"a": "b"}, "u", "auto", [])
    assert (body["error"], body["incomplete_details"], body["store"]) == (None, None, True)
    assert body["completed_at"] >= body["created_at"]


async def test_every_required_field_is_there():
    """OpenAI's types call most fields optional that its schema requires: null or not, they must be sent."""
    async with client_for() as http:
        body = await post(http)
    required = (
        *("id", "object", "created_at", "status", "error", "incomplete_details", "instructions", "model", "output"),
        *("tools", "tool_choice", "parallel_tool_calls", "metadata", "temperature", "top_p", "truncation", "usage"),
        *("max_output_tokens", "previous_response_id", "reasoning", "text", "background", "store", "service_tier"),
        *("top_logprobs", "completed_at", "max_tool_calls", "safety_identifier", "prompt_cache_key"),
    )
    assert not set(required) - body.keys()


async def test_the_events_of_a_text():
    async with client_for() as http:
        r = await http.post("/v1/responses", json=HI | {"stream": True})
    assert r.headers["content-type"].startswith("text/event-stream")
    events = told(r.text)
    assert kinds(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "Hello, wörld" and len(deltas) > 5
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello, wörld"
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    (item,) = {e["item_id"] for e in events if "item_id" in e}
    assert events[-1]["response"]["output"][0]["id"] == item
    assert "[DONE]" not in r.text


async def test_a_long_wait_is_told_by_numbered_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.server.replies.FIRST_SECONDS", 0.02)
    monkeypatch.setattr("quire.server.replies.KEEP_ALIVE_SECONDS", 0.01)
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.gate = opened_by(http, b"event: keepalive", 2)
        r = await http.post("/v1/responses", json=HI | {"stream": True})
    events = told(r.text)
    assert ": waiting" not in r.text
    assert kinds(events)[:4] == ["created", "in_progress", "keepalive", "output_item.added"]
    assert [e["sequence_number"] for e in events if e["type"] == "keepalive"][:2] == [2, 3]
    assert kinds(events)[-1] == "completed" and len(events[-1]["response"]["output"]) == 1


async def test_the_events_of_reasoning_text_and_calls():
    async with client_for(caller(*THINKS_AND_CALLS)) as http:
        whole = await post(http, tools=[TOOL])
        r = await http.post("/v1/responses", json=HI | {"tools": [TOOL], "stream": True})
    events = told(r.text)
    assert kinds(events) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = events[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [e["output_index"] for e in events if e["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    # The items that were told done are the items of the answer, streamed or not.
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == last["output"]
    assert [_unnamed(i) for i in last["output"]] == [_unnamed(i) for i in whole["output"]]
    first = last["output"][2]
    assert (first["call_id"], first["name"], first["arguments"]) == ("call_a", "weather", '{"city":"Rome"}')
    assert last["output"][0]["content"] == [{"type": "reasoning_text", "text": "I should look."}]
    assert last["output"][0]["summary"] == []
    assert last["usage"]["output_tokens"] == 9
    assert last["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}  # with both markers
    assert last["usage"]["input_tokens_details"]["cached_tokens"] == 3
    for item in last["output"]:  # deltas of each item, joined, are its text
        joined = "".join(e["delta"] for e in events if e.get("item_id") == item["id"] and "delta" in e)
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert joined == text


def _unnamed(item: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in item.items() if k != "id"}


async def test_a_summary_and_sealed_reasoning_when_asked_for():
    asked = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}
    completer = caller(*THINKS_AND_CALLS)
    async with client_for(completer) as http:
        r = await http.post("/v1/responses", json=HI | asked | {"stream": True})
        events = told(r.text)
        thought = events[-1]["response"]["output"][0]
        # A client that keeps nothing but the seal can send it back.
        item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": thought["encrypted_content"]}
        back = [{"role": "user", "content": "hi"}, item, {"role": "assistant", "content": "yes"}]
        await post(http, input=back)
        alien = await post(http, input=[item | {"encrypted_content": "Z29v"}, {"role": "user", "content": "hi"}])
    assert thought["summary"] == [{"type": "summary_text", "text": "I should look."}]
    assert kinds(events)[2:13] == [
        *("output_item.added", "content_part.added", "reasoning_summary_part.added"),
        *("reasoning_text.delta", "reasoning_summary_text.delta") * 2,
        *("reasoning_text.done", "content_part.done", "reasoning_summary_text.done", "reasoning_summary_part.done"),
    ]
    assert completer.rendered[-2][0][1] == {
        "role": "assistant",
        "content": "yes",
        "reasoning_content": "I should look.",
    }
    assert noted(alien) == ["input[0].encrypted_content"]  # reasoning of another server's is set aside


async def test_log_probabilities_are_those_of_the_text():
    completer = caller(*THINKS_AND_CALLS)
    completer.script = None
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": True}
    async with client_for(completer) as http:
        events = told((await http.post("/v1/responses", json=HI | asked)).text)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    entries = [entry for e in deltas for entry in e["logprobs"]]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == "Hello, wörld"  # also of the half characters
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    done = next(e for e in events if e["type"] == "response.output_text.done")
    assert done["logprobs"] == entries
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == entries


async def test_no_log_probabilities_of_reasoning():
    made = FakeCompleter()._entry
    script = [
        Chunk(tokens=[65], logprobs=[made(65, 0)]),
        Chunk(reasoning="A", tokens=[66], logprobs=[made(66, 0)]),
        Chunk(tokens=[67], logprobs=[made(67, 0)]),
        Chunk(text="D", tokens=[68], logprobs=[made(68, 0)]),
        Chunk(tokens=[69], logprobs=[made(69, 0)]),
        Chunk(text="EF", tokens=[70], logprobs=[made(70, 0)], finish="stop", receipt=DONE),
    ]
    async with client_for(caller(*script)) as http:
        body = await post(http, include=["message.output_text.logprobs"])
    assert [e["token"] for e in body["output"][1]["content"][0]["logprobs"]] == ["D", "E", "F"]


async def test_an_answer_that_is_cut_says_so():
    async with client_for() as http:
        body = await post(http, max_output_tokens=4)
        events = told((await http.post("/v1/responses", json=HI | {"max_output_tokens": 4, "stream": True})).text)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete" and body["output"][0]["content"][0]["text"] == "Hell"
    assert events[-1]["type"] == "response.incomplete"
    assert body["completed_at"] is None


async def test_an_answer_of_nothing_is_an_empty_message():
    async with client_for(caller(Chunk(tokens=[1], finish="stop", receipt=DONE))) as http:
        body = await post(http)
    assert body["output"][0]["content"][0]["text"] == ""


async def test_trouble():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.dies = EngineDead("the engine died")
        r = await http.post("/v1/responses", json=HI | {"stream": True})
        events = told(r.text)
        assert [e["type"] for e in events[-2:]] == ["error", "response.failed"]
        assert events[-2]["code"] == "engine_dead"
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
        assert failed["output"][0]["content"][0]["text"] == "Hel" and failed["output"][0]["status"] == "incomplete"
        r = await http.post("/v1/responses", json=HI)
        assert r.status_code == 503 and r.json()["error"]["code"] == "engine_dead"
        completer.raises = Busy("full", retry_after=3)
        r = await http.post("/v1/responses", json=HI | {"stream": True})
        assert r.status_code == 429 and r.headers["retry-after"] == "3"  # nothing had been sent


async def test_items_become_turns():
    completer = caller(*THINKS_AND_CALLS)
    items = [
        {"role": "developer", "content": "Short."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "weather",
            "arguments": "{}",
            "status": "completed",
            "namespace": None,
        },
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c2", "output": "warm"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "cold"}]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    async with client_for(completer) as http:
        await post(http, input=items, instructions="Be kind.", tools=[TOOL])
    turns, kwargs = completer.rendered[0]
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert turns[0]["content"] == "Be kind.\n\nShort."
    assert turns[1]["content"] == "a\nb"
    assert (turns[2]["content"], turns[2]["reasoning_content"]) == ("c", "hm")
    assert [c["id"] for c in turns[2]["tool_calls"]] == ["c1", "c2"]
    assert turns[2]["tool_calls"][1]["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert [(t["tool_call_id"], t["content"], t["name"]) for t in turns[3:5]] == [
        ("c2", "warm", "weather"),
        ("c1", "cold", "weather"),
    ]
    assert kwargs["tools"][0]["function"]["name"] == "weather"


async def test_tools_and_choices_reach_the_model():
    completer = caller(*THINKS_AND_CALLS)
    other = TOOL | {"name": "time", "strict": True}
    async with client_for(completer) as http:
        body = await post(
            http, tools=[TOOL, other], tool_choice={"type": "function", "name": "time"}, parallel_tool_calls=False
        )
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]}
        await post(http, tools=[TOOL, other], tool_choice=allowed)
        await post(http, tools=[TOOL], tool_choice="none")
    named, some, none = (tools for tools, _ in completer.asked)
    assert (named.choice, named.name, named.parallel, len(named.tools)) == ("named", "time", False, 2)
    assert (some.choice, [t.name for t in some.tools]) == ("required", ["time"])
    assert none.choice == "none" and "tools" not in completer.rendered[2][1]
    assert body["tools"][0] == TOOL | {"strict": False} and body["tools"][1]["strict"] is True
    assert body["tool_choice"] == {"type": "function", "name": "time"} and body["parallel_tool_calls"] is False


async def test_formats_are_constraints():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    completer = FakeCompleter()
    async with client_for(completer) as http:
        shape = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
        body = await post(http, text={"format": shape})
        await post(http, text={"format": {"type": "json_object"}})
        await post(http, text={"format": {"type": "text"}, "verbosity": "medium"})
    first, second, third = (constraint for _, constraint in completer.asked)
    assert first is not None and json.loads(first.text) == schema and first.param == "text.format"
    assert second is not None and second.kind == "json_object" and third is None
    assert body["text"]["format"] == shape


async def test_reasoning_effort_reaches_the_template():
    completer = caller(*THINKS_AND_CALLS)
    async with client_for(completer) as http:
        body = await post(http, reasoning={"effort": "none"})
        await post(http, reasoning={"effort": "high"})
    assert [kwargs["enable_thinking"] for _, kwargs in completer.rendered] == [False, True]
    assert body["reasoning"] == {"effort": "none", "summary": None}


HINTS: list[tuple[dict[str, Any], str]] = [
    ({"reasoning": {"effort": "minimal"}}, "reasoning.effort"),
    ({"reasoning": {"effort": "xhigh"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"service_tier": "flex"}, "service_tier"),
]


async def test_a_hint_that_has_no_effect_is_told():
    """By a model that does not reason: in the object, its first event, a count and a stored response, beside receipts."""
    completer = FakeCompleter()
    async with client_for(completer) as http:
        plain = await post(http, reasoning={"effort": "none"}, text={"verbosity": "medium"}, service_tier="default")
        for more, name in HINTS:
            body = await post(http, **more)
            assert noted(body) == [name], more
            assert (body["reasoning"]["summary"], body["text"]["verbosity"]) == (None, "medium")
            assert body["reasoning"]["effort"] is None and body["service_tier"] == "default"
            stored = (await http.get(f"/v1/responses/{body['id']}")).json()
            assert stored["quire"] == body["quire"]
        events = told(
            (await http.post("/v1/responses", json=HI | HINTS[1][0] | {"stream": True, "receipts": True})).text
        )
        counted = await http.post("/v1/responses/input_tokens", json=HI | HINTS[1][0])
    assert "quire" not in plain and plain["reasoning"]["effort"] == "none"
    for quire in (events[0]["response"]["quire"], events[-1]["response"]["quire"], counted.json()["quire"]):
        assert quire["notes"][0].startswith(f"reasoning.effort: {MODEL} does not reason")
    assert events[-1]["response"]["quire"]["receipts"]
    assert len({str((g.prompt, g.constraint)) for g in completer.seen}) == 1
    assert all(list(kwargs) == ["add_generation_prompt"] for _, kwargs in completer.rendered)


async def test_hints_of_a_model_that_reasons():
    """What can be told to it is; a demand that it cannot meet is refused."""
    completer = caller(*THINKS_AND_CALLS, source="{{ messages }} tools")
    async with client_for(completer) as http:
        body = await post(http, reasoning={"effort": "high", "summary": "auto"})
        off = await http.post("/v1/responses", json=HI | {"reasoning": {"effort": "none"}})
        short = await post(http, reasoning={"summary": "concise"})
        completer.template = FakeTemplate("{{ messages }} tools reasoning_effort")
        heard = await post(http, reasoning={"effort": "high"})
    assert "always reasons" in body["quire"]["notes"][0]
    assert body["reasoning"] == {"effort": None, "summary": "auto"} and body["output"][0]["summary"]
    assert off.json()["error"]["param"] == "reasoning.effort"
    assert short["reasoning"]["summary"] == "detailed" and noted(short) == ["reasoning.summary"]
    assert short["output"][0]["summary"] == body["output"][0]["summary"]
    assert "quire" not in heard and completer.rendered[-1][1]["reasoning_effort"] == "high"


async def test_a_conversation_goes_on():
    completer = FakeCompleter(context=1000)
    async with client_for(completer) as http:
        one = await post(http, input="first", instructions="only now")
        two = await post(http, input="second", previous_response_id=one["id"])
        three = await post(
            http, input=[{"type": "item_reference", "id": one["output"][0]["id"]}, {"role": "user", "content": "third"}]
        )
        items = (await http.get(f"/v1/responses/{two['id']}/input_items?order=asc")).json()
        got = (await http.get(f"/v1/responses/{two['id']}")).json()
        await post(http, input="third", previous_response_id=two["id"])
        gone = await http.delete(f"/v1/responses/{one['id']}")
        broken = await http.post("/v1/responses", json=HI | {"previous_response_id": two["id"]})
    texts = [[t["content"] for t in turns] for turns, _ in completer.rendered]
    hello = "Hello, wörld"
    assert texts[:3] == [["only now", "first"], ["first", hello, "second"], [hello, "third"]]
    assert texts[3] == ["first", hello, "second", hello, "third"]
    ResponseItemList.model_validate(items)
    assert [i["content"][0]["text"] for i in items["data"]] == ["first", hello, "second"]
    assert got == two and two["previous_response_id"] == one["id"]
    assert three["previous_response_id"] is None
    assert gone.json() == {"id": one["id"], "object": "response", "deleted": True}
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "previous_response_not_found"
    assert one["id"] in broken.json()["error"]["message"]  # the one that is missing


async def test_what_is_not_stored_is_not_found():
    async with client_for() as http:
        body = await post(http, store=False)
        for call in (http.get, http.delete):
            r = await call(f"/v1/responses/{body['id']}")
            assert r.status_code == 404 and r.json()["error"]["type"] == "invalid_request_error"
        r = await http.post(f"/v1/responses/{body['id']}/cancel")
        assert r.status_code == 404
        r = await http.post("/v1/responses", json=HI | {"previous_response_id": body["id"]})
        assert r.status_code == 400 and r.json()["error"]["param"] == "previous_response_id"


async def test_a_streamed_answer_is_stored_before_its_end_is_told():
    async with client_for() as http:
        events = told((await http.post("/v1/responses", json=HI | {"stream": True})).text)
        got = (await http.get(f"/v1/responses/{events[-1]['response']['id']}")).json()
    assert got == events[-1]["response"]


async def test_pages_of_input_items():
    items = [{"role": "user", "content": str(i)} for i in range(5)]
    async with client_for() as http:
        body = await post(http, input=items)
        path = f"/v1/responses/{body['id']}/input_items"

        async def page(query: str) -> dict[str, Any]:
            r = await http.get(f"{path}?{query}")
            assert r.status_code == 200, r.text
            return r.json()

        first = await page("limit=2")
        second = await page(f"limit=2&after={first['last_id']}")
        third = await page(f"limit=2&after={second['last_id']}")
        bad = [await http.get(f"{path}?{q}") for q in ("limit=0", "limit=101", "limit=x", "order=up", "after=nobody")]
    texts = [[i["content"][0]["text"] for i in p["data"]] for p in (first, second, third)]
    assert texts == [["4", "3"], ["2", "1"], ["0"]]
    assert [p["has_more"] for p in (first, second, third)] == [True, True, False]
    assert [r.status_code for r in bad] == [400] * 5
    assert [r.json()["error"]["param"] for r in bad] == ["limit", "limit", "limit", "order", "after"]


async def test_counting_the_input():
    completer = caller(*THINKS_AND_CALLS)
    async with client_for(completer) as http:
        asked = {"input": "hi", "instructions": "Be kind.", "tools": [TOOL]}
        counted = await http.post("/v1/responses/input_tokens", json=asked)
        body = await post(http, **asked)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": body["usage"]["input_tokens"]}
    assert len(completer.seen) == 1  # counting runs nothing


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "computer_call_output"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user", "content": "x", "name": "bob"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "item_reference", "id": "msg_none"}]}, "input[0].id"),
    ({"input": ["x"]}, "input[0]"),
    ({"truncation": "some"}, "truncation"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": True}}}, "text.format.schema"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"text": {"verbosity": "mute"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
    ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "short"}}, "reasoning.summary"),
    ({"include": ["everything"]}, "include"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10_000}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"prompt_logprobs": 0}, "prompt_logprobs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"background": True, "store": False}, "background"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"temperature": -1}, "temperature"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"max_output_token": 3}, "max_output_token"),
]


async def test_what_cannot_be_honoured_is_refused_by_name():
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        for more, param in REFUSED:
            r = await http.post("/v1/responses", json=HI | more)
            assert r.status_code == 400, (more, r.text)
            error = r.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), (more, error)
            assert error["message"]
    assert completer.seen == []


async def test_a_call_that_a_stop_string_cut_says_so():
    cut = [Chunk(calls=[CallPart(0, "call_a", "weather", '{"city":"Ro')], tokens=[1])]
    end = Chunk(finish="stop", stop_reason="me", receipt=DONE)
    async with client_for(caller(*cut, end)) as http:
        body = await post(http, tools=[TOOL], stop="me")
    assert (body["status"], body["output"][0]["status"]) == ("completed", "incomplete")


def test_whatever_the_model_writes_the_stream_is_the_whole():
    """Random answers: deltas joined are the items, the items are the reasoning, text and calls that came, in their order."""
    with bench() as server:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(scripts())
        def holds(made: Any) -> None:
            chunks, thought, said, calls = made
            whole = server.post(chunks, "/v1/responses", HI).json()
            Response.model_validate(whole)
            events = told(server.post(chunks, "/v1/responses", HI | {"stream": True}).text)
            last = events[-1]["response"]
            assert [_unnamed(i) for i in last["output"]] == [_unnamed(i) for i in whole["output"]]
            assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == last["output"]
            texts: dict[str, list[str]] = {"message": [], "reasoning": [], "function_call": []}
            for item in last["output"]:
                joined = "".join(e["delta"] for e in events if e.get("item_id") == item["id"] and "delta" in e)
                kind = item["type"]
                assert joined == (item["arguments"] if kind == "function_call" else item["content"][0]["text"])
                texts[kind].append(joined)
            assert ("".join(texts["reasoning"]), "".join(texts["message"])) == (thought, said)
            assert texts["function_call"] == [call.arguments for call in calls]
            assert last["status"] == ("completed" if chunks[-1].finish == "stop" else "incomplete")

        holds()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "user", "message", "a", "input_text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "id", "output", "call_id"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def test_random_requests_are_answered_or_refused():
    """Never a 5xx, always OpenAI's shape."""
    fields = (
        "input",
        "instructions",
        "text",
        "tools",
        "tool_choice",
        "reasoning",
        "include",
        "metadata",
        "stream",
        "store",
    )
    more = ("previous_response_id", "background", "max_output_tokens", "truncation", "top_logprobs", "conversation")
    with asyncio.Runner() as runner:
        client = client_for()
        http = runner.run(client.__aenter__())

        @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(st.sampled_from(fields + more), JSON, max_size=4), st.lists(JSON, max_size=3))
        def holds(asked: dict[str, Any], items: list[Any]) -> None:
            for body in (HI | asked, HI | {"input": items}):
                r = runner.run(http.post("/v1/responses", json=body))
                assert r.status_code in (200, 400, 404), (body, r.text)
                if r.status_code != 200:
                    assert r.json()["error"].keys() == {"message", "type", "param", "code"}

        holds()
        runner.run(client.__aexit__(None, None, None))


async def test_other_refusals():
    async with client_for() as http:
        assert (await http.post("/v1/responses", json=HI | {"model": "gpt"})).status_code == 404
        r = await http.post(
            "/v1/responses", content=b'{"input": ' + b"[" * 5000, headers={"content-type": "application/json"}
        )
        assert r.status_code == 400
        body = await post(http)
        r = await http.get(f"/v1/responses/{body['id']}?stream=true")
        assert r.status_code == 400 and r.json()["error"]["param"] == "stream"
        r = await http.post(f"/v1/responses/{body['id']}/cancel")
        assert r.status_code == 400 and r.json()["error"]["code"] == "response_not_cancellable"
        assert (await http.get("/v1/responses/%2e%2e%2fx")).status_code == 404


async def test_harmless_fields():
    extras = {
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "client_metadata": {"session_id": "s1"},
        "service_tier": "auto",
        "max_tool_calls": 3,
        "include": ["web_search_call.action.sources"],
        "truncation": "disabled",
        "conversation": None,
        "parallel_tool_calls": True,
        "stream_options": {"include_obfuscation": False},
        "stream": True,
        "seed": 7,
        "top_k": 5,
        "receipts": True,
    }
    completer = FakeCompleter()
    async with client_for(completer) as http:
        r = await http.post("/v1/responses", json=HI | extras)
    assert r.status_code == 200, r.text
    last = told(r.text)[-1]["response"]
    assert (last["prompt_cache_key"], last["safety_identifier"], last["max_tool_calls"]) == ("k", "s", 3)
    assert "client_metadata" not in last
    assert last["quire"]["receipts"][0]["seed"] == 7
    assert (completer.seen[0].sampling.top_k, completer.seen[0].sampling.seed) == (5, 7)
