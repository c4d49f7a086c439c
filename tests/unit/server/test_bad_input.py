"""Malformed requests: each is a 4xx in OpenAI's shape that names the field, and the server goes on serving."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.effort import at_most
from tests.unit.server.fakes import MODEL, FakeCompleter, client_for

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
LEAK = re.compile(r"0x[0-9a-f]{6}|Traceback|File \"|/usr/|/home/|/tmp/|/root/|site-packages|\.py\b")


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hi", **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi", **fields}]}


RAW: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("not json", b"hello"),
    ("cut", b'{"messages": ['),
    ("trailing", b'{"messages": []} x'),
    ("array", b"[]"),
    ("null", b"null"),
    ("number", b"12"),
    ("string", b'"x"'),
    ("single quotes", b"{'messages': []}"),
    ("nan", b'{"messages": [{"role":"user","content":"x"}], "temperature": NaN}'),
    ("infinity", b'{"messages": [{"role":"user","content":"x"}], "temperature": Infinity}'),
    ("huge number", b'{"messages": [{"role":"user","content":"x"}], "temperature": 1e999}'),
    ("bad utf-8", b'{"messages": [{"role":"user","content":"\xff\xfe"}]}'),
    ("lone surrogate", b'{"messages": [{"role":"user","content":"\\ud800"}]}'),
    ("bad escape", b'{"messages": [{"role":"user","content":"\\q"}]}'),
    ("nul", b'{"messages": \x00}'),
    ("deep array", b'{"messages": ' + b"[" * 100_000),
    ("deep unknown", b'{"metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b', "messages": []}'),
    ("deep object", b'{"chat_template_kwargs": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"),
    ("utf-16", '{"messages": []}'.encode("utf-16")),
]

# (route, body, the param that the error must name)
FIELDS: list[tuple[str, Any, str | None]] = [
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": [1]}, "messages[0]"),
    (CHAT, {"messages": [{}]}, "messages[0].role"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    (CHAT, message(role=5), "messages[0].role"),
    (CHAT, message(content=5), "messages[0].content"),
    (CHAT, message(content=[{"type": "image_url", "image_url": {"url": "http://x/"}}]), "messages[0].content[0].type"),
    (CHAT, message(content=[{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0].type"),
    (CHAT, message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (CHAT, message(content=[{"text": "x"}]), "messages[0].content[0].type"),
    (CHAT, message(content=["x"]), "messages[0].content[0]"),
    (CHAT, message(tool_calls=[{"id": "1"}]), "messages[0].tool_calls"),
    (CHAT, message(surprise=1), "messages[0].surprise"),
    (CHAT, chat(model="gpt-4"), "model"),
    (CHAT, chat(model="../../etc/passwd"), "model"),
    (CHAT, chat(model=5), "model"),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature=1e9), "temperature"),
    (CHAT, chat(temperature=True), "temperature"),
    (CHAT, chat(top_p=0), "top_p"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(top_k=2**70), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(typical_p=0), "typical_p"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=-1), "n"),
    (CHAT, chat(n=1_000_000), "n"),
    (CHAT, chat(n="2"), "n"),
    (CHAT, chat(seed="x"), "seed"),
    (CHAT, chat(seed=2**65), "seed"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens=-5), "max_tokens"),
    (CHAT, chat(max_tokens=10**6), "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=10**6), "max_completion_tokens"),
    (CHAT, chat(max_tokens=3, max_completion_tokens=4), "max_tokens"),
    (CHAT, chat(min_tokens=-1), "min_tokens"),
    (CHAT, chat(min_tokens=9, max_tokens=3), "min_tokens"),
    (CHAT, chat(stop=[""]), "stop"),
    (CHAT, chat(stop=["x"] * 17), "stop"),
    (CHAT, chat(stop="x" * 2000), "stop"),
    (CHAT, chat(stop=[1]), "stop[0]"),
    (CHAT, chat(stop_token_ids=[300]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids"),
    (CHAT, chat(stop_token_ids=[1] * 200), "stop_token_ids"),
    (CHAT, chat(stop_token_ids="1"), "stop_token_ids"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    (CHAT, chat(logit_bias={"300": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(2000)}), "logit_bias"),
    (CHAT, chat(logit_bias=[1]), "logit_bias"),
    (CHAT, chat(logprobs=5), "logprobs"),
    (CHAT, chat(top_logprobs=5), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (CHAT, chat(prompt_logprobs=21), "prompt_logprobs"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(stream=True, stream_options={"x": 1}), "stream_options.x"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "structural_tag", "structures": []}), "response_format.format"),
    (CHAT, chat(response_format={"type": "text", "triggers": ["<"]}), "response_format.triggers"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema.schema"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format.json_schema.schema"),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"frob": 1}}),
        "response_format.json_schema.frob",
    ),
    (CHAT, chat(response_format={"type": "text", "schema": {}}), "response_format.type"),
    (CHAT, chat(response_format="json"), "response_format"),
    (CHAT, chat(modalities=["text", "audio"]), "modalities"),
    (CHAT, chat(audio={"voice": "x"}), "audio"),
    (CHAT, chat(store=True), "store"),
    (CHAT, chat(service_tier="priority"), "service_tier"),
    (CHAT, chat(chat_template="{{ 1 }}"), "chat_template"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"a": [[[0] * 40] * 40] * 40}), "chat_template_kwargs"),
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (CHAT, chat(structured_outputs={}), "structured_outputs"),
    (CHAT, chat(structured_outputs={"regex": "a", "structural_tag": "{}"}), "structured_outputs.structural_tag"),
    (CHAT, chat(structured_outputs={"json": {}, "whitespace_pattern": "x*"}), "structured_outputs.whitespace_pattern"),
    (
        CHAT,
        chat(structured_outputs={"regex": "a", "whitespace_pattern": " ?"}),
        "structured_outputs.whitespace_pattern",
    ),
    (CHAT, chat(guided_json={}, guided_whitespace_pattern=".*"), "guided_whitespace_pattern"),
    (CHAT, chat(guided_json={}, guided_whitespace_pattern="(("), "guided_whitespace_pattern"),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs.choice"),
    (CHAT, chat(guided_json={}, response_format={"type": "json_object"}), "guided_json"),
    (CHAT, chat(guided_choice="a"), "guided_choice"),
    (CHAT, chat(guided_regex=1), "guided_regex"),
    (CHAT, chat(guided_decoding_backend="xgrammar"), "guided_decoding_backend"),
    (CHAT, chat(guided_whitespace_pattern=" ?"), "guided_whitespace_pattern"),
    (COMPLETE, text(grammar="root ::= x", json_schema={}), "grammar"),
    (CHAT, chat(allowed_token_ids=[1]), "allowed_token_ids"),
    (CHAT, chat(bad_words=["x"]), "bad_words"),
    (CHAT, chat(kv_transfer_params={"host": "x"}), "kv_transfer_params"),
    (CHAT, chat(echo=True), "echo"),
    (CHAT, chat(priority=2**40), "priority"),
    (CHAT, chat(itl_slo_ms=0), "itl_slo_ms"),
    (CHAT, chat(itl_slo_ms=1e9), "itl_slo_ms"),
    (CHAT, chat(cache_salt=""), "cache_salt"),
    (CHAT, chat(cache_salt="x" * 1000), "cache_salt"),
    (CHAT, chat(request_id="a b\n"), "request_id"),
    (CHAT, chat(temprature=1), "temprature"),
    (CHAT, message(content="x" * 300), "messages"),
    (CHAT, message(content="x" * 300_000), "messages"),
    (COMPLETE, {}, "prompt"),
    (COMPLETE, {"prompt": ""}, "prompt"),
    (COMPLETE, {"prompt": []}, "prompt"),
    (COMPLETE, {"prompt": [[]]}, "prompt"),
    (COMPLETE, {"prompt": ["a", ""]}, "prompt[1]"),
    (COMPLETE, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETE, {"prompt": [1, [2]]}, "prompt"),
    (COMPLETE, {"prompt": [1.5]}, "prompt[0]"),
    (COMPLETE, {"prompt": [True]}, "prompt[0]"),
    (COMPLETE, {"prompt": [300]}, "prompt"),
    (COMPLETE, {"prompt": [-1]}, "prompt"),
    (COMPLETE, {"prompt": [2**80]}, "prompt"),
    (COMPLETE, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETE, {"prompt": ["a"] * 65}, "prompt"),
    (COMPLETE, {"prompt": ["a"] * 10_000}, "prompt"),
    (COMPLETE, {"prompt": ["a"] * 60, "n": 60}, "n"),
    (COMPLETE, {"prompt": "x" * 200}, "prompt"),
    (COMPLETE, text(max_tokens=0), "max_tokens"),
    (COMPLETE, text(max_tokens=199), "max_tokens"),
    (COMPLETE, text(logprobs=True), "logprobs"),
    (COMPLETE, text(logprobs=21), "logprobs"),
    (COMPLETE, text(logprobs=-1), "logprobs"),
    (COMPLETE, text(best_of=0), "best_of"),
    (COMPLETE, text(best_of=65), "best_of"),
    (COMPLETE, text(n=3, best_of=2), "best_of"),
    (COMPLETE, text(best_of=2, stream=True), "best_of"),
    (COMPLETE, {"prompt": ["a"] * 60, "best_of": 60}, "best_of"),
    (COMPLETE, text(n=0, best_of=3), "n"),
    (COMPLETE, text(suffix="x", echo=True), "echo"),
    (COMPLETE, text(suffix="x"), "suffix"),
    (COMPLETE, text(use_beam_search=True), "use_beam_search"),
    (COMPLETE, text(prompt_embeds="gASV"), "prompt_embeds"),
    (COMPLETE, text(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (COMPLETE, text(messages=[]), "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "model": "x"}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [300]}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [1], "x": 1}, "x"),
]


def check(status: int, body: Any) -> dict[str, Any]:
    assert 400 <= status < 500, (status, body)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 700
    assert isinstance(error["code"], str)
    assert not LEAK.search(json.dumps(body)), body
    return error


@pytest.mark.parametrize(("route", "body", "param"), FIELDS, ids=[f"{r}-{str(b)[:60]}" for r, b, _ in FIELDS])
async def test_fields(route: str, body: Any, param: str | None):
    completer = FakeCompleter()
    async with client_for(completer, strict=True) as http:
        with at_most(1.0):
            r = await http.post(route, json=body)
        error = check(r.status_code, r.json())
        assert r.status_code == (404 if param == "model" and body.get("model") != 5 else 400)
        assert error["param"] == param, error
        assert not completer.seen, "the engine never hears of it"
        good = await http.post(CHAT, json={"model": MODEL, "messages": USER})
        assert good.status_code == 200


@pytest.mark.parametrize(("name", "body"), RAW, ids=[n for n, _ in RAW])
@pytest.mark.parametrize("route", [CHAT, COMPLETE, "/tokenize", "/detokenize"])
async def test_bodies(route: str, name: str, body: bytes):
    async with client_for(strict=True) as http:
        r = await http.post(route, content=body, headers={"content-type": "application/json"})
        check(r.status_code, r.json())
        assert r.status_code == 400
        assert (await http.post(CHAT, json={"messages": USER})).status_code == 200


async def test_unknown_fields_are_refused_with_a_hint():
    async with client_for(strict=True) as http:
        error = (await http.post(CHAT, json=chat(max_token=5))).json()["error"]
    assert error["message"] == "Unrecognized request argument supplied: max_token (did you mean max_tokens?)"
    assert error["code"] == "unknown_parameter"


async def test_bounds_are_told():
    async with client_for() as http:
        for body, words in (
            (chat(n=65), "[1, 64]"),
            (chat(stop=["x"] * 17), "at most 16"),
            (chat(logprobs=True, top_logprobs=21), "[0, 20]"),
            (chat(max_tokens=500), "which leaves"),
            (message(content="x" * 300), "maximum context length is 200 tokens"),
        ):
            r = await http.post(CHAT, json=body)
            assert words in r.json()["error"]["message"], r.text


async def test_context_errors_have_openais_code():
    async with client_for() as http:
        for route, body in (
            (CHAT, message(content="x" * 300)),
            (CHAT, message(content="x" * 300_000)),
            (CHAT, chat(max_tokens=500)),
            (COMPLETE, {"prompt": [1] * 200}),
        ):
            r = await http.post(route, json=body)
            assert r.json()["error"]["code"] == "context_length_exceeded", r.text


async def test_every_unknown_model_gets_the_same_text():
    async with client_for() as http:
        texts = {(await http.post(CHAT, json=chat(model=m))).text for m in ("x", "../../etc/passwd", "", "FAKE:1B")}
        assert len(texts) == 1
        assert (await http.get("/v1/models/../../etc/passwd")).status_code == 404


async def test_routes_and_methods():
    async with client_for() as http:
        for method, path, status, code in (
            ("GET", "/nope", 404, "unknown_url"),
            ("POST", "/v1/chat/completions/", 404, "unknown_url"),
            ("GET", CHAT, 405, "method_not_allowed"),
            ("DELETE", "/v1/models", 405, "method_not_allowed"),
            ("POST", "/health", 405, "method_not_allowed"),
            ("GET", "/docs", 404, "unknown_url"),
            ("GET", "/openapi.json", 404, "unknown_url"),
        ):
            r = await http.request(method, path)
            assert r.status_code == status
            assert check(r.status_code, r.json())["code"] == code


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_only_json_by_its_own_word(kind: str):
    async with client_for() as http:
        r = await http.post(CHAT, content=json.dumps(chat()), headers={"content-type": kind} if kind else {})
        assert r.status_code == 415
        check(r.status_code, r.json())
        r = await http.post(
            CHAT, content=json.dumps(chat()), headers={"content-type": "Application/JSON; charset=utf-8"}
        )
        assert r.status_code == 200
