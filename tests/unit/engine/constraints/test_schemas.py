"""Schemas as constraints, judged by another's validator: whatever ends validates, and what cannot be enforced is refused.

The judge is the `jsonschema` package, with formats asserted and numbers exact. Texts are random walks over what a constraint
allows, over every schema of the JSON Schema Test Suite that is taken, and over schemas made up at random.
"""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from quire.engine.constraints.schemas import ENFORCED, FORMATS, REFUSED
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from tests.unit.engine.walks import admits, compiled, walk

DOCS = Path(__file__).resolve().parents[4] / "docs" / "structured-output.md"
JUDGE = jsonschema.Draft202012Validator


def valid(text: str, schema: Any) -> None:
    """Exact numbers on both sides: a validator's own rounding is not the answer's fault."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    JUDGE(exact, format_checker=JUDGE.FORMAT_CHECKER).validate(json.loads(text, parse_float=Decimal))
    json.loads(text)


def test_whatever_ends_validates_over_the_test_suite(shared_data: Path) -> None:
    folder = shared_data / "json-schema-test-suite" / "tests" / "draft2020-12"
    taken = ended = texts = unread = 0
    for file in sorted(folder.rglob("*.json")):
        for group in json.loads(file.read_text()):
            try:
                matcher = compiled(Constraint.json_schema(json.dumps(group["schema"])))
            except BadRequest as error:
                assert str(error)
                continue
            taken += 1
            rng = random.Random(group["description"])
            whole = [text for text in (walk(matcher, rng) for _ in range(3)) if text is not None]
            ended += bool(whole)
            texts += len(whole)
            for text in whole:
                try:
                    valid(text, group["schema"])
                except re.error:  # a pattern that the judge cannot read
                    unread += 1
                except (jsonschema.ValidationError, ValueError) as error:
                    raise AssertionError((file.name, group["description"], text)) from error
    assert taken > 200 and ended > 0.9 * taken and texts > 2 * taken and unread < 20
    print(f"{taken} schemas, {texts} texts, {unread} of them unjudged")


def made_up(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema such as clients send, and some that they do not."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format", "pattern"]
    kinds += ["object", "array", "anyOf", "tuple", "map"] * (depth < 3)
    kind = rng.choice(kinds)
    low, high = sorted((rng.randint(-2000, 2000), rng.randint(-2000, 2000)))
    inner = lambda: made_up(rng, depth + 1)  # noqa: E731
    if kind == "object":
        names = rng.sample(["a", "b", "name", "a b", "é", 'q"', "x/y", "日"], rng.randint(1, 4))
        some: dict[str, Any] = {"type": "object", "properties": {n: inner() for n in names}}
        some["required"] = [n for n in names if rng.random() < 0.6]
        if rng.random() < 0.3:
            some["additionalProperties"] = rng.choice([False, True, {"type": "integer"}])
        return some
    made: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "maxLength": rng.randint(2, 9), "minLength": rng.randint(0, 2)},
        "integer": {"type": "integer"} | rng.choice([{}, {"minimum": low, "maximum": high}, {"exclusiveMinimum": low}]),
        "number": {"type": "number"} | rng.choice([{}, {"minimum": low / 8, "exclusiveMaximum": high / 8 + 1}]),
        "boolean": {"type": "boolean"},
        "null": {"type": ["null", "integer"]},
        "enum": {"enum": rng.sample(["x", "", 1, 2.5, None, True, ["a", 1], {"k": "v"}, "\n", "\\"], 3)},
        "const": {"const": rng.choice(["é", {"a": [1, {}]}, [], 0, -1.5, False])},
        "format": {"type": "string", "format": rng.choice(FORMATS)},
        "pattern": {"type": "string", "pattern": rng.choice(["^a+b?$", r"^\d{2}-\w$", "x", "^(foo|ba[rz])$"])},
        "array": {"type": "array", "items": inner() if depth < 3 else {}, "maxItems": 3, "minItems": rng.randint(0, 2)},
        "anyOf": {"anyOf": [inner(), inner()] if depth < 3 else [{}]},
        "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
        "map": {"type": "object", "additionalProperties": inner() if depth < 3 else {}, "maxProperties": 2},
    }
    return made[kind] | ({"items": rng.choice([False, {"type": "null"}])} if kind == "tuple" else {})


def test_whatever_ends_validates_over_schemas_made_up() -> None:
    rng = random.Random(6)
    ended = 0
    for _ in range(120):
        schema = made_up(rng)
        matcher = compiled(Constraint.json_schema(json.dumps(schema)))
        for text in (walk(matcher, rng) for _ in range(3)):
            if text is not None:
                ended += 1
                valid(text, schema)
    assert ended > 200


# ---- what is published


def published(heading: str) -> set[str]:
    """The names in a list of docs/structured-output.md."""
    text = DOCS.read_text()
    found = re.search(rf"^{heading}:(.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert found, heading
    return set(re.findall(r"`([^`]+)`", found[1]))


SAYS: dict[str, Any] = {
    "not": {},
    "if": {},
    "then": {},
    "else": {},
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "uniqueItems": True,
    "propertyNames": {"maxLength": 3},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "dependencies": {"a": ["b"]},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "$dynamicRef": "#x",
    "$dynamicAnchor": "x",
    "$recursiveRef": "#",
    "$recursiveAnchor": True,
}


@pytest.mark.parametrize("keyword", REFUSED)
@pytest.mark.parametrize("place", ["root", "property", "definition", "branch"])
def test_every_refused_keyword_is_named(keyword: str, place: str) -> None:
    part = {keyword: SAYS[keyword]}
    schema = {
        "root": {"type": ["object", "array"], **part},
        "property": {"properties": {"p": part}},
        "definition": {"$ref": "#/$defs/d", "$defs": {"d": part}},
        "branch": {"anyOf": [{"type": "null"}, part]},
    }[place]
    with pytest.raises(BadRequest, match=rf"keywords? {re.escape(keyword)} cannot be enforced"):
        compiled(Constraint.json_schema(json.dumps(schema)))


def test_the_published_lists_are_the_ones_in_force() -> None:
    assert published("Refused by name") == set(REFUSED)
    assert published("Enforced") == set(ENFORCED)
    assert published("Formats") == set(FORMATS)


def test_every_keyword_of_the_standard_is_in_a_list() -> None:
    """Of draft 2020-12 and of draft 7, as their own metaschemas have them."""
    names: set[str] = set()
    for uri in REGISTRY:
        if "2020-12" in uri or "draft-07" in uri:
            names |= set(REGISTRY.contents(uri).get("properties", {}))
    assert len(names) > 50
    assert names - set(REFUSED) - set(ENFORCED) == published("Annotations, which constrain nothing")


@pytest.mark.parametrize("keyword", REFUSED)
def test_what_says_nothing_is_not_refused(keyword: str) -> None:
    empty: dict[str, Any] = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
    empty |= {"propertyNames": {}, "dependencies": {}, "dependentRequired": {}, "dependentSchemas": {}}
    if keyword in empty:
        matcher = compiled(Constraint.json_schema(json.dumps({"type": "array", keyword: empty[keyword]})))
        assert admits(matcher, "[1,1]") and not admits(matcher, "1")


EXAMPLES: dict[str, tuple[Any, str, str]] = {
    "type": ({"type": ["string", "null"]}, "null", "1"),
    "enum": ({"enum": ["a", 1]}, "1", "2"),
    "const": ({"const": {"a": 1}}, '{"a":1}', '{"a":2}'),
    "properties": ({"properties": {"a": {"type": "integer"}}}, '{"a":1}', '{"a":"x"}'),
    "required": ({"type": "object", "required": ["a"]}, '{"a":1}', '{"b":1}'),
    "additionalProperties": ({"additionalProperties": {"type": "null"}}, '{"a":null}', '{"a":1}'),
    "patternProperties": ({"patternProperties": {"^a": {"type": "null"}}}, '{"ab":null}', '{"ab":1}'),
    "minProperties": ({"type": "object", "minProperties": 1}, '{"a":1}', "{}"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, '{"a":1}', '{"a":1,"b":2}'),
    "items": ({"items": {"type": "integer"}}, "[1,2]", '["a"]'),
    "prefixItems": ({"prefixItems": [{"type": "integer"}]}, "[1]", '["a"]'),
    "additionalItems": ({"items": [{"type": "integer"}], "additionalItems": False}, "[1]", "[1,2]"),
    "minItems": ({"type": "array", "minItems": 1}, "[1]", "[]"),
    "maxItems": ({"type": "array", "maxItems": 1}, "[1]", "[1,2]"),
    "minLength": ({"type": "string", "minLength": 2}, '"é😀"', '"a"'),
    "maxLength": ({"type": "string", "maxLength": 1}, '"😀"', '"ab"'),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"aa"', '"ab"'),
    "format": ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
    "minimum": ({"type": "integer", "minimum": 3}, "3", "2"),
    "maximum": ({"type": "number", "maximum": 3}, "3", "3.1"),
    "exclusiveMinimum": ({"type": "integer", "exclusiveMinimum": 3}, "4", "3"),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 3}, "2.9", "3"),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, "1.75", "1.7"),
    "anyOf": ({"anyOf": [{"type": "null"}, {"const": 1}]}, "1", "2"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "3", "2"),
    "oneOf": ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, "1", '"a"'),
    "$ref": ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "1", "2"),
    "$defs": ({"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "1", "2"),
    "definitions": ({"$ref": "#/definitions/a", "definitions": {"a": {"const": 1}}}, "1", "2"),
    "$anchor": ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "const": 1}}}, "1", "2"),
    "$id": ({"$id": "http://x/y", "$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}, "1", "2"),
    "$schema": ({"$schema": "http://json-schema.org/draft-07/schema#", "const": 1}, "1", "2"),
}


@pytest.mark.parametrize("keyword", ENFORCED)
def test_every_enforced_keyword_is(keyword: str) -> None:
    schema, good, bad = EXAMPLES[keyword]
    matcher = compiled(Constraint.json_schema(json.dumps(schema)))
    assert admits(matcher, good) and not admits(matcher, bad)


# ---- what is narrowed


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "date",
            "2000-02-29 2024-02-29 0004-02-29 1999-12-31",
            "1900-02-29 2023-02-29 0000-01-01 2024-04-31 2024-13-01",
        ),
        ("time", "23:59:59Z 00:00:00.5+23:59", "23:59:60Z 24:00:00Z 12:00:00 12:00:00+24:00"),
        ("date-time", "2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z 2024-02-29 2024-02-29T23:59:60Z"),
        ("hostname", "a.b-c.example x1", "xn--a a--b -a a- a..b"),
    ],
)
def test_formats_to_the_letter(kind: str, good: str, bad: str) -> None:
    for more in ({}, {"pattern": "^.{1,30}$"}, {"maxLength": 40}, {"allOf": [{"minLength": 1}]}):
        matcher = compiled(Constraint.json_schema(json.dumps({"type": "string", "format": kind, **more})))
        assert all(admits(matcher, f'"{text}"') for text in good.split())
        assert not any(admits(matcher, f'"{text}"') for text in bad.split())


def test_an_object_that_lists_what_it_has_takes_nothing_else() -> None:
    listed: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not admits(compiled(Constraint.json_schema(listed)), '{"a":1,"b":2}')
    for said in (True, {"type": "integer"}):
        assert admits(compiled(Constraint.json_schema(listed | {"additionalProperties": said})), '{"a":1,"b":2}')
    assert admits(compiled(Constraint.json_schema({"type": "object"})), '{"a":1,"b":2}')


def test_multiples_that_cannot_be_counted_together_are_refused() -> None:
    """The compiler's arithmetic has 32 bits, and it would enforce another multiple."""
    with pytest.raises(BadRequest, match="multipleOf"):
        compiled(Constraint.json_schema({"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]}))
    both = {"allOf": [{"type": "number", "multipleOf": 0.5}, {"multipleOf": 0.3}]}
    matcher = compiled(Constraint.json_schema(both))
    assert admits(matcher, "1.5") and not admits(matcher, "0.5") and not admits(matcher, "0.3")


@pytest.mark.parametrize(
    "schema",
    [
        '{"const": 123456789012345678901234567890}',
        '{"enum": [1, {"a": 99999999999999999999}]}',
        '{"const": 1e400}',
        '{"const": 4611686018427387905}',
        '{"const": 123456789.12345679}',
        '{"enum": [1e-30]}',
        '{"type": "integer", "minimum": 9007199254740993}',
        '{"type": "integer", "exclusiveMinimum": 9007199254740992}',
        '{"type": "integer", "minimum": 1e40, "maximum": 2e40}',
        '{"type": "number", "maximum": -9007199254740994}',
    ],
)
def test_numbers_that_the_compiler_would_round_are_refused(schema: str) -> None:
    with pytest.raises(BadRequest, match="digits"):
        compiled(Constraint.json_schema(schema))
    near = compiled(Constraint.json_schema('{"type": "integer", "minimum": 9007199254740992}'))
    assert admits(near, "9007199254740992") and not admits(near, "9007199254740991")
    for kind in ("integer", "number"):
        far = {"type": kind, "minimum": -(2**63), "exclusiveMaximum": 1e300}
        wide = compiled(Constraint.json_schema(far))
        assert all(admits(wide, n) for n in ("-9007199254740992", "0", "9007199254740991"))
        assert not admits(wide, "9007199254740993")
    for held in ("4611686018427387904", "123456789.123456", "-0.5"):
        assert admits(compiled(Constraint.json_schema(f'{{"const": {held}, "default": 0.12345678901234567}}')), held)


@pytest.mark.parametrize(
    ("blanks", "good", "bad"),
    [
        (
            None,
            ['{"a":1}', '{"a": 1}', '{\n    "a": 1\n}', '{\n\n\t"a":1}'],
            ['{"a":  1}', '{\n\n\n"a":1}', '{ \n"a":1}'],
        ),
        ("", ['{"a":1}'], ['{"a": 1}', '{\n"a":1}']),
        (" ?", ['{"a":1}', '{"a": 1}', '{ "a" : 1 }'], ['{"a":  1}', '{\n"a":1}']),
        (r"[ \t\n\r]{0,40}", ['{"a":' + " " * 40 + "1}"], ['{"a":' + " " * 41 + "1}"]),
    ],
)
def test_blanks(blanks: str | None, good: list[str], bad: list[str]) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"const": 1}}})
    matcher = compiled(Constraint(kind="json_schema", text=schema, blanks=blanks))
    assert all(admits(matcher, text) for text in good)
    assert not any(admits(matcher, text) for text in bad)
