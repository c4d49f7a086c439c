"""Every kind of constraint through every dialect that has it, streamed and not, from noise: it holds, or the answer says it was cut.

The template reasons, so on the chat routes every constraint is one that begins after the reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from quire.chat.completer import Completer
from quire.config import ServerConfig
from tests.unit.server.fakes import MODEL, client_for, events
from tests.unit.server.noise_kit import TOKENIZER, noisy
from tests.unit.server.openai import test_batches as batches

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "seasons": {"type": "array", "items": {"enum": ["spring", "autumn"]}, "maxItems": 2},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "n"],
}
TEXT = json.dumps(SCHEMA)
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}
ONE_TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}
PATTERN, LARK, EBNF = "[A-C][0-9]{2}", 'start: "(" start ")" | /[0-9]{1,3}/', 'root ::= "(" root ")" | [0-9]{1,3}'
CHOICES = ["left", "right"]
SEEDS = 10


def is_schema(text: str) -> None:
    jsonschema.validate(json.loads(text), {**SCHEMA, "additionalProperties": False})


def is_object(text: str) -> None:
    assert isinstance(json.loads(text), dict)


def is_pattern(text: str) -> None:
    assert re.fullmatch(PATTERN, text)


def is_choice(text: str) -> None:
    assert text in CHOICES


def is_nested(text: str) -> None:
    assert re.fullmatch(r"(\(*)[0-9]{1,3}(\)*)", text) and text.count("(") == text.count(")")


def is_tagged(text: str) -> None:
    inside = re.findall(r"<a>(.*?)</a>", text, re.DOTALL)
    assert text.count("<") == 2 * len(inside), text
    for one in inside:
        is_schema(one)


def is_one_tag(text: str) -> None:
    assert text.startswith("<a>") and text.endswith("</a>")
    is_tagged(text)


@dataclass
class Said:
    text: str
    end: str
    reasoning: str = ""


# ---- the dialects: a route, the body, and how an answer is read


def chat(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "seed": seed, "max_tokens": limit, **fields}


def chat_said(body: Any) -> Said:
    message = body["choices"][0]["message"]
    return Said(message["content"] or "", body["choices"][0]["finish_reason"], message.get("reasoning_content") or "")


def chat_streamed(text: str) -> Said:
    said = Said("", "")
    for event in events(text):
        if event != "[DONE]" and event["choices"]:
            delta = event["choices"][0]["delta"]
            said.text += delta.get("content") or ""
            said.reasoning += delta.get("reasoning_content") or ""
            said.end = event["choices"][0]["finish_reason"] or said.end
    return said


def complete(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    return {"prompt": "hi", "seed": seed, "max_tokens": limit, **fields}


def complete_said(body: Any) -> Said:
    return Said(body["choices"][0]["text"], body["choices"][0]["finish_reason"])


def complete_streamed(text: str) -> Said:
    parts = [e["choices"][0] for e in events(text) if e != "[DONE]" and e["choices"]]
    return Said("".join(p["text"] for p in parts), next(p["finish_reason"] for p in parts if p["finish_reason"]))


def respond(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    return {"input": "hi", "seed": seed, "max_output_tokens": limit, "store": False, **fields}


def respond_said(body: Any) -> Said:
    texts = [p["text"] for item in body["output"] if item["type"] == "message" for p in item["content"]]
    cut = body["incomplete_details"]
    return Said("".join(texts), body["status"] + (f": {cut['reason']}" if cut else ""))


def respond_streamed(text: str) -> Said:
    seen = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = "".join(e["delta"] for e in seen if e["type"] == "response.output_text.delta")
    last = respond_said(seen[-1]["response"])
    assert seen[-1]["type"] == "response." + last.end.split(":")[0] and deltas == last.text
    return last


def message(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    said = [{"role": "user", "content": "hi" * (seed + 1)}]  # this API has no seed: another prompt is another answer
    return {"model": MODEL, "messages": said, "max_tokens": limit, "temperature": 0, **fields}


def message_said(body: Any) -> Said:
    return Said("".join(b["text"] for b in body["content"] if b["type"] == "text"), body["stop_reason"])


def message_streamed(text: str) -> Said:
    seen = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [e["delta"] for e in seen if e["type"] == "content_block_delta"]
    end = next(e["delta"]["stop_reason"] for e in seen if e["type"] == "message_delta")
    return Said("".join(d["text"] for d in deltas if d["type"] == "text_delta"), end)


def ollama(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    options = {"seed": seed, "num_predict": limit, "temperature": 1.0}
    said = [{"role": "user", "content": "hi"}]
    return {"model": MODEL, "messages": said, "options": options, "stream": False, **fields}


def ollama_said(body: Any) -> Said:
    return Said(body["message"]["content"], body["done_reason"])


def ollama_streamed(text: str) -> Said:
    seen = [json.loads(line) for line in text.splitlines()]
    return Said("".join(e["message"]["content"] for e in seen), seen[-1]["done_reason"])


def ollama_generate(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    made = ollama(fields, seed, limit)
    return {name: value for name, value in made.items() if name != "messages"} | {"prompt": "hi"}


def ollama_generate_said(body: Any) -> Said:
    return Said(body["response"], body["done_reason"])


def ollama_generate_streamed(text: str) -> Said:
    seen = [json.loads(line) for line in text.splitlines()]
    return Said("".join(e["response"] for e in seen), seen[-1]["done_reason"])


def llama(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    return {"prompt": "hi", "seed": seed, "n_predict": limit, "temperature": 1.0, **fields}


def llama_said(body: Any) -> Said:
    return Said(body["content"], body["stop_type"])


def llama_streamed(text: str) -> Said:
    seen = [e for e in events(text) if e != "[DONE]"]
    return Said("".join(e["content"] for e in seen), seen[-1]["stop_type"])


def tgi(fields: dict[str, Any], seed: int, limit: int) -> dict[str, Any]:
    more = {"seed": seed, "max_new_tokens": limit, "do_sample": True, "details": True}
    return {"inputs": "hi", "parameters": {**more, **fields}}


def tgi_said(body: Any) -> Said:
    return Said(body["generated_text"], body["details"]["finish_reason"])


def tgi_streamed(text: str) -> Said:
    seen = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    return Said(seen[-1]["generated_text"], seen[-1]["details"]["finish_reason"])


@dataclass(frozen=True)
class Dialect:
    path: str
    body: Callable[[dict[str, Any], int, int], dict[str, Any]]
    said: Callable[[Any], Said]
    streamed: Callable[[str], Said]
    stop: str
    cut: str
    stream_path: str = ""


DIALECTS = {
    "chat": Dialect("/v1/chat/completions", chat, chat_said, chat_streamed, "stop", "length"),
    "completions": Dialect("/v1/completions", complete, complete_said, complete_streamed, "stop", "length"),
    "responses": Dialect(
        "/v1/responses", respond, respond_said, respond_streamed, "completed", "incomplete: max_output_tokens"
    ),
    "anthropic": Dialect("/v1/messages", message, message_said, message_streamed, "end_turn", "max_tokens"),
    "ollama chat": Dialect("/api/chat", ollama, ollama_said, ollama_streamed, "stop", "length"),
    "ollama generate": Dialect(
        "/api/generate", ollama_generate, ollama_generate_said, ollama_generate_streamed, "stop", "length"
    ),
    "llama.cpp": Dialect("/completion", llama, llama_said, llama_streamed, "eos", "limit"),
    "tgi": Dialect("/generate", tgi, tgi_said, tgi_streamed, "eos_token", "length", "/generate_stream"),
}
VLLM: list[tuple[dict[str, Any], Any]] = [
    ({"structured_outputs": {"json": SCHEMA}}, is_schema),
    ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}}, is_schema),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"structured_outputs": {"regex": PATTERN}}, is_pattern),
    ({"structured_outputs": {"choice": CHOICES}}, is_choice),
    ({"structured_outputs": {"grammar": LARK}}, is_nested),
    ({"structured_outputs": {"grammar": EBNF}}, is_nested),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, is_tagged),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, is_schema),
    ({"guided_regex": PATTERN}, is_pattern),
    ({"guided_choice": CHOICES}, is_choice),
    ({"guided_grammar": EBNF}, is_nested),
    ({"guided_grammar": LARK}, is_nested),
]
OPENAI: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, is_schema),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": {"type": "structural_tag", **TAGS}}, is_tagged),
    ({"response_format": {"type": "structural_tag", "format": ONE_TAG}}, is_one_tag),
    ({"json_schema": SCHEMA}, is_schema),
    ({"grammar": EBNF}, is_nested),
]
ASKED: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "chat": OPENAI + VLLM,
    "completions": OPENAI + VLLM,
    "responses": [
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, is_schema),
        ({"text": {"format": {"type": "json_object"}}}, is_object),
        *VLLM[3:7],
    ],
    "anthropic": [
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, is_schema),
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, is_schema),
    ],
    "ollama chat": [({"format": SCHEMA}, is_schema), ({"format": "json"}, is_object)],
    "ollama generate": [({"format": SCHEMA}, is_schema), ({"format": "json"}, is_object)],
    "llama.cpp": [({"json_schema": SCHEMA}, is_schema), ({"grammar": EBNF}, is_nested)],
    "tgi": [
        ({"grammar": {"type": "json", "value": SCHEMA}}, is_schema),
        ({"grammar": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, is_schema),
        ({"grammar": {"type": "regex", "value": PATTERN}}, is_pattern),
    ],
}


@pytest.fixture(scope="module")
def completer() -> Iterator[Completer]:
    with noisy() as made:
        yield made


async def both(http: httpx.AsyncClient, to: Dialect, fields: dict[str, Any], seed: int, limit: int) -> Said:
    """The answer, after seeing that its stream says the same."""
    body = to.body(fields, seed, limit)
    whole = await http.post(to.path, json=body)
    assert whole.status_code == 200, whole.text
    said = to.said(whole.json())
    more = {} if to.stream_path else {"stream": True}
    stream = await http.post(to.stream_path or to.path, json=body | more)
    assert stream.status_code == 200, stream.text
    parts = to.streamed(stream.text)
    assert (parts.text, parts.end) == (said.text, said.end)
    return said


@pytest.mark.parametrize("name", DIALECTS)
async def test_every_kind_holds(completer: Completer, name: str) -> None:
    to = DIALECTS[name]
    async with client_for(completer) as http:
        for fields, check in ASKED[name]:
            for seed in range(SEEDS):
                said = await both(http, to, fields, seed, 250)
                if said.end == to.stop:
                    check(said.text)
                    break
                assert said.end == to.cut, said
            else:
                raise AssertionError(f"no answer to {fields} came to an end")


@pytest.mark.parametrize("name", DIALECTS)
async def test_an_answer_that_was_cut_says_so(completer: Completer, name: str) -> None:
    """In the dialect's own word, and what there is of it is a beginning."""
    async with client_for(completer) as http:
        said = await both(http, DIALECTS[name], ASKED[name][0][0], 0, 6)
    assert said.end == DIALECTS[name].cut
    with pytest.raises(ValueError):
        json.loads(said.text)


async def test_reasoning_is_free_and_the_answer_is_not(completer: Completer) -> None:
    """Streamed and not; the schema holds after the marks, and the marks are in neither."""
    to = DIALECTS["chat"]
    reasoned = 0
    async with client_for(completer) as http:
        for seed in range(SEEDS):
            said = await both(http, to, OPENAI[0][0], seed, 400)
            reasoned += bool(said.reasoning)
            if said.end == "stop":
                is_schema(said.text)
    assert reasoned > SEEDS // 2


async def test_beside_tools_an_answer_is_a_call_or_what_was_asked_for(completer: Completer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    unlikely = {str(TOKENIZER.token_id("<tool_call>")): -3.5}
    kinds = set()
    async with client_for(completer) as http:
        for seed in range(SEEDS):
            asked = chat(OPENAI[0][0] | {"tools": [tool], "logit_bias": unlikely}, seed, 400)
            r = await http.post("/v1/chat/completions", json=asked)
            (choice,) = r.json()["choices"]
            kinds.add(choice["finish_reason"])
            if choice["finish_reason"] == "stop":
                is_schema(choice["message"]["content"])
            if choice["finish_reason"] == "tool_calls":
                for call in choice["message"]["tool_calls"]:
                    is_schema(call["function"]["arguments"])
    assert {"stop", "tool_calls"} <= kinds


async def test_several_choices_and_a_stop_string(completer: Completer) -> None:
    async with client_for(completer) as http:
        r = await http.post("/v1/completions", json=complete({"guided_json": SCHEMA, "n": 6}, 3, 250))
        choices = r.json()["choices"]
        assert len(choices) == 6 and len({c["text"] for c in choices}) > 1
        for choice in choices:
            if choice["finish_reason"] == "stop":
                is_schema(choice["text"])
        r = await http.post("/v1/completions", json=complete({"guided_json": SCHEMA, "stop": ['"n"']}, 3, 250))
        (cut,) = r.json()["choices"]
        assert cut["stop_reason"] == '"n"' and cut["text"].startswith("{") and '"n"' not in cut["text"]


async def test_lines_of_a_batch(completer: Completer, tmp_path: Path) -> None:
    lines = [batches.line(i, seed=i, max_tokens=400, **OPENAI[0][0]) for i in range(6)]
    bad = {"response_format": {"type": "json_object", "schema": {"not": {}}}}
    async with batches.server(ServerConfig(state_dir=tmp_path, batch_lines=3), completer) as http:
        done = await batches.until(http, await batches.begin(http, "\n".join([*lines, batches.line(9, **bad)])))
        output, faults = [await batches.read(http, done[name]) for name in ("output_file_id", "error_file_id")]
    ended = [c for one in output for c in one["response"]["body"]["choices"] if c["finish_reason"] == "stop"]
    assert len(output) == 6 and ended
    for choice in ended:
        is_schema(choice["message"]["content"])
    (fault,) = faults
    assert fault["custom_id"] == "id9" and "keyword not" in json.dumps(fault)


RING = "root ::= r0\n" + "\n".join(f'r{i} ::= r{(i + 1) % 1500} "x" | r{i * 7 % 1500} | "y"' for i in range(1500))


@pytest.mark.parametrize("name", ["chat", "completions", "llama.cpp"])
async def test_a_constraint_that_grows_too_complex_is_the_clients_fault(completer: Completer, name: str) -> None:
    """Seen only once tokens were written: a 400 that names the field, and in a stream an error in its place."""
    to = DIALECTS[name]
    async with client_for(completer) as http:
        body = to.body({"grammar": RING, "temperature": 0}, 0, 400)
        r = await http.post(to.path, json=body)
        assert r.status_code == 400 and "grammar could not be enforced after" in r.text, r.text
        stream = await http.post(to.path, json=body | {"stream": True})
        assert "grammar could not be enforced after" in stream.text and "engine_error" not in stream.text
