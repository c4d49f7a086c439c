"""Structural tags: free text until a trigger, then a tag that is whole; and every shape that cannot be had is refused."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from tests.unit.engine.walks import admits, compiled, walk

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANY = {"type": "any_text"}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
OLD = {
    "structures": [
        {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "string"}, "end": "</function>"},
    ],
    "triggers": ["<function="],
}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


DIGITS, LETTERS = {"type": "regex", "pattern": "[0-9]+"}, {"type": "grammar", "grammar": 'root ::= "x"+'}
TWO = {
    "type": "triggered_tags",
    "triggers": ["<a", "<b"],
    "tags": [tag("<a>", DIGITS, "</a>"), tag("<b>", LETTERS, "</b>")],
}
F = '<function=f>{"a": 1}</function>'


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (
            OLD,
            ["", "hello", f"hi {F} and <function=g>\"x\"</function>", "a < b <func"],
            ["<function=", "<function=h>", "<function=f>{}</function>", F[:-1], F.replace("1", '"x"')],
        ),
        (TWO, ["k<b>xx</b>k<a>1</a>", "q", "<c>"], ["<b>1</b>", "<b <a>1</a>", "<b>x</b>l<a>x</a>", "<a"]),
        (TWO | {"at_least_one": True}, ["<a>1</a>", "<a>1</a> and <b>x</b>."], ["", "hi <a>1</a>"]),
        (TWO | {"stop_after_first": True}, ["hi <a>1</a>", "hi"], ["<a>1</a> more", "<a>1</a><a>1</a>"]),
        (TWO | {"at_least_one": True, "stop_after_first": True}, ["<a>1</a>"], ["", "x<a>1</a>", "<a>1</a>."]),
        (TWO | {"excludes": ["no"]}, ["yes <a>1</a>"], ["no", "no <a>1</a>", "<a>1</a> no"]),
        ({"type": "sequence", "elements": [tag("<think>", ANY, "</think>"), JSON]},
         ['<think>hm {</think>{"a":1}'], ['{"a":1}', "<think>hm", '<think>a</think>b</think>{"a":1}']),
        ({"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "END"}]},
         ["abc END", "END"], ["abc", "ENDEND"]),
        ({"type": "sequence", "elements": [ANY, tag("<x>", DIGITS, "</x>"), ANY]},
         ["a <x>1</x>", "<x>1</x> d"], ["abc", "<x>b</x>"]),
        ({"type": "or", "elements": [{"type": "const_string", "value": "no"}, tag("<x>", JSON, "")]},
         ["no", '<x>{"a":3}'], ["x", "no no"]),
        ({"type": "tags_with_separator", "tags": [tag("[", ANY, "]")], "separator": ", "},
         ["[a], [b]", "", "[x]"], ["[a],", "[a] [b]"]),
        ({"type": "tags_with_separator", "tags": [tag("[", ANY, ["]", ")"])], "separator": ", ", "at_least_one": True},
         ["[a), [b]"], ["", "[a},"]),
    ],
)  # fmt: skip
def test_what_is_allowed(asked: dict[str, Any], good: list[str], bad: list[str]) -> None:
    matcher = compiled(Constraint.structural_tag(asked if "structures" in asked else {"format": asked}))
    assert [text for text in good if not admits(matcher, text)] == []
    assert [text for text in bad if admits(matcher, text)] == []


def test_whatever_ends_has_whole_tags() -> None:
    rng = random.Random(3)
    short = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
    matcher = compiled(Constraint.structural_tag(short))
    tags = 0
    for _ in range(60):
        text = walk(matcher, rng, 60, b"<<<<")
        if text is not None:
            inside = re.findall(r"<f>(.*?)</f>", text, re.DOTALL)
            assert text.count("<") == 2 * len(inside)
            tags += len(inside)
            for one in inside:
                jsonschema.validate(json.loads(one), SCHEMA)
    assert tags > 3


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "qwen_xml_parameter"),
        ({"format": JSON | {"style": "qwen_xml"}}, "qwen_xml"),
        ({"format": {"type": "json_schema", "json_schema": {"not": {}}}}, "keyword not cannot be enforced"),
        ({"format": TWO | {"triggers": ["<a", "<a>"]}}, "the beginning of another"),
        ({"format": TWO | {"triggers": ["<a"]}}, "begins with none of the triggers"),
        ({"format": TWO | {"triggers": []}}, "triggers"),
        ({"format": tag("<", ANY, "")}, "needs an end"),
        ({"format": tag("<", ANY, None)}, "end"),
        ({"format": {"type": "sequence", "elements": []}}, "elements"),
        ({"format": {"type": "sequence", "elements": [ANY, ANY]}}, "must come last"),
        ({"format": {"type": "regex"}}, "pattern"),
        ({"format": 5}, "object with a type"),
        ({"structures": [{}], "triggers": ["<"]}, "begin, schema and end"),
        ({}, "format, or structures"),
        ([], "JSON object"),
        ("{", "not JSON"),
        ({"format": {"type": "or", "elements": [tag("<", DIGITS, ">")] * 600}}, "512 tags"),
    ],
)
def test_what_cannot_be_had_is_refused(asked: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=re.escape(said)) as caught:
        compiled(Constraint(kind="structural_tag", text=Constraint.structural_tag(asked).text, param="response_format"))
    assert caught.value.param == "response_format"


def test_deep_tags_are_refused() -> None:
    deep: Any = ANY
    for _ in range(40):
        deep = {"type": "sequence", "elements": [deep]}
    with pytest.raises(BadRequest, match="deep"):
        compiled(Constraint.structural_tag({"format": deep}))
