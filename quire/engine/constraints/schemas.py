"""JSON schemas on their way to the compiler: what is refused, and what is narrowed so that it can be enforced to the letter.

Every change here only ever narrows: a text that the changed schema allows, the schema that was sent allows too. So objects
that list what they have are closed, formats become exact patterns, and blanks between the parts of a JSON text are few.
Knows nothing of tokens. The keywords that cannot be enforced are listed here, and published in docs/structured-output.md.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from math import isfinite, prod
from typing import Any, TypeGuard

from quire.engine.constraints.closed import closed
from quire.observe.errors import BadRequest

# Between the parts of a JSON text: nothing, a space, or a line end and an indent. A model that has nothing but blanks to say
# gets to its next word.
BLANKS = r"( |\n{1,2}[ \t]{0,20})?"
MAX_NAMES = 2000  # properties of one object: compiling them takes time in proportion to their square
MAX_BLANKS = 200  # characters of a pattern for blanks
OWN_OPTIONS = "x-guidance"  # the keyword by which a schema speaks to the compiler

# The compiler's own: known to some draft of JSON Schema, and not enforced. A schema with one of these is refused by its name.
REFUSED = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "dependencies", "dependentRequired", "dependentSchemas"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
)
ENFORCED = (
    *("type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "minProperties"),
    *("maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "minLength", "maxLength"),
    *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("anyOf", "allOf", "oneOf", "$ref", "$defs", "definitions", "$anchor", "$id", "$schema"),
)
FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples"})  # texts that constrain nothing
_EMPTY = {  # what these keywords say when they say nothing
    "uniqueItems": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "$recursiveAnchor": (False,),
}

# The compiler counts in doubles: bounds further out than this are drawn in to it, and it is a bound for nothing beyond.
_EXACT_TO = 1 << 53
_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}  # and which side they are on

# Where a schema holds schemas: under one name, in a list, and in a map.
_ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_LISTS = ("prefixItems", "items", "anyOf", "allOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# What could only be written as \u00XX, which is not allowed: "\u0061" is another spelling of "a", and the compiler would
# take it for another name.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_CONTROL_ESCAPE = re.compile(r"\\(?:x[01]|x7[fF]|x\{|u00[01]|u007[fF]|u\{|c|0|v|a|e)")

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"  # not 0000, which few calendars have
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = r"[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,31}"  # no two hyphens: those begin an encoded name
# Formats that the compiler takes by their shape, in words that leave nothing to a calendar or a registry.
_EXACT = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
}
_LONGEST_HOST = 253


def prepared(text: str, blanks: str | None = None) -> str:
    """The schema as the compiler gets it. `blanks`: a pattern of what may stand between two parts; None: ours."""
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if schema is False:
        raise ValueError("the schema is false: no text satisfies it")
    if not isinstance(schema, dict):
        raise ValueError("a schema must be a JSON object")
    if OWN_OPTIONS in schema:
        raise ValueError(f"the keyword {OWN_OPTIONS} is not taken: how a schema is enforced is not the schema's to say")
    _look_through(schema)
    schema = closed(schema)
    _narrow(schema)
    return json.dumps({**schema, OWN_OPTIONS: _options(blanks)})


def blanks_of(pattern: str, param: str) -> str:
    """A client's pattern for blanks, if blanks are all that it can match: anything else would be no JSON."""
    spelled = re.sub(r"(\[[^\]]*)\\s([^\]]*\])", r"\1 \\t\\n\\r\2", pattern).replace(r"\s", r"[ \t\n\r]")
    if len(pattern) > MAX_BLANKS or not _ONLY_BLANKS.fullmatch(spelled):
        raise BadRequest(
            f"{param} must be a pattern of blanks: spaces, \\t, \\n, \\r, classes of these, groups and counts",
            param=param,
        )
    try:
        re.compile(spelled)
    except re.error as error:
        raise BadRequest(f"{param} is not a pattern: {error}", param=param) from None
    return spelled


_ONLY_BLANKS = re.compile(r"(?:[ \t\n\r|)*+?]|\((?:\?:)?|\\[tnr]|\[(?:[ \t\n\r]|\\[tnr])+\]|\{\d{1,3}(?:,\d{0,3})?\})*")


def _options(blanks: str | None) -> dict[str, Any]:
    """A schema may carry options for the compiler. These are ours, whatever it says."""
    return {
        "lenient": False,
        "coerce_one_of": False,
        "whitespace_flexible": blanks != "",
        "whitespace_pattern": BLANKS if blanks is None else blanks or None,
        "item_separator": ",",
        "key_separator": ":",
        "json_allowed_escapes": '"\\\\bfnrt',
        "json_allow_general_unicode_escapes": False,
    }


def _no_constant(name: str) -> None:
    raise ValueError(f"it is not JSON: {name} is no number there")


def _look_through(schema: dict[str, Any]) -> None:
    """Refuse what the compiler would take for something else: a name that is counted twice, a control character, and
    multiples whose common one it cannot count to."""
    left: list[Any] = [schema]
    multiples: set[tuple[int, int]] = set()
    combined = False
    while left:
        at = left.pop()
        if isinstance(at, str):
            if _CONTROL.search(at):
                raise BadRequest(f"{at[:40]!r} has a control character, which the answer may not have")
        elif _number(at):
            if not _held(at):
                raise BadRequest(f"the number {str(at)[:40]} has more digits than can be enforced")
        elif isinstance(at, list):
            left += at
        elif isinstance(at, dict):
            left += at
            left += (value for name, value in at.items() if not _passed_over(name, value))
            combined = combined or not at.keys().isdisjoint({"allOf", "anyOf", "oneOf", "$ref"})
            multiple = at.get("multipleOf")
            if isinstance(multiple, int | float) and multiple > 0:
                multiples.add(_decimal(multiple))
            _look_at(at)
    most = max((places for _, places in multiples), default=0)
    if combined and prod(digits * 10 ** (most - places) for digits, places in multiples) >= 1 << 32:
        raise BadRequest("the keyword multipleOf cannot be enforced with these values together")


def _look_at(at: dict[str, Any]) -> None:
    listed = at.get("properties")
    if isinstance(listed, dict) and len(listed) > MAX_NAMES:
        raise BadRequest(f"an object has {len(listed)} properties: at most {MAX_NAMES} can be enforced")
    named = at.get("patternProperties")
    for pattern in (at.get("pattern"), *(named if isinstance(named, dict) else ())):
        if isinstance(pattern, str) and _CONTROL_ESCAPE.search(pattern):
            raise BadRequest(f"pattern {pattern[:40]!r} has a control character, which the answer may not have")
    for name, sign in _BOUNDS.items():
        bound = at.get(name)
        if _number(bound) and -sign * bound > _EXACT_TO - name.startswith("exclusive"):
            raise BadRequest(f"the keyword {name} cannot be enforced at {str(bound)[:40]}: it has too many digits")
    least = at.get("minProperties")
    counts = isinstance(least, int | float) and least > 1
    if counts and (at.get("additionalProperties") is not False or named is not None):
        raise BadRequest(
            "the keyword minProperties cannot be enforced above 1: a name that is not listed could come twice",
            cure="use required, or additionalProperties: false",
        )


def _number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _passed_over(name: str, value: Any) -> bool:
    """A text that constrains nothing (a schema under such a name does), or a bound that is drawn in or refused by name."""
    annotates = name in ANNOTATIONS and not isinstance(value, dict)
    return annotates or (name in _BOUNDS and _number(value) and abs(value) > _EXACT_TO)


def _held(number: float) -> bool:
    """Whether the compiler, which reads numbers as doubles in a quick way, has exactly this one."""
    if isinstance(number, int):
        return abs(number) <= _EXACT_TO or (abs(number) < 1 << 63 and int(float(number)) == number)
    if not isfinite(number):
        return False
    digits, places = _decimal(abs(number))
    return digits < _EXACT_TO and places <= 22


def _decimal(number: float) -> tuple[int, int]:
    """A number as digits and decimal places."""
    _, digits, power = Decimal(repr(number)).normalize().as_tuple()
    value = int("".join(map(str, digits)))
    return (value, -int(power)) if int(power) < 0 else (value * 10 ** int(power), 0)


def _narrow(schema: dict[str, Any]) -> None:
    """Leave out what says nothing, draw bounds in, and write formats exactly; in place."""
    left: list[Any] = [schema]
    while left:
        at = left.pop()
        if not isinstance(at, dict):
            continue
        for name, empty in _EMPTY.items():
            if name in at and any(at[name] is said or (said == {} and at[name] == {}) for said in empty):
                del at[name]
        for name, sign in _BOUNDS.items():
            if _number(at.get(name)) and sign * at[name] > _EXACT_TO:
                at[name] = sign * _EXACT_TO
        pattern = _EXACT.get(at["format"]) if isinstance(at.get("format"), str) else None
        if pattern is not None:
            _exact(at, pattern)
        left += (at[name] for name in _ONE if name in at)
        left += (one for name in _LISTS if isinstance(at.get(name), list) for one in at[name])
        left += (one for name in _MAPS if isinstance(at.get(name), dict) for one in at[name].values())


def _exact(at: dict[str, Any], pattern: str) -> None:
    """A format as a pattern of its own, beside the one that may be there."""
    name = at.pop("format")
    also: dict[str, Any] = {"pattern": f"^(?:{pattern})$"}
    if name == "hostname":
        also["maxLength"] = _LONGEST_HOST
    if "pattern" not in at and "maxLength" not in at:
        at.update(also)
    else:
        others = at.get("allOf", [])
        at["allOf"] = [*(others if isinstance(others, list) else []), also]
