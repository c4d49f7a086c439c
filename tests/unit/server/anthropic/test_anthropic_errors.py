"""Every refusal at /v1/messages has Anthropic's shape and words, whichever layer it comes from; elsewhere OpenAI's stays."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from quire.config import ServerConfig
from quire.server.served import Model
from quire.server.server import Server
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for, service_over
from tests.unit.server.test_bad_input import LEAK, RAW

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "hi"}]
JSON = {"content-type": "application/json"}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 20, "messages": USER, **fields}


def turn(**fields: Any) -> dict[str, Any]:
    return ask(messages=[{"role": "user", "content": "hi", **fields}])


def block(**fields: Any) -> dict[str, Any]:
    return turn(content=[{"type": "text", "text": "before"}, fields])


def without(name: str) -> dict[str, Any]:
    return {k: v for k, v in ask().items() if k != name}


def check(body: Any, kind: str) -> dict[str, Any]:
    assert body.keys() == {"type", "error"} and body["type"] == "error"
    error = body["error"]
    assert error.keys() == {"type", "message", "details"}
    assert error["type"] == kind, error
    assert error["message"] and len(error["message"]) < 700
    assert error["details"].keys() == {"error_code"}
    assert not LEAK.search(json.dumps(body)), body
    return error


EXTRA = "Extra inputs are not permitted"
AT = "messages.0.content.1"
# (body, how the message begins)
FIELDS: list[tuple[Any, str]] = [
    (without("model"), "model: Field required"),
    (without("messages"), "messages: Field required"),
    (without("max_tokens"), "max_tokens: Field required"),
    (ask(max_tokens=None), "max_tokens: Expected"),
    (ask(max_tokens=0), "max_tokens is 0"),
    (ask(max_tokens=-1), "max_tokens is -1"),
    (ask(max_tokens=2**40), "max_tokens is"),
    (ask(max_tokens="5"), "max_tokens: Expected"),
    (ask(model=5), "model: Expected"),
    (ask(messages=[]), "messages: at least one message is required"),
    (ask(messages=[], system="alone"), "messages: at least one message is required"),
    (ask(messages="hi"), "messages: Expected"),
    (ask(messages=[5]), "messages.0: Expected"),
    (ask(messages=[{"role": "user"}]), "messages.0.content: Field required"),
    (ask(messages=[{"content": "x"}]), "messages.0.role: Field required"),
    (turn(role="tool"), "messages.0.role: must be one of assistant, system, user"),
    (turn(role=5), "messages.0.role: Expected"),
    (turn(content=None), "messages.0.content: Expected"),
    (turn(content=5), "messages.0.content: Expected"),
    (turn(name="x"), f"messages.0.name: {EXTRA}"),
    (turn(content=["x"]), "messages.0.content.0: Expected object"),
    (block(), f"{AT}.type: Field required"),
    (block(type=5), f"{AT}.type: Expected"),
    (block(type="text"), f"{AT}.text: Field required"),
    (block(type="text", text=5), f"{AT}.text: Expected"),
    (block(type="text", text="x", id=1), f"{AT}.id: {EXTRA}"),
    (block(type="text", text="x", citations=[{}]), f"{AT}.citations: not supported yet"),
    (block(type="image", source={"type": "url", "url": "http://x/"}), f"{AT}.type: this model takes text only"),
    (block(type="document", source={}), f"{AT}.type: this model takes text only"),
    (block(type="surprise"), f"{AT}.type: this model takes text only"),
    (block(type="tool_use", id="t", name="f", input={}), f"{AT}.type: tool_use blocks belong in messages of the role"),
    (block(type="tool_result", tool_use_id="t"), f"{AT}.tool_use_id: no earlier message has a call with the id 't'"),
    (block(type="thinking", thinking="x", signature=""), f"{AT}.type: thinking blocks belong in messages of the role"),
    (block(type="search_result"), f"{AT}.type: search_result blocks are not supported yet"),
    (ask(system=5), "system: Expected"),
    (ask(system=[{"type": "image"}]), "system.0.type: this model takes text only"),
    (ask(system=[{"type": "text"}]), "system.0.text: Field required"),
    (ask(temperature=-0.1), "temperature is -0.1"),
    (ask(temperature="hot"), "temperature: Expected"),
    (ask(top_p=0), "top_p is 0"),
    (ask(top_p=1.5), "top_p is 1.5"),
    (ask(top_k=-1), "top_k is -1"),
    (ask(top_k=1.5), "top_k: Expected"),
    (ask(stop_sequences="x"), "stop_sequences: Expected"),
    (ask(stop_sequences=[1]), "stop_sequences.0: Expected"),
    (ask(stop_sequences=[""]), "stop_sequences: a stop string is empty"),
    (ask(stop_sequences=["x"] * 17), "stop_sequences: 17 stop strings: at most 16"),
    (ask(stream="yes"), "stream: Expected"),
    (ask(metadata={"user_id": 5}), "metadata.user_id: Expected"),
    (ask(metadata={"other": 5}), f"metadata.other: {EXTRA}"),
    (ask(tool_choice={"type": "any"}), "tool_choice needs tools"),
    (ask(tool_choice={"type": "tool", "name": "f"}), "tool_choice needs tools"),
    (ask(tool_choice="any"), "tool_choice: Expected"),
    (ask(thinking={"type": "sometimes"}), "thinking.type: must be"),
    (ask(service_tier=5), "service_tier: Expected"),
    (ask(speed=["fast"]), "speed: Expected"),
    (ask(output_config={"effort": "lots"}), "output_config.effort is 'lots'"),
    (ask(container="x"), "container is not supported"),
    (ask(mcp_servers=[{}]), "mcp_servers is not supported"),
    (ask(n=2), f"n: {EXTRA}"),
    (ask(seed=2), f"seed: {EXTRA}"),
    (ask(max_token=2), f"max_token: {EXTRA} (did you mean max_tokens?)"),
    (turn(content="x" * 300), "prompt is too long: 306 tokens > 199 maximum"),
    (turn(content="x" * 300_000), "prompt is too long: "),
]


@pytest.mark.parametrize(("body", "begins"), FIELDS, ids=[f"{w[:40]}-{i}" for i, (_, w) in enumerate(FIELDS)])
async def test_fields(body: Any, begins: str):
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        r = await http.post(MESSAGES, json=body)
        assert r.status_code == 400
        error = check(r.json(), "invalid_request_error")
        assert error["message"].startswith(begins), error
        assert not completer.seen, "the engine never hears of it"
        assert (await http.post(MESSAGES, json=ask())).status_code == 200


async def test_what_does_not_count_is_extra_where_one_counts():
    async with client_for(strict=True) as http:
        for name, value in (("max_tokens", 5), ("stream", True), ("temperature", 0.5), ("metadata", {})):
            r = await http.post(COUNT, json=without("max_tokens") | {name: value})
            assert check(r.json(), "invalid_request_error")["message"].startswith(f"{name}: {EXTRA}")
        r = await http.post(COUNT, json=without("max_tokens") | {"tools": [{}]})
        assert check(r.json(), "invalid_request_error")["message"].startswith("tools.0.name: Field required")


async def test_codes_say_which_kind_of_refusal():
    async with client_for(strict=True) as http:
        for body, code in (
            (ask(x=1), "unknown_parameter"),
            (turn(x=1), "unknown_parameter"),
            (block(type="image"), "unsupported_content"),
            (ask(container="x"), "unsupported_parameter"),
            (turn(content="x" * 300), "context_length_exceeded"),
            (turn(content="x" * 300_000), "context_length_exceeded"),
        ):
            r = await http.post(MESSAGES, json=body)
            assert r.json()["error"]["details"]["error_code"] == code


@pytest.mark.parametrize(("name", "body"), RAW, ids=[n for n, _ in RAW])
@pytest.mark.parametrize("route", [MESSAGES, COUNT])
async def test_bodies(route: str, name: str, body: bytes):
    async with client_for() as http:
        r = await http.post(route, content=body, headers=JSON)
        assert r.status_code == 400
        check(r.json(), "invalid_request_error")
        assert (await http.post(MESSAGES, json=ask())).status_code == 200


async def test_deep_and_wide_blocks_are_cheap_to_refuse():
    deep = b"[" * 5000 + b"]" * 5000
    async with client_for() as http:
        for inner in (b'{"type":"tool_use","input":' + deep + b"}", b'{"type":"text","text":"x","x":' + deep + b"}"):
            body = b'{"model":"%s","max_tokens":5,"messages":[{"role":"user","content":[%s]}]}' % (
                MODEL.encode(),
                inner,
            )
            r = await http.post(MESSAGES, content=body, headers=JSON)
            assert r.status_code == 400
            check(r.json(), "invalid_request_error")


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_a_model_that_is_not_served(path: str):
    async with client_for() as http:
        body = ask(model="claude-x") if path == MESSAGES else without("max_tokens") | {"model": "claude-x"}
        r = await http.post(path, json=body)
        assert r.status_code == 404
        assert "not served here" in check(r.json(), "not_found_error")["message"]


async def test_routes_methods_and_media():
    async with client_for() as http:
        for method, path, status, kind in (
            ("GET", MESSAGES, 405, "invalid_request_error"),
            ("DELETE", COUNT, 405, "invalid_request_error"),
            ("POST", f"{MESSAGES}/", 404, "not_found_error"),
            ("POST", f"{MESSAGES}/batches", 404, "not_found_error"),
        ):
            r = await http.request(method, path)
            assert r.status_code == status, path
            check(r.json(), kind)
        r = await http.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"})
        assert r.status_code == 415
        check(r.json(), "invalid_request_error")


async def test_layers_in_front_speak_it_too(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    async with client_for(config=ServerConfig(max_body=100)) as http:
        r = await http.post(MESSAGES, json=ask(system="x" * 200))
        assert r.status_code == 413
        assert "100 bytes" in check(r.json(), "request_too_large")["message"]
        r = await http.post(MESSAGES, json=ask(), headers={"host": "evil.example"})
        assert r.status_code == 403
        check(r.json(), "permission_error")
    loading = Server(ServerConfig(), [Model(MODEL)])
    async with client_for(service=loading) as http:
        for path, body in ((MESSAGES, ask()), (COUNT, without("max_tokens"))):
            r = await http.post(path, json=body)
            assert r.status_code == 503 and r.headers["retry-after"]
            assert "loading" in check(r.json(), "api_error")["message"]
    draining = service_over(FakeCompleter())
    draining.draining = True
    async with client_for(service=draining) as http:
        r = await http.post(MESSAGES, json=ask())
        assert r.status_code == 503
        assert "shutting down" in check(r.json(), "api_error")["message"]
    broken: Any = FakeCompleter()
    broken.encode_chat = None  # a mistake of ours
    async with client_for(broken) as http:
        r = await http.post(MESSAGES, json=ask())
        assert r.status_code == 500
        assert "its log has the cause" in check(r.json(), "api_error")["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/message", "/nope"])
async def test_other_paths_keep_openais_shape(path: str):
    async with client_for(config=ServerConfig(api_key="k")) as http:
        for headers in ({}, {"x-api-key": "k"}):
            r = await http.post(path, json={}, headers=headers)
            assert r.status_code in (400, 401, 404)
            assert r.json().keys() == {"error"} and "param" in r.json()["error"]


async def test_the_request_id_has_the_name_that_clients_read():
    async with client_for() as http:
        for body in (ask(), ask(x=1)):
            r = await http.post(MESSAGES, json=body)
            assert r.headers["request-id"] == r.headers["x-request-id"]
