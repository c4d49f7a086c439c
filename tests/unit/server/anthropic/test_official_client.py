"""What agents send to /v1/messages beyond a conversation, through Anthropic's own client: each is answered, and what has no effect is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic

from quire.chat.types import CallPart, Chunk
from quire.server import feed
from quire.server.anthropic import routes
from tests.unit.server.fakes import CALLER, MODEL, URL, FakeCompleter, FakeTemplate, client_for
from tests.unit.server.scripts import script

ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALLED = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "tool_reference", "tool_name": "f"}]}],
    },
]  # fmt: skip


def model(reasons: bool = False) -> FakeCompleter:
    made = FakeCompleter(context=4000)
    made.template = FakeTemplate("{{ messages }} {{ tools }}" + (" {{ enable_thinking }}" if reasons else ""))
    made.answer_format = type(CALLER)(name="x", reasons=reasons, calls=True, markers=())
    made.script = script(*([Chunk(reasoning="Let me see.")] if reasons else []), Chunk(text="Yes."))
    return made


@asynccontextmanager
async def claude(completer: FakeCompleter) -> AsyncIterator[Any]:
    async with client_for(completer) as http:
        transport: Any = http._transport
        theirs = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=transport.app))
        yield AsyncAnthropic(base_url=URL, api_key="x", http_client=theirs, max_retries=0)


def notes_of(message: Any) -> list[str]:
    return (getattr(message, "quire", None) or {"notes": []})["notes"]


SENT: list[tuple[str, dict[str, Any], bool, list[str]]] = [
    ("thinking without reasoning", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, False, ["thinking: "]),
    ("adaptive thinking", {"thinking": {"type": "adaptive"}}, True, []),
    ("display", {"thinking": {"type": "adaptive", "display": "omitted"}}, True, ["thinking.display: "]),
    ("display summarized", {"thinking": {"type": "adaptive", "display": "summarized"}}, True, []),
    ("effort", {"extra_body": {"output_config": {"effort": "high"}}}, False, ["output_config.effort is high: "]),
    ("speed", {"extra_body": {"speed": "fast"}}, False, ["speed is 'fast': "]),
    ("web search", {"tools": [SEARCH, TOOL]}, False, ["tools.0: web_search_20250305 "]),
    ("tool reference", {"messages": CALLED, "tools": [{**TOOL, "defer_loading": True}]}, False, []),
    (
        "edits",
        {"extra_body": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}},
        False,
        [],
    ),
]


@pytest.mark.parametrize(("what", "fields", "reasons", "begins"), SENT, ids=[one[0] for one in SENT])
async def test_it_is_answered_and_told(what: str, fields: dict[str, Any], reasons: bool, begins: list[str]):
    async with claude(model(reasons)) as client:
        whole = await client.messages.create(**ASK | fields)
        async with client.messages.stream(**ASK | fields) as stream:
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        notes = notes_of(message)
        assert len(notes) == len(begins) and all(map(str.startswith, notes, begins)), notes
        assert message.content[-1].type == "text" and message.content[-1].text == "Yes."
        usage = message.usage
        assert type(usage.cache_read_input_tokens) is int and type(usage.cache_creation_input_tokens) is int
        if what.startswith("display"):
            assert message.content[0].type == "thinking"
            assert message.content[0].thinking == ("Let me see." if what.endswith("summarized") else "")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
    ],
)
async def test_what_would_change_the_answer_is_refused_unless_it_is_excused(fields: dict[str, Any], name: str):
    async with claude(model()) as client:
        with pytest.raises(anthropic.BadRequestError, match=name):
            await client.messages.create(**ASK, extra_body=fields)
        answer = await client.messages.create(**ASK, extra_body=fields, extra_headers={"X-Quire-Lenient": "true"})
    (note,) = notes_of(answer)
    assert note.startswith(name)


TEXT = [Chunk(text="Yes."), Chunk(text=" No.")]
THOUGHT = [Chunk(reasoning="Let me see."), *TEXT]
CALL = [Chunk(calls=[CallPart(0, "call_0x", "f")]), Chunk(calls=[CallPart(0, arguments="{}")])]


@pytest.mark.parametrize(
    ("chunks", "thinks", "kinds"),
    [
        (TEXT, False, ["text"]),
        (THOUGHT, True, ["thinking", "text"]),
        (THOUGHT, False, ["text", "thinking", "text"]),
        (TEXT, True, ["thinking", "text"]),
        (CALL, False, ["text", "tool_use"]),
    ],
)
async def test_silence_is_told_by_events_that_add_nothing(
    chunks: list[Chunk], thinks: bool, kinds: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Claude Code counts every event but `ping` as a sign of life."""
    completer = model(reasons=True)
    completer.script, completer.delay = script(*chunks), 0.15
    monkeypatch.setattr("quire.server.replies.FIRST_SECONDS", 0.02)
    monkeypatch.setattr("quire.server.replies.KEEP_ALIVE_SECONDS", 0.03)
    monkeypatch.setattr(routes, "ALIVE", 2)
    assert feed.KEEP_ALIVE_SECONDS * 4 < 150, "twice within the five minutes that Claude Code waits"
    fields: dict[str, Any] = {"thinking": {"type": "adaptive"}} if thinks else {}
    async with claude(completer) as client:
        completer.delay = 0.0
        plain = await client.messages.create(**ASK | fields, tools=[TOOL])
        completer.delay = 0.15
        async with client.messages.stream(**ASK | fields, tools=[TOOL]) as stream:
            events = [event async for event in stream]
            told = await stream.get_final_message()
    raw = [event.type for event in events]
    assert raw[0] == "message_start" and raw.count("message_start") == 1
    empty = [e for e in events if e.type == "content_block_delta" and "" in e.delta.to_dict().values()]
    assert len(empty) >= 2, "before the first token and between others"
    assert [block.type for block in told.content] == kinds
    said = [b.to_dict() for b in told.content if b.type == "tool_use" or getattr(b, b.type)]
    assert [b["type"] for b in said] == [b.type for b in plain.content]
    for one, other in zip(said, plain.content, strict=True):
        for name in ("text", "thinking", "input", "name"):
            assert one.get(name) == getattr(other, name, None)
