"""POST /v1/messages: what a request becomes, every event of a stream, what the tokens are counted as."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.chat.types import Chunk, Generation
from quire.config import ServerConfig
from quire.engine.types import Receipt
from quire.observe.errors import Busy, EngineDead, QuireError
from quire.server import replies
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, opened_by, service_over

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "a longer question, over sixteen bytes"}]
PROMPT = len(b"user:a longer question, over sixteen bytes\n")
CACHED = 16  # what the scripted engine says of such a prompt


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 50, "messages": USER, **more}


def events(text: str) -> list[dict[str, Any]]:
    """Every event; its name must be its object's type, and nothing may stand between events."""
    found = []
    assert text.endswith("\n\n")
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        assert name.startswith("event: ") and data.startswith("data: "), block
        found.append(json.loads(data[6:]))
        assert found[-1]["type"] == name[7:]
    return found


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(e["delta"]["text"] for e in found if e["type"] == "content_block_delta")


class Stopping(FakeCompleter):
    """Ends at a stop string, as a completer does: the text before it, then a chunk that names it."""

    async def _chunks(self, g: Generation) -> AsyncIterator[Chunk]:
        before, stop, _ = self.answer.partition(g.sampling.stop[0])
        yield Chunk(text=before, tokens=list(before.encode()))
        yield Chunk(finish="stop", stop_reason=stop, receipt=Receipt(prompt_tokens=len(g.prompt)))


async def test_an_answer():
    async with client_for() as http:
        r = await http.post(MESSAGES, json=ask())
    body = r.json()
    assert r.status_code == 200
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "Hello, wörld"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": PROMPT - CACHED,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": CACHED,
            "output_tokens": 13,
        },
    }


async def test_every_event_of_a_stream():
    async with client_for() as http:
        r = await http.post(MESSAGES, json=ask(stream=True))
    assert r.headers["content-type"].startswith("text/event-stream")
    found = events(r.text)
    start, ping, block, *deltas, stop, delta, last = found
    message = start.pop("message")
    assert message.pop("id").startswith("msg_")
    assert start == {"type": "message_start"}
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": PROMPT,
            "output_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert ping == {"type": "ping"}
    assert len(deltas) > 3
    for d in deltas:
        assert d.keys() == {"type", "index", "delta"} and (d["type"], d["index"]) == ("content_block_delta", 0)
        assert d["delta"].keys() == {"type", "text"} and d["delta"]["type"] == "text_delta" and d["delta"]["text"]
    assert text_of(deltas) == "Hello, wörld"
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta == {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {
            "input_tokens": PROMPT - CACHED,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": CACHED,
            "output_tokens": 13,
        },
    }
    assert last == {"type": "message_stop"}


async def test_silence_is_a_ping(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replies, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(replies, "KEEP_ALIVE_SECONDS", 0.01)
    completer = FakeCompleter()
    async with client_for(completer) as http:
        completer.gate = opened_by(http, b"event: ping", 3)
        found = events((await http.post(MESSAGES, json=ask(stream=True))).text)
    assert [e["type"] for e in found[:4]] == ["message_start", "ping", "ping", "ping"]
    assert text_of(found) == "Hello, wörld"


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(stream: bool):
    async def stopped(completer: FakeCompleter, **more: Any) -> tuple[str, str | None, str, int]:
        async with client_for(completer) as http:
            r = await http.post(MESSAGES, json=ask(stream=stream, **more))
        assert r.status_code == 200, r.text
        if not stream:
            body = r.json()
            text, ended, usage = body["content"][0]["text"], body, body["usage"]
        else:
            found = events(r.text)
            text, ended, usage = text_of(found), found[-2]["delta"], found[-2]["usage"]
        return ended["stop_reason"], ended["stop_sequence"], text, usage["output_tokens"]

    assert await stopped(FakeCompleter()) == ("end_turn", None, "Hello, wörld", 13)
    assert await stopped(FakeCompleter(), max_tokens=5) == ("max_tokens", None, "Hello", 5)
    assert await stopped(Stopping(), stop_sequences=[", w"]) == ("stop_sequence", ", w", "Hello", 5)
    # The context ends first: clients must send max_tokens, and send large ones.
    small = FakeCompleter(context=PROMPT + 5)
    assert await stopped(small, max_tokens=4096) == ("model_context_window_exceeded", None, "Hello", 5)
    assert small.seen[0].sampling.max_tokens == 5
    assert await stopped(FakeCompleter(context=PROMPT + 5), max_tokens=5) == ("max_tokens", None, "Hello", 5)
    assert await stopped(FakeCompleter(answer="Hi"), max_tokens=4096) == ("end_turn", None, "Hi", 2)


async def test_fields_reach_the_engine():
    completer = FakeCompleter()
    async with client_for(completer) as http:
        await http.post(MESSAGES, json=ask())
        plain = completer.seen[0].sampling
        assert (plain.temperature, plain.top_p, plain.top_k, plain.stop, plain.max_tokens) == (1.0, 1.0, 0, (), 50)
        r = await http.post(MESSAGES, json=ask(temperature=0.3, top_p=0.9, top_k=40, stop_sequences=["a", "b"]))
        assert r.status_code == 200
    s = completer.seen[1].sampling
    assert (s.temperature, s.top_p, s.top_k, s.stop, s.n) == (0.3, 0.9, 40, ("a", "b"), 1)


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=71fea;"


@pytest.mark.parametrize(
    ("fields", "rendered"),
    [
        ({}, [("user", "hi")]),
        ({"system": "be kind"}, [("system", "be kind"), ("user", "hi")]),
        ({"system": ""}, [("user", "hi")]),
        ({"system": None}, [("user", "hi")]),
        (
            {
                "system": [
                    {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
                    {"type": "text", "text": "b"},
                ]
            },
            [("system", "a\nb"), ("user", "hi")],
        ),
        # Claude Code's line, which is new in every request, in each form it comes in; elsewhere it is text like any other.
        ({"system": f"{BILLING}\nbe kind"}, [("system", "be kind"), ("user", "hi")]),
        (
            {"system": [{"type": "text", "text": BILLING}, {"type": "text", "text": "b"}]},
            [("system", "b"), ("user", "hi")],
        ),
        ({"system": BILLING}, [("user", "hi")]),
        ({"system": f"not first {BILLING}"}, [("system", f"not first {BILLING}"), ("user", "hi")]),
        ({"messages": [{"role": "user", "content": BILLING}]}, [("user", BILLING)]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
            [("user", "a\nb")],
        ),
        # Turns of one role that follow each other are one.
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
            [("user", "a\nb")],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "text", "text": "b", "citations": None}]},
                    {"role": "system", "content": "now rhyme"},
                    {"role": "user", "content": "c"},
                ]
            },
            [("user", "a"), ("assistant", "b"), ("system", "now rhyme"), ("user", "c")],
        ),
        # Taken without effect.
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, [("user", "hi")]),
        ({"tools": [], "tool_choice": {"type": "auto"}}, [("user", "hi")]),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}}, [("user", "hi")]),
        ({"thinking": {"type": "disabled"}, "service_tier": "standard_only", "speed": "standard"}, [("user", "hi")]),
    ],
)
async def test_what_the_template_is_given(fields: dict[str, Any], rendered: list[tuple[str, str]]):
    completer = FakeCompleter()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]} | fields
    async with client_for(completer) as http:
        answer = await http.post(MESSAGES, json=body | {"max_tokens": 5, "metadata": {"user_id": "u"}})
        count = await http.post(COUNT, json=body)
    assert answer.status_code == count.status_code == 200, answer.text + count.text
    for messages, kwargs in completer.rendered:
        assert [(m["role"], m["content"]) for m in messages] == rendered
        assert kwargs == {"add_generation_prompt": True}
    usage = answer.json()["usage"]
    assert count.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    billed = BILLING in str(fields.get("system")) and BILLING not in str(rendered)
    notes = ["system: Claude Code's line x-anthropic-billing-header is no part of the prompt"] if billed else []
    assert [r.json().get("quire", {"notes": []})["notes"] for r in (answer, count)] == [notes, notes]
    assert len(completer.rendered) == 2


async def test_betas_and_names_of_users_change_nothing():
    completer = FakeCompleter()
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,no-such-beta-2099-01-01"}
    async with client_for(completer) as http:
        plain = (await http.post(MESSAGES, json=ask())).json()
        for user in ("u" * 300, '{"device_id":"x","session_id":"y"}', "", None):
            r = await http.post(
                MESSAGES, params={"beta": "true"}, headers=headers, json=ask(metadata={"user_id": user})
            )
            assert r.status_code == 200, r.text
            assert r.json() == plain | {"id": r.json()["id"]}
        r = await http.post(COUNT, params={"beta": "true"}, headers=headers, json={"model": MODEL, "messages": USER})
        assert r.json() == {"input_tokens": PROMPT}


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({"service_tier": "auto", "speed": "standard", "inference_geo": None, "diagnostics": None}, []),
        ({"service_tier": "priority"}, ["service_tier is 'priority': "]),
        ({"speed": "fast"}, ["speed is 'fast': "]),
        ({"inference_geo": "us", "speed": "fast"}, ["speed is 'fast': ", "inference_geo is 'us': "]),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, ["diagnostics: "]),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9000}}}, ["output_config.task_budget: "]),
    ],
)
async def test_hints_have_no_effect_and_are_told(fields: dict[str, Any], begins: list[str]):
    completer = FakeCompleter()
    body = {"model": MODEL, "messages": USER} | fields
    async with client_for(completer) as http:
        plain = await http.post(MESSAGES, json=ask())
        whole = await http.post(MESSAGES, json=ask(**fields))
        stream = await http.post(MESSAGES, json=ask(stream=True, **fields))
        count = await http.post(COUNT, json=body)
    assert whole.json()["content"] == plain.json()["content"]
    assert len({str((g.prompt, g.sampling, g.constraint)) for g in completer.seen}) == 1
    for answer in (whole.json(), events(stream.text)[0]["message"], count.json()):
        notes = answer.get("quire", {"notes": []})["notes"]
        assert ("quire" in answer) == bool(begins) and len(notes) == len(begins), notes
        for note, beginning in zip(notes, begins, strict=True):
            assert note.startswith(beginning) and note.endswith("; no effect")


async def test_counting_runs_nothing_and_has_no_bound_but_work():
    completer = FakeCompleter(context=20)
    async with client_for(completer) as http:
        r = await http.post(COUNT, json={"model": MODEL, "messages": USER})
        assert r.json() == {"input_tokens": PROMPT}  # over the context: that is what one counts for
        assert not completer.seen
        r = await http.post(COUNT, json={"model": MODEL, "messages": [{"role": "user", "content": "x" * 101}]})
        assert r.status_code == 400 and "prompt is too long" in r.json()["error"]["message"]
        assert len(completer.rendered) == 1  # refused before the work


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_before_the_first_byte(stream: bool):
    completer = FakeCompleter()
    async with client_for(completer) as http:
        for raised, status, kind, code in (
            (Busy("the queue is full", retry_after=7), 429, "rate_limit_error", "queue_full"),
            (EngineDead("the engine died"), 503, "api_error", "engine_dead"),
            (QuireError("failed at /home/me/secret.py"), 500, "api_error", "internal_error"),
        ):
            completer.raises = raised
            r = await http.post(MESSAGES, json=ask(stream=stream))
            assert r.status_code == status
            body = r.json()
            assert body["type"] == "error" and body["error"]["type"] == kind
            assert body["error"]["details"] == {"error_code": code}
            assert "secret" not in r.text
            assert ("retry-after" in r.headers) == (status != 500)


@pytest.mark.parametrize(
    ("dies", "code"), [(EngineDead("the engine died"), "engine_dead"), (ValueError("at /srv/x"), "internal_error")]
)
async def test_an_error_event_in_mid_stream(dies: Exception, code: str):
    completer = FakeCompleter()
    completer.dies = dies
    async with client_for(completer) as http:
        r = await http.post(MESSAGES, json=ask(stream=True))
    found = events(r.text)
    assert r.status_code == 200
    assert text_of(found) == "Hel"
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error" and found[-1]["error"]["details"] == {"error_code": code}
    assert "/srv" not in r.text
    assert not {"message_stop", "message_delta", "content_block_stop"} & {e["type"] for e in found}
    assert "[DONE]" not in r.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_its_request(stream: bool):
    completer = FakeCompleter(answer="x" * 100)
    completer.delay = 0.3  # half a minute for all of it
    config = ServerConfig()
    from quire.server.app import create_app

    app = create_app(config, service_over(completer, config))
    body = json.dumps(ask(stream=stream, max_tokens=100)).encode()
    inbox = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if inbox:
            return inbox.pop()
        while not completer.running:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": MESSAGES, "headers": headers, "query_string": b"beta=true"}
    await app(scope, receive, send)
    assert (completer.running, completer.aborted) == (0, 1)
    assert not any(b"message_stop" in m.get("body", b"") for m in sent)
