"""Arguments that a format writes as bare text, made into JSON by what the tool's schema says they are.

A string parameter stays a string whatever it looks like; "5" for an integer is 5. Where the schema says nothing, what is
JSON counts as that and everything else is a string. Python's spelling of a value (True, {'a': 1}) is understood, since
templates print values that way. Nothing here fails: what fits no type is a string.
"""

from __future__ import annotations

import ast
import json
from typing import Any

from quire.chat.tools.types import Tools

_PYTHON = {"True": True, "False": False, "None": None}
_NAMES = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
_ANY = frozenset(_NAMES)
MAX_REFS = 16


class Schemas:
    """The parameter schemas of a request's tools."""

    def __init__(self, tools: Tools):
        self._tools = {tool.name: tool.parameters or {} for tool in tools.tools}

    def types(self, tool: str, key: str) -> frozenset[str] | None:
        """The JSON types that an argument may have; None: the schema does not tell."""
        whole = self._tools.get(tool)
        if whole is None:
            return None
        properties = whole.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if schema is None:
            extra = whole.get("additionalProperties")
            schema = extra if isinstance(extra, dict) else None
        return None if schema is None else types_of(schema, whole)

    def is_text(self, tool: str, key: str) -> bool:
        """Whether the argument can only be a string."""
        return self.types(tool, key) == {"string"}

    def value(self, tool: str, key: str, text: str) -> Any:
        """The value that the text of an argument means."""
        return value_of(text, self.types(tool, key))


def types_of(schema: Any, whole: dict[str, Any], depth: int = 0) -> frozenset[str] | None:
    """The JSON types that a schema admits, as far as it says."""
    if not isinstance(schema, dict) or depth > MAX_REFS:
        return None
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#/"):
        found: Any = whole
        for step in ref[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        return types_of(found, whole, depth + 1)
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named}) & _ANY or None
    if isinstance(named, list):
        return frozenset(n for n in named if isinstance(n, str)) & _ANY or None
    if isinstance(schema.get("enum"), list):
        return frozenset(_name(v) for v in schema["enum"])
    if "const" in schema:
        return frozenset({_name(schema["const"])})
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [types_of(s, whole, depth + 1) for s in schema[word][:64]]
            known = [e for e in each if e is not None]
            return frozenset().union(*known) if known and len(known) == len(each) else None
    return None


def value_of(text: str, types: frozenset[str] | None) -> Any:
    """The value that a bare text means, given the types it may have."""
    if types == {"string"}:
        return text
    read, value = literal(text)
    if read and not isinstance(value, str) and (types is None or _fits(value, types)):
        return int(value) if types == {"integer"} and isinstance(value, float) else value
    if read and isinstance(value, str) and types is not None and "string" not in types:
        # A number in quotes where a number is meant.
        again, inner = literal(value)
        if again and _fits(inner, types):
            return inner
    return text


def literal(text: str) -> tuple[bool, Any]:
    """A value as JSON or Python writes it: whether it is one, and it."""
    word = text.strip()
    if word in _PYTHON:
        return True, _PYTHON[word]
    try:
        return True, json.loads(word, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        pass
    if word[:1] in ("{", "[", "("):
        try:
            value = ast.literal_eval(word)
            return True, json.loads(json.dumps(value, allow_nan=False))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return False, None


def _fits(value: Any, types: frozenset[str]) -> bool:
    name = _name(value)
    if name == "integer":
        return "integer" in types or "number" in types
    if name == "number" and "number" not in types:
        return "integer" in types and float(value).is_integer()
    return name in types


def _name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    return next((name for name, kind in _NAMES.items() if isinstance(value, kind)), "string")


def _no_constant(name: str) -> None:
    raise ValueError(name)
