"""Gemma 4: <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>, thoughts in <|channel>thought … <channel|>.

Arguments look like JSON with bare keys and a mark of their own in place of the quotation mark; they become JSON as they
come.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import Marked, Think, bare_text, schema_of
from quire.chat.tools.named import NAME as NAMES
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import TEXT, Tool, Tools
from quire.chat.tools.values import literal, types_of
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

NAME = "gemma"
OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
THINK = Think("<|channel>thought", "<channel|>")
MAX_DEPTH = 64
_SAID = frozenset({"title", "description", "default", "examples", "$comment", "$schema"})
_NUMBER = (
    frozenset({"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum"}) | _SAID
)
_TAKEN = {  # keywords that can be enforced, by type
    "string": frozenset({"type", "enum"}) | _SAID,
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": frozenset({"type", "enum"}) | _SAID,
    "null": frozenset({"type"}) | _SAID,
    "array": frozenset({"type", "items"}) | _SAID,
    "object": frozenset({"type", "properties", "required", "additionalProperties"}) | _SAID,
}
_WORD = re.compile(r"[^,}\]\n<]+")
_KEY = re.compile(r"[^:<{},\"]+")


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if OPEN not in seen.one and not (OPEN in seen.source and QUOTE in seen.source):
        return None
    header = seen.header.split("<|channel>")[0]
    return Marked(NAME, THINK, GemmaSection(), cut, header, more=("<|channel>",))


@dataclass(frozen=True, slots=True)
class GemmaSection:
    """The section of an answer in which Gemma writes calls."""

    openers: tuple[str, ...] = (OPEN,)
    markers: tuple[str, ...] = (OPEN, CLOSE, QUOTE)

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        yield from t.spaces()
        if not (yield from t.gets("call:")):
            return
        name, stop = yield from t.short(Stops("{"))
        if stop is None or not NAMES.fullmatch(name.strip()):
            return
        t.begin(name.strip())
        t.argue("{")
        if not (yield from _items(t, "}", True, 0)):
            yield from t.upto(Stops(CLOSE), t.argue, take=False)
        yield from t.spaces()
        yield from t.gets(CLOSE)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        each: list[str] = []
        for tool, counts in tools:
            if counts and tool.grammar is not None:
                inside = f'"{{" {g.text(f"{TEXT}:{QUOTE}")} {bare_text(g, tool, QUOTE)} "}}"'
            elif counts:
                inside = _written(g, schema_of(tool, True), tool.name)
            else:
                inside = f'"{{" {_anything(g)[1]}? "}}"'
            each.append(f"{g.text(f'call:{tool.name}')} {inside} {g.text(CLOSE)}")
        call = g.rule(any_of(each))
        return f"{call} ({g.text(OPEN)} {call})*" if many else call


def _anything(g: Lark) -> tuple[str, str]:
    """Rules for any value, and for the inside of any object."""
    if not g.has("value"):
        quoted = g.rule(f"{g.text(QUOTE)} {g.until(QUOTE)}")
        g.define("pair", '/[^:<{}," \\n\\t]{1,64}/ ":" value')
        g.define("pairs", 'pair ("," pair)*')
        word = "/-?[0-9]{1,18}([.][0-9]{1,18})?|true|false|null/"
        g.define("value", f'{quoted} | {word} | "[" (value ("," value)*)? "]" | "{{" pairs? "}}"')
    return "value", "pairs"


def _written(g: Lark, schema: Any, name: str, depth: int = 0) -> str:
    """A value that a schema describes, in this notation."""
    kinds = types_of(schema, {}) if depth <= MAX_DEPTH else None
    kind = min(kinds) if kinds is not None and len(kinds) == 1 else None
    unable = sorted(set(schema) - _TAKEN.get(kind or "", frozenset())) if isinstance(schema, dict) else ["schema"]
    if kind is None or unable:
        what = f"the keyword {unable[0]} cannot" if kind is not None else "a value without one type cannot"
        raise BadRequest(f"tools: {name}: {what} be enforced in this model's notation", param="tools")
    if "enum" in schema:
        return any_of([g.text(f"{QUOTE}{v}{QUOTE}" if isinstance(v, str) else json.dumps(v)) for v in schema["enum"]])
    if kind == "string":
        return f"{g.text(QUOTE)} {g.until(QUOTE)}"
    if kind == "array":
        item = _written(g, schema["items"], name, depth + 1) if "items" in schema else _anything(g)[0]
        item = g.rule(item)
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind == "object":
        return f'"{{" {_properties(g, schema, name, depth)} "}}"'
    told = {word: value for word, value in schema.items() if word not in _SAID}
    return g.part(Constraint(kind="json_schema", text=json.dumps(told), param=f"tools: {name}"))


def _properties(g: Lark, schema: dict[str, Any], name: str, depth: int) -> str:
    """Pairs in the order of their names, as the template writes them, with commas between those that are there."""
    required = schema.get("required") or ()
    rest = {False: "", True: ""}  # what may follow, by whether something came before
    for key in sorted(schema.get("properties") or {}, reverse=True):
        value = g.rule(f"{g.text(key + ':')} {_written(g, schema['properties'][key], name, depth + 1)}")
        made: dict[bool, str] = {}
        for begun in (False, True):
            here = f"{chr(34) + ',' + chr(34) if begun else ''} {value} {rest[True]}"
            if key in required:
                made[begun] = g.rule(here)
            else:
                made[begun] = g.rule(f"{here} | {rest[begun]}") if rest[begun] else f"({g.rule(here)})?"
        rest = made
    return rest[False]


def _items(t: Text, end: str, keyed: bool, depth: int) -> Read[bool]:
    """The inside of an object or a list up to its end, as JSON."""
    first = True
    while True:
        yield from t.spaces()
        if (yield from t.gets(end)):
            t.argue(end)
            return True
        if not first:
            if not (yield from t.gets(",")):
                return False
            t.argue(", ")
            yield from t.spaces()
        first = False
        if keyed and not (yield from _key(t)):
            return False
        if not (yield from _value(t, depth)):
            return False


def _key(t: Text) -> Read[bool]:
    key: str | None
    if (yield from t.gets(QUOTE)):
        key, stop = yield from t.short(Stops(QUOTE))
        key = key if stop is not None else None
    elif (yield from t.next()) == '"':
        key = yield from t.json_string()
    else:
        key = yield from t.matching(_KEY)
    yield from t.spaces()
    if not key or not (yield from t.gets(":")):
        return False
    t.argue(json.dumps(key.strip(), ensure_ascii=False) + ": ")
    yield from t.spaces()
    return True


def _value(t: Text, depth: int) -> Read[bool]:
    if depth > MAX_DEPTH:
        return False
    if (yield from t.gets(QUOTE)):
        t.argue('"')
        whole = yield from t.upto(Stops(QUOTE), lambda text: t.argue(json.dumps(text, ensure_ascii=False)[1:-1]))
        if whole is None:
            return False
        t.argue('"')
        return True
    char = yield from t.next()
    if char in ("{", "["):
        t.take(1)
        t.argue(char)
        return (yield from _items(t, "}" if char == "{" else "]", char == "{", depth + 1))
    if char == '"':
        return (yield from t.json(t.argue))
    word = yield from t.matching(_WORD, 1 << 16)
    if not word:
        return False
    read, value = literal(word)
    t.argue(json.dumps(value if read else word.strip(), ensure_ascii=False))
    return True
