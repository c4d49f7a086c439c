"""Structured output on the default model: through HTTP, streamed and not, and on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from quire.config import DEFAULT_MODEL
from quire.engine.constraints.schemas import REFUSED
from tests.e2e.conftest import Server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 100000000},
        "seasons": {"type": "array", "items": {"enum": ["spring", "summer", "autumn", "winter"]}, "maxItems": 2},
    },
    "required": ["city", "inhabitants", "seasons"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
ASK: Any = [{"role": "user", "content": "Tell me about Paris, as JSON."}]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_satisfies_its_schema(client: openai.OpenAI, temperature: float):
    r = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, response_format=FORMAT, temperature=temperature, max_tokens=300, seed=1, n=3
    )
    assert [c.finish_reason for c in r.choices] == ["stop"] * 3
    for choice in r.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


def test_a_stream_satisfies_it_too_and_says_the_same(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": ASK, "response_format": FORMAT, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=300)
    stream = client.chat.completions.create(**asked, max_tokens=300, stream=True)
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content
    jsonschema.validate(json.loads(text), SCHEMA)


def test_the_other_kinds(server: Server):
    def ask(**fields: Any) -> dict[str, Any]:
        body = {"prompt": "The answer is", "max_tokens": 60, "temperature": 1.0, "seed": 3, "receipts": True} | fields
        r = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert r.status_code == 200, r.text
        return r.json()

    got = ask(guided_regex=r"[A-Z][a-z]{2,5} [0-9]{4}")
    assert re.fullmatch(r"[A-Z][a-z]{2,5} [0-9]{4}", got["choices"][0]["text"])
    assert got["quire"]["receipts"][0]["enforced"] == "regex"
    assert ask(guided_choice=["left", "right"])["choices"][0]["text"] in ("left", "right")
    assert re.fullmatch(r"\[1+\]", ask(grammar='root ::= "[" "1"+ "]"', stop=["]]"])["choices"][0]["text"] or "[1]")
    cut = ask(guided_regex="[a-z]{100}", max_tokens=4)["choices"][0]
    assert cut["finish_reason"] == "length" and re.fullmatch("[a-z]+", cut["text"])


def test_what_cannot_be_enforced_is_a_400(client: openai.OpenAI, server: Server):
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="keyword not cannot be enforced") as caught:
            client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, response_format=bad, stream=stream)
        assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        client.chat.completions.create(
            model=DEFAULT_MODEL, messages=ASK, response_format={"type": "json_object"}, extra_body={"min_tokens": 5}
        )
    assert server.ready()


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_cannot_be_enforced_is_a_400_that_names_it(server: Server, keyword: str):
    says: Any = {"uniqueItems": True, "$dynamicRef": "#x", "$recursiveRef": "#", "$recursiveAnchor": True}
    says |= {"minContains": 1, "maxContains": 1, "$dynamicAnchor": "x", "unevaluatedItems": False}
    schema = {"type": "object", "properties": {"a": {keyword: says.get(keyword, {"a": {"minLength": 2}})}}}
    schema |= {"unevaluatedProperties": False} if keyword == "unevaluatedProperties" else {}
    body = {"messages": ASK, "max_tokens": 4, "response_format": {"type": "json_object", "schema": schema}}
    r = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)
    assert r.status_code == 400, r.text
    assert f"the keyword {keyword} cannot be enforced" in r.json()["error"]["message"]
    assert r.json()["error"]["param"] == "response_format"


# ---- hostile ones, while another client's stream flows


class Flow:
    """A stream that is read all the while, and the longest pause between two of its tokens."""

    def __init__(self, server: Server):
        self._server, self._stop, self._lock = server, threading.Event(), threading.Lock()
        self._last, self._longest, self.tokens = time.monotonic(), 0.0, 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        while not self._stop.is_set():
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=60) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data: {"):
                        self._token()
                    if self._stop.is_set():
                        return

    def _token(self) -> None:
        with self._lock:
            now = time.monotonic()
            self._longest, self._last = max(self._longest, now - self._last), now
            self.tokens += 1

    def pause(self) -> float:
        """The longest one since this was asked last, the one that goes on included."""
        with self._lock:
            longest = max(self._longest, time.monotonic() - self._last)
            self._longest = 0.0
            return longest

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


@pytest.fixture(scope="module")
def flow(server: Server) -> Iterator[Flow]:
    made = Flow(server)
    while made.tokens < 3:
        time.sleep(0.02)
    yield made
    made.stop()


def deep(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


REFUSAL, ANY = (400,), (200, 400)
HOSTILE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "nested": ({"guided_json": deep(400)}, REFUSAL),
    "nested very deeply": ({"guided_json": deep(50_000)}, REFUSAL),
    "a regex of subsets": ({"guided_regex": "(.*a){30}" + "." * 30}, ANY),
    "a regex of plusses": ({"guided_regex": "((a+)+)+$"}, ANY),
    "a regex that counts": ({"guided_regex": "(x{1,1000}){1,1000}"}, ANY),
    "a regex that repeats": ({"guided_regex": "(?:[ab]{1,30}c){1000000}"}, ANY),
    "ten thousand values": ({"guided_json": {"enum": [f"value number {i}" for i in range(10_000)]}}, ANY),
    "ten thousand choices": ({"guided_choice": [f"choice {i}" for i in range(10_000)]}, REFUSAL),
    "ten thousand names": ({"guided_json": {"properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}}, REFUSAL),
    "a schema that is itself": ({"guided_json": {"$ref": "#"}}, REFUSAL),
    "schemas that are each other": (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        REFUSAL,
    ),
    "an endless list of lists": (
        {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/a"}}}}},
        ANY,
    ),
    "all of itself": (
        {"guided_json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}},
        REFUSAL,
    ),
    "a product": (
        {"guided_json": {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]}},
        REFUSAL,
    ),
    "a million items": ({"guided_json": {"type": "array", "minItems": 10**6, "maxItems": 10**9}}, ANY),
    "a billion letters": ({"guided_json": {"type": "string", "minLength": 10**9}}, ANY),
    "a grammar that counts": ({"grammar": 'root ::= ("ab"{1,1000}){1,1000000}'}, ANY),
    "a grammar of parentheses": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, REFUSAL),
    "a grammar that is itself": ({"structured_outputs": {"grammar": "start: start start | start"}}, REFUSAL),
    "ten thousand rules": (
        {"grammar": "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(2000)) + '\nr2000 ::= "a"'},
        ANY,
    ),
    "a chain of lists": (
        {"guided_json": {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(3000)} | {"d3000": {}}}},
        ANY,
    ),
    "a ring of rules": (
        {"grammar": "root ::= r0\n" + "\n".join(f'r{i} ::= r{(i + 1) % 1500} "x" | r{i * 7 % 1500} | "y"' for i in range(1500))},
        REFUSAL,
    ),
    "a thousand tags": (
        {"structured_outputs": {"structural_tag": json.dumps({"structures": [{"begin": f"<{i}>", "schema": {}, "end": ">"} for i in range(1000)], "triggers": ["<"]})}},
        REFUSAL,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_answered_while_a_stream_flows(server: Server, flow: Flow, name: str):
    """Soon, with a 4xx or within bounds; nobody else waits for it."""
    fields, statuses = HOSTILE[name]
    flow.pause()
    began = time.monotonic()
    r = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 6, **fields}, timeout=30)
    took = time.monotonic() - began
    assert r.status_code in statuses, (r.status_code, r.text[:300])
    if r.status_code == 400:
        assert r.json()["error"]["param"] and len(r.json()["error"]["message"]) < 700
    assert took < 25, took  # a tenth of a second, unless the machine is busy with other things
    assert flow.pause() < 8.0
    assert server.ready()


def test_on_the_command_line(tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    command = [sys.executable, "-m", "quire.cli.main", "run", DEFAULT_MODEL, "Paris, please"]
    done = subprocess.run([*command, "--json-schema", str(file)], capture_output=True, text=True, timeout=120, stdin=-3)
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), SCHEMA)
    file.write_text('{"not": {}}')
    done = subprocess.run([*command, "--json-schema", str(file)], capture_output=True, text=True, timeout=120, stdin=-3)
    assert done.returncode != 0 and "keyword not" in done.stderr and "--json-schema" in done.stderr
