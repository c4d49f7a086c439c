"""Every field by which a client may say what the answer must be becomes one constraint, or is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from quire.chat.types import Chunk
from quire.engine.types import Constraint
from tests.unit.server.fakes import FakeCompleter, client_for

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"const": 1.0}}}
TEXT = '{"type":"object","properties":{"b":{},"a":{"const":1.0}}}'
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}

ASKED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None, "guided_regex": None, "json_schema": None, "grammar": None}, None),
    ({"response_format": {"type": "json_object"}}, ("json_object", "", "response_format")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ("json_schema", TEXT, "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        ("json_schema", TEXT, "response_format"),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"json": TEXT}}, ("json_schema", TEXT, "structured_outputs.json")),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, ("choice", '["a","é"]', "structured_outputs.choice")),
    ({"structured_outputs": {"grammar": "start: /a/"}}, ("lark", "start: /a/", "structured_outputs.grammar")),
    ({"structured_outputs": {"json_object": True}}, ("json_object", "", "structured_outputs.json_object")),
    ({"guided_json": SCHEMA}, ("json_schema", TEXT, "guided_json")),
    ({"guided_json": TEXT}, ("json_schema", TEXT, "guided_json")),
    ({"guided_regex": "[0-9]"}, ("regex", "[0-9]", "guided_regex")),
    ({"guided_choice": ["yes", "no"]}, ("choice", '["yes","no"]', "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, ("gbnf", 'root ::= "a"', "guided_grammar")),
    ({"json_schema": SCHEMA}, ("json_schema", TEXT, "json_schema")),
    ({"grammar": 'root ::= "a"'}, ("gbnf", 'root ::= "a"', "grammar")),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ("structural_tag", '{"format":{"type":"any_text"}}', "response_format"),
    ),
    (
        {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
        ("structural_tag", '{"structures":[],"triggers":["<"]}', "response_format"),
    ),
    (
        {"structured_outputs": {"structural_tag": '{"format": {}}'}},
        ("structural_tag", '{"format": {}}', "structured_outputs.structural_tag"),
    ),
    (
        {"structured_outputs": {"json": TEXT, "whitespace_pattern": r"[\n ]?", "disable_additional_properties": True}},
        ("json_schema", TEXT, "structured_outputs.json", r"[\n ]?"),
    ),
    (
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
        ("json_object", "", "structured_outputs.json_object", ""),
    ),
    (
        {"guided_json": TEXT, "guided_whitespace_pattern": r"\s{0,2}"},
        ("json_schema", TEXT, "guided_json", r"[ \t\n\r]{0,2}"),
    ),
]


@pytest.mark.parametrize(("fields", "expected"), ASKED)
async def test_every_spelling(fields: dict[str, Any], expected: tuple[str, ...] | None) -> None:
    for route, body in ((CHAT, HI), (COMPLETE, {"prompt": "hi"})):
        fake = FakeCompleter()
        async with client_for(fake) as http:
            r = await http.post(route, json=body | fields)
        assert r.status_code == 200, r.text
        asked = (
            Constraint(**dict(zip(("kind", "text", "param", "blanks"), expected, strict=False))) if expected else None
        )
        assert fake.seen[0].constraint == asked


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_400_that_names_the_field(stream: bool) -> None:
    class Refuses(FakeCompleter):
        async def _chunks(self, g: Any):
            yield Chunk(finish="error", error='guided_json: "/$defs/x" cannot be enforced', param="guided_json")

    async with client_for(Refuses()) as http:
        r = await http.post(CHAT, json=HI | {"guided_json": {}, "stream": stream})
    assert r.status_code == 400, r.text
    error = r.json()["error"]
    assert (error["param"], error["message"]) == ("guided_json", 'guided_json: "/$defs/x" cannot be enforced')
