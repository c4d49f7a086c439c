"""The whole way of an answer without a model: a scripted engine's tokens, the real completer and template, every dialect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.chat.completer import Completer
from quire.chat.templates.template import ChatTemplate
from quire.config import ServerConfig
from quire.engine.types import EngineInfo, Event
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.chat.test_completer import END, INFO, TOKENIZER, ScriptedEngine, finish, ids
from tests.unit.server.anthropic import test_anthropic
from tests.unit.server.fakes import MODEL, client_for, events
from tests.unit.server.ollama import test_ollama
from tests.unit.server.openai import test_tools
from tests.unit.server.scripts import FUNCTION

THOUGHT = "<think>\nI look it up.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"{THOUGHT}One moment.\n{CALL}"
HI = [{"role": "user", "content": "hi"}]


class Engine(ScriptedEngine):
    """Says the same to everybody, a token at a time."""

    def __init__(self, answer: str, ends: str):
        last = finish("stop", tokens=[END], stop_id=END) if ends == "stop" else finish("length")
        super().__init__([*(Event(id="", tokens=[token]) for token in ids(answer)), last])


@pytest.fixture(scope="module")
def template(shared_data: Path) -> ChatTemplate:
    return ChatTemplate((shared_data / "templates" / "Qwen-Qwen3-0.6B.jinja").read_text(), "", "<|im_end|>")


def service(template: ChatTemplate, answer: str = ANSWER, ends: str = "stop") -> Server:
    info = EngineInfo(**{f: getattr(INFO, f) for f in INFO.__struct_fields__} | {"context": 8192, "model": MODEL})
    engine: Any = Engine(answer, ends)
    made = Server(ServerConfig(), [Model(MODEL)])
    made.attach(made.models.first, engine, Completer(engine, TOKENIZER, template, info))
    return made


async def post(made: Server, path: str, **body: Any) -> httpx.Response:
    async with client_for(service=made) as http:
        r = await http.post(path, json={"model": MODEL, **body})
    assert r.status_code == 200, r.text
    return r


async def test_openai(template: ChatTemplate):
    ask: dict[str, Any] = {"messages": HI, "tools": [FUNCTION]}
    body = (await post(service(template), "/v1/chat/completions", **ask)).json()
    (choice,) = body["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert (message["reasoning"], message["content"]) == ("I look it up.", "One moment.")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Paris"})
    assert choice["finish_reason"] == "tool_calls"
    # A token is a byte here: the marks and the spaces around them count as reasoning, and nothing else does.
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT)
    assert body["usage"]["completion_tokens"] == len(ANSWER) + 1
    found = events((await post(service(template), "/v1/chat/completions", **ask, stream=True)).text)
    streamed, finished = test_tools.assembled(found)
    assert finished == "tool_calls"
    for one in (*streamed["tool_calls"], call):
        assert one.pop("id")
    assert {"refusal": None, **streamed} == message


@pytest.mark.parametrize("cut", range(0, len(ANSWER), 5))
async def test_a_length_anywhere(template: ChatTemplate, cut: int):
    """Whole and streamed say the same wherever an answer is cut, and a cut answer says so."""
    ask: dict[str, Any] = {"messages": HI, "tools": [FUNCTION]}
    made = [service(template, ANSWER[:cut], "length") for _ in range(2)]
    (choice,) = (await post(made[0], "/v1/chat/completions", **ask)).json()["choices"]
    found = events((await post(made[1], "/v1/chat/completions", **ask, stream=True)).text)
    streamed, finished = test_tools.assembled(found)
    assert choice["finish_reason"] == finished == "length"
    message = choice["message"]
    for one in (*streamed.get("tool_calls", []), *message.get("tool_calls", [])):
        del one["id"]
    assert {"refusal": None, **streamed} == {**message, "content": message["content"] or ""}
    text = message["content"] or ""
    assert message.get("reasoning", "") in ANSWER
    assert "One moment.".startswith(text) or text.startswith("One moment.") or text in THOUGHT
    if message.get("tool_calls"):
        assert message["tool_calls"][0]["function"]["arguments"] in ANSWER


async def test_anthropic_and_ollama(template: ChatTemplate):
    tool = {"name": "weather", "input_schema": FUNCTION["function"]["parameters"]}
    ask: dict[str, Any] = {"messages": HI, "tools": [tool], "max_tokens": 500, "thinking": {"type": "adaptive"}}
    body = (await post(service(template), "/v1/messages", **ask)).json()
    kinds = [b["type"] for b in body["content"]]
    assert (kinds, body["stop_reason"]) == (["thinking", "text", "tool_use"], "tool_use")
    assert body["content"][2]["input"] == {"city": "Paris"}
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": len(THOUGHT)}
    found = test_anthropic.events((await post(service(template), "/v1/messages", **ask, stream=True)).text)
    starts = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert starts == kinds
    line = (await post(service(template), "/api/chat", messages=HI, tools=[FUNCTION], stream=False)).json()
    assert line["message"]["thinking"] == "I look it up."
    assert line["message"]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    news = test_ollama.lines((await post(service(template), "/api/chat", messages=HI, tools=[FUNCTION])).text)
    assert "".join(n["message"].get("thinking", "") for n in news) == "I look it up."


async def test_switches_reach_the_prompt(template: ChatTemplate):
    """Qwen's template writes an empty thought where it is told not to think."""
    for path, body, thinks in (
        ("/v1/chat/completions", {"messages": HI}, True),
        ("/v1/chat/completions", {"messages": HI, "reasoning_effort": "high"}, True),
        ("/v1/chat/completions", {"messages": HI, "reasoning_effort": "none"}, False),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, False),
        (
            "/v1/messages",
            {"messages": HI, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            True,
        ),
        ("/api/chat", {"messages": HI, "think": False}, False),
        ("/api/chat", {"messages": HI, "think": True}, True),
        ("/api/generate", {"prompt": "hi", "think": False}, False),
    ):
        made = service(template, "ok")
        await post(made, path, **body)
        engine: Any = made.models.first.client
        prompt = TOKENIZER.decode(engine.requests[0].tokens, skip_special=False)
        assert ("</think>" in prompt) != thinks, (path, body, prompt)


async def test_without_tools_marks_are_text_and_after_none_too(template: ChatTemplate):
    for fields in ({}, {"tools": [FUNCTION], "tool_choice": "none"}):
        (choice,) = (await post(service(template), "/v1/chat/completions", messages=HI, **fields)).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"].endswith(CALL)
