"""Claude Code's request is answered to the end, by models that reason and by those that do not."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.types import Chunk
from tests.unit.server.anthropic.claude_code import BODY, COUNTED, HEADERS, TOOLS
from tests.unit.server.anthropic.test_anthropic import events
from tests.unit.server.fakes import CALLER, MODEL, FakeCompleter, FakeTemplate, client_for
from tests.unit.server.scripts import THINKS_AND_CALLS, script

SWITCH = "{{ messages }} {{ tools }} {{ enable_thinking }}"


def model(reasons: bool) -> FakeCompleter:
    made = FakeCompleter(context=4000)
    made.template = FakeTemplate(SWITCH if reasons else "{{ messages }} {{ tools }}")
    made.answer_format = type(CALLER)(name="x", reasons=reasons, calls=True, markers=())
    made.script = THINKS_AND_CALLS if reasons else script(Chunk(text="It has apples."))
    return made


async def post(completer: FakeCompleter, path: str, body: dict[str, Any]) -> Any:
    async with client_for(completer) as http:
        r = await http.post(path, params={"beta": "true"}, headers=HEADERS, json=body | {"model": MODEL})
    assert r.status_code == 200, r.text
    return r


@pytest.mark.parametrize("reasons", [True, False])
async def test_a_turn_of_claude_codes(reasons: bool):
    completer = model(reasons)
    found = events((await post(completer, "/v1/messages", BODY)).text)
    assert [e["type"] for e in found[:2]] == ["message_start", "ping"]
    assert [e["type"] for e in found[-2:]] == ["message_delta", "message_stop"]
    kinds = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert kinds == (["thinking", "text", "tool_use", "tool_use"] if reasons else ["text"])
    assert found[-2]["context_management"] == {"applied_edits": []}
    for usage in (found[0]["message"]["usage"], found[-2]["usage"]):
        for name in ("input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            assert type(usage[name]) is int, name
    notes = found[0]["message"].get("quire", {"notes": []})["notes"]
    assert [n.split(" ")[0] for n in notes] == ["system:", *([] if reasons else ["output_config.effort", "thinking:"])]

    turns, kwargs = completer.rendered[0]
    assert [t["role"] for t in turns] == ["system", "user", "assistant", "tool", "user", "assistant", "tool"]
    assert turns[0]["content"].startswith("You are a coding agent") and "Platform: linux" in turns[0]["content"]
    assert [t["reasoning_content"] for t in turns if "reasoning_content" in t] == [
        "I should read the file.",
        "And who uses it?",
    ]
    assert turns[-1]["content"] == "Error: no such folder"
    assert [one["function"]["name"] for one in kwargs["tools"]] == [one["name"] for one in TOOLS]
    assert kwargs.get("enable_thinking") is (True if reasons else None)


async def test_the_same_request_is_counted():
    completer = model(False)
    counted = (await post(completer, "/v1/messages/count_tokens", COUNTED)).json()
    found = events((await post(completer, "/v1/messages", BODY)).text)
    tokens = found[0]["message"]["usage"]["input_tokens"]
    assert counted["input_tokens"] == tokens > 0
    assert counted["context_management"] == {"original_input_tokens": tokens}
    assert counted["quire"] == found[0]["message"]["quire"]


async def test_an_answer_is_sent_back_with_the_next_request():
    """What a stream gave, as Claude Code puts it together, is taken back; so is a change of its own line."""
    completer = model(True)
    content = [
        {"type": "thinking", "thinking": "Let me see.", "signature": "any"},
        {"type": "tool_use", "id": "call_0x", "name": "Bash", "input": {"command": "ls"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "call_0x", "content": "a.txt", "is_error": False}
    said = [*BODY["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.34.ab1; cch=00000;"}
    await post(completer, "/v1/messages", BODY)
    await post(completer, "/v1/messages", BODY | {"messages": said, "system": [line, *BODY["system"][1:]]})
    first, again = (g.prompt for g in completer.seen)
    assert again[: len(first)] == first, "the cache has all of the first prompt"
