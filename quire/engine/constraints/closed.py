"""Schemas, closed: where one lists its properties and says nothing of others, there are no others.

JSON Schema lets an object have any further properties unless it says not to, and most clients do not say. A grammar of
that leaves a model free to make up names for ever, and programs do not take what they do not name. Closing only ever
narrows: every answer validates against the schema as it was sent. Where that would take a proof (composition,
exclusion, counting), the schema is left as it is.
"""

from __future__ import annotations

from typing import Any

# With one of these anywhere, narrowing a part may empty the whole, or admit what another part excludes.
_DELICATE = frozenset(
    {
        *("allOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependentRequired", "dependencies"),
        *("minProperties", "propertyNames", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", "contains"),
    }
)
_SAYS = frozenset({"additionalProperties", "patternProperties"})
_LITERAL = frozenset({"const", "enum"})  # whole values, which may have more than is listed
_DEPTH = 32  # deeper parts stay open


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, where that is safe, with `additionalProperties: false` in the objects that list what they have."""
    return schema if _delicate(schema, 0) else _close(schema, 0)


def _delicate(part: Any, depth: int) -> bool:
    if depth > _DEPTH:
        return True
    if isinstance(part, list):
        return any(_delicate(one, depth + 1) for one in part)
    if not isinstance(part, dict):
        return False
    split = "$ref" in part or "anyOf" in part
    if split and not part.keys().isdisjoint({"properties", "required", *_SAYS}):
        return True  # what one object may have is told in two places
    return not part.keys().isdisjoint(_DELICATE) or any(_delicate(one, depth + 1) for one in part.values())


def _close(schema: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > _DEPTH:
        return schema
    made = dict(schema)
    named = schema.get("properties")
    for word in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(word), dict):
            made[word] = {key: _close(inner, depth + 1) for key, inner in schema[word].items()}
    for word in ("items", "additionalProperties"):
        if isinstance(schema.get(word), dict):
            made[word] = _close(schema[word], depth + 1)
    for word in ("prefixItems", "anyOf"):
        if isinstance(schema.get(word), list):
            made[word] = [_close(inner, depth + 1) for inner in schema[word]]
    silent = schema.keys().isdisjoint(_SAYS | _LITERAL)
    if isinstance(named, dict) and named and silent and _within(schema.get("required", []), named):
        made["additionalProperties"] = False
    return made


def _within(required: Any, named: dict[str, Any]) -> bool:
    return isinstance(required, list) and all(isinstance(key, str) and key in named for key in required)
