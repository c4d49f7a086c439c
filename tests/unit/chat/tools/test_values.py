"""Bare texts and what they mean under a schema."""

from __future__ import annotations

import pytest

from quire.chat.tools.types import Tool, Tools
from quire.chat.tools.values import Schemas, value_of

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
        "color": {"enum": ["red", "5"]},
        "far": {"$ref": "#/$defs/list"},
        "loop": {"$ref": "#/properties/loop"},
        "free": {},
    },
    "$defs": {"list": {"type": "array", "items": {"type": "integer"}}},
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", '"5"', 5),
        ("count", "five", "five"),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "True", True),
        ("either", "7", 7),
        ("either", "7.5", "7.5"),
        ("color", "5", "5"),
        ("far", "[1, 2]", [1, 2]),
        ("far", "(1, 2)", [1, 2]),
        ("loop", "5", 5),
        ("free", "5", 5),
        ("free", "words", "words"),
        ("free", "{'a': True}", {"a": True}),
        ("unknown", "[1]", [1]),
    ],
)
def test_values(key: str, text: str, value: object) -> None:
    got = Schemas(Tools([Tool("f", "", SCHEMA)])).value("f", key, text)
    assert got == value and type(got) is type(value)


def test_what_is_too_deep_or_no_number_is_a_string() -> None:
    assert value_of("[" * 5000, None) == "[" * 5000
    assert value_of("NaN", None) == "NaN"
