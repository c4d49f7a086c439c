"""Structured output on the default model: through HTTP, streamed and not, and on the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from quire.config import DEFAULT_MODEL
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
