"""An agent's session over each dialect, with a real tokenizer, template and prefix tree: each turn finds all of the turn before, its answer too.

The client keeps what the server answered and sends it back, as agents do; the model's words are written as Qwen's models write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.prefixes import NAME, PAGE, Replay, Said
from quire.chat.loading import tokenizer_and_template
from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.weights.checkpoint import open_checkpoint
from quire.weights.store.store import Store
from tests.unit.chat.prefixes.kit import template, tokenizer

QWEN = "qwen2.5-coder:1.5b"
RULES = "\n".join(
    f"- Rule {n}: prefer small changes, and say what file {n}.py does before it is changed." for n in range(60)
)
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "all": {"type": "boolean"}},
    "required": ["path"],
}
TOOLS = [(f"tool_{n}", f"Does thing {n} with a file.") for n in range(8)]
SAID = [
    Said("I read it.", [("tool_0", '{"path": "a.py"}')]),
    Said("", [("tool_1", '{"path": "a.py", "text": "def f():\\n    return \\"ä\\" # 1 < 2\\n", "all": true}')]),
    Said("Two at once.", [("tool_2", "{}"), ("tool_3", '{"path": "b/c.py", "all": false}')]),
    Said("It works.\n\nShall I go on?"),
    Said("Done."),
]


class OverChat:
    """A client of /v1/chat/completions."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": RULES}]

    async def turn(self, http: httpx.AsyncClient, question: str) -> None:
        calls = self.messages[-1].get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": c["id"], "content": f"result of {c['id'][:0]}it"} for c in calls]
        self.messages += results or [{"role": "user", "content": question}]
        tools = [
            {"type": "function", "function": {"name": n, "description": d, "parameters": SCHEMA}} for n, d in TOOLS
        ]
        r = await http.post("/v1/chat/completions", json={"model": NAME, "messages": self.messages, "tools": tools})
        assert r.status_code == 200, r.text
        self.messages.append(r.json()["choices"][0]["message"])


class OverMessages:
    """A client of /v1/messages."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def turn(self, http: httpx.AsyncClient, question: str) -> None:
        last = self.messages[-1]["content"] if self.messages else []
        results = [
            {"type": "tool_result", "tool_use_id": b["id"], "content": "result of it"}
            for b in last
            if b["type"] == "tool_use"
        ]
        self.messages.append({"role": "user", "content": results or [{"type": "text", "text": question}]})
        body = {
            "model": NAME,
            "max_tokens": 4096,
            "system": RULES,
            "messages": self.messages,
            "tools": [{"name": n, "description": d, "input_schema": SCHEMA} for n, d in TOOLS],
        }
        r = await http.post("/v1/messages", json=body)
        assert r.status_code == 200, r.text
        self.messages.append({"role": "assistant", "content": r.json()["content"]})


class OverResponses:
    """A client of /v1/responses that sends the whole conversation each time."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.last: list[dict[str, Any]] = []

    async def turn(self, http: httpx.AsyncClient, question: str) -> None:
        results = [
            {"type": "function_call_output", "call_id": i["call_id"], "output": "result of it"}
            for i in self.last
            if i["type"] == "function_call"
        ]
        self.items += results or [{"role": "user", "content": question}]
        body = {
            "model": NAME,
            "instructions": RULES,
            "input": self.items,
            "store": False,
            "tools": [{"type": "function", "name": n, "description": d, "parameters": SCHEMA} for n, d in TOOLS],
        }
        r = await http.post("/v1/responses", json=body)
        assert r.status_code == 200, r.text
        self.last = r.json()["output"]
        self.items += self.last


@pytest.fixture(scope="module", params=["bytes", QWEN])
def words(request: pytest.FixtureRequest) -> Iterator[tuple[Tokenizer, ChatTemplate | None]]:
    if request.param == "bytes":
        yield tokenizer(), template()
        return
    store = Store()
    if QWEN not in {m.name for m in store.list()}:
        pytest.skip(f"{QWEN} is not in the store: `quire pull {QWEN}` fetches it")
    with open_checkpoint(store.pull(QWEN)) as checkpoint:
        yield tokenizer_and_template(checkpoint)


@pytest.mark.parametrize("client", [OverChat, OverMessages, OverResponses])
async def test_a_turn_finds_all_of_the_turn_before(
    words: tuple[Tokenizer, ChatTemplate | None], client: type[OverChat | OverMessages | OverResponses]
):
    replay = Replay(*words)
    agent = client()
    whole: list[int] = []  # tokens of each prompt with its answer
    async with replay.http() as http:
        for n, said in enumerate(SAID):
            replay.says(said)
            await agent.turn(http, f"question {n}")
            whole.append(replay.client.seen[-1].prompt + len(replay.client.says))
        told = (await http.get("/v1/cache/breaks")).json()
    seen = replay.client.seen
    assert len(seen) == len(SAID)
    for before, now in zip(whole, seen[1:], strict=False):
        assert now.cached == (before - 1) // PAGE * PAGE, json.dumps(told)
    assert told["data"] == []
    later = seen[1:]
    assert sum(s.cached for s in later) >= 0.9 * sum(s.prompt for s in later)
