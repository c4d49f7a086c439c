"""Closing a schema: objects that list their properties take no others, nested ones too, and nothing delicate is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from quire.engine.constraints.closed import closed

TEXT = {"type": "string"}


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def test_objects_are_closed_wherever_they_stand():
    schema = {
        **object_of(a=TEXT, b=object_of(c=TEXT), d={"type": "array", "items": object_of(e=TEXT)}),
        "required": ["a"],
        "$defs": {"x": object_of(f={"anyOf": [object_of(g=TEXT), {"type": "null"}]})},
    }
    before = copy.deepcopy(schema)
    made = closed(schema)
    assert schema == before  # the request keeps its own
    inner = made["properties"]
    optional = made["$defs"]["x"]["properties"]["f"]["anyOf"]
    for part in (made, inner["b"], inner["d"]["items"], made["$defs"]["x"], optional[0]):
        assert part["additionalProperties"] is False
    assert "additionalProperties" not in optional[1] and "additionalProperties" not in inner["d"]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        object_of(),
        {**object_of(a=TEXT), "additionalProperties": True},
        {**object_of(a=TEXT), "additionalProperties": TEXT},
        {**object_of(a=TEXT), "patternProperties": {"^x": TEXT}},
        {**object_of(a=TEXT), "required": ["b"]},
        {"allOf": [object_of(a=TEXT), object_of(b=TEXT)]},
        {"oneOf": [object_of(a=TEXT), object_of(b=TEXT)]},
        {**object_of(a=TEXT), "anyOf": [object_of(b=TEXT), object_of(c=TEXT)]},
        {**object_of(a=TEXT), "anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": object_of(b=TEXT)}},
        {**object_of(a=TEXT), "$ref": "#/$defs/x", "$defs": {"x": object_of(b=TEXT)}},
        {**object_of(a=TEXT), "minProperties": 2},
        object_of(a={"not": object_of(b=TEXT)}),
    ],
)
def test_what_says_otherwise_or_is_delicate_stays(schema: dict[str, Any]):
    assert closed(schema) == schema
