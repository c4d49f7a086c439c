"""Tools that take a text instead of arguments (OpenAI's `custom` ones): shown to a model as functions of one string, read back as the text.

A template knows functions with JSON arguments alone. The text of a call is decoded as it comes. A model that wrote its arguments otherwise, which
only one without a grammar can, is taken at its word: its one string, or all that it wrote. Of OpenAI's shapes it knows those of formats, and the tool of chat completions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.chat.tools.types import TEXT, Tool
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from quire.server.reading import Reading
from quire.server.shared.tools import NOTHING, Raw, at, tool

SYNTAXES = ("lark", "regex")
_SCHEMA = {
    "type": "object",
    "properties": {TEXT: {"type": "string"}},
    "required": [TEXT],
    "additionalProperties": False,
}
_BEGIN = re.compile(rf'\s*\{{\s*"{TEXT}"\s*:\s*"')
# The end of what can be decoded: before half an escape, or half a pair of surrogates.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))*'
)
# An escape that JSON does not have, or half a pair alone: it stays as it was written.
_BROKEN = re.compile(
    r'\\(?:[^"\\/bfnrtu]|u[0-9a-fA-F]{0,3}[^0-9a-fA-F]|u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..))",
    re.DOTALL,
)


class Grammar(msgspec.Struct, forbid_unknown_fields=True):
    """A grammar that a text must satisfy."""

    syntax: str
    definition: str


def text_tool(where: str, name: str, description: str | None, grammar: Grammar | None) -> Tool:
    """A tool that takes a text, checked."""
    made = tool(where, name, description, NOTHING, False)
    if grammar is None:
        return replace(made, parameters=_SCHEMA)
    if grammar.syntax not in SYNTAXES:
        place = f"{where}.format.syntax"
        raise BadRequest(f"{place} must be {' or '.join(SYNTAXES)}", param=place)
    told = f"The {TEXT} must satisfy this {'Lark grammar' if grammar.syntax == 'lark' else 'pattern'}:\n{grammar.definition}"
    return replace(
        made,
        description=f"{made.description}\n\n{told}".lstrip(),
        parameters=_SCHEMA,
        strict=True,
        grammar=Constraint(kind=grammar.syntax, text=grammar.definition, param=f"{where}.format"),
    )


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """`custom.format` as chat completions write it."""

    type: str
    grammar: Grammar | None = None


class Custom(msgspec.Struct, forbid_unknown_fields=True):
    """`tools[].custom`."""

    name: str
    description: str | None = None
    format: Format | None = None


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that takes a text, in the shape of chat completions."""

    type: str
    custom: Custom


class _Name(msgspec.Struct):
    name: str


class _Any(msgspec.Struct):
    type: str | None = None
    custom: _Name | None = None


def text_names(items: Sequence[Raw]) -> frozenset[str]:
    """The names of the `custom` tools among those of chat completions, which were checked."""
    given: list[_Any] = [at("tools", raw, _Any) for raw in items]
    return frozenset(one.custom.name for one in given if one.type == "custom" and one.custom is not None)


def nested_tool(where: str, raw: Raw, reading: Reading) -> Tool:
    """A `custom` tool as chat completions write it."""
    given = at(where, raw, CustomTool, reading).custom
    where, shape = f"{where}.custom", given.format
    if shape is not None and shape.type not in ("text", "grammar"):
        raise BadRequest(f"{where}.format.type must be text or grammar", param=f"{where}.format.type")
    if shape is not None and shape.type == "grammar" and shape.grammar is None:
        raise BadRequest(f"{where}.format.grammar is missing", param=f"{where}.format.grammar")
    return text_tool(where, given.name, given.description, shape.grammar if shape and shape.type == "grammar" else None)


def flat_format(where: str, raw: Raw, reading: Reading) -> Grammar | None:
    """`format` as the Responses API writes it: {"type": "grammar", "syntax": …, "definition": …}, or of type text."""
    if bytes(raw) in (b"", b"null"):
        return None
    given = at(where, raw, dict[str, Any])
    kind = given.pop("type", None)
    if kind == "text":
        for name in given:
            reading.unknown(name, ("type",), where)
        return None
    if kind != "grammar":
        raise BadRequest(f"{where}.type must be text or grammar", param=f"{where}.type")
    return at(where, Raw(msgspec.json.encode(given)), Grammar, reading)


def arguments_with(text: str) -> str:
    """The arguments of a call with that text."""
    return json.dumps({TEXT: text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """The text in the whole arguments of a call."""
    text = TextArgument()
    return text.feed(arguments) + text.finish()


class TextArgument:
    """The text in a call's arguments, as they come."""

    def __init__(self) -> None:
        self._left: list[str] = []  # before the text begins; then what cannot be decoded yet
        self._begun = False
        self._over = False

    def feed(self, fragment: str) -> str:
        """Take arguments in; the text that is certain."""
        if self._over:
            return ""
        self._left.append(fragment)
        if not self._begun:
            if len(self._left) > 1 and not any(c in fragment for c in '{":'):
                return ""
            whole = "".join(self._left)
            begin = _BEGIN.match(whole)
            if begin is None:
                return ""
            self._begun = True
            self._left = [whole[begin.end() :]]
        return self._decoded("".join(self._left))

    def finish(self) -> str:
        """The rest of the text, where it was not a string under its name."""
        if self._begun or self._over:
            return ""
        self._over = True
        return _meant("".join(self._left))

    def _decoded(self, left: str) -> str:
        made: list[str] = []
        at = 0
        while True:
            whole = _WHOLE.match(left, at)
            end = whole.end() if whole is not None else at
            made.append(_loads(left[at:end]))
            if not _BROKEN.match(left, end):
                break
            made.append("\\")
            at = end + 1
        self._over = left[end : end + 1] == '"'
        self._left = [] if self._over else [left[end:]]
        return "".join(made)


def _loads(text: str) -> str:
    return json.loads(f'"{text}"', strict=False) if text else ""


def _meant(written: str) -> str:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return written
    if isinstance(value, dict):
        texts = (
            [value[TEXT]]
            if isinstance(value.get(TEXT), str)
            else [one for one in value.values() if isinstance(one, str)]
        )
        return texts[0] if len(texts) == 1 else "" if not value else written
    return value if isinstance(value, str) else written
