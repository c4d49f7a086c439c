"""MiniMax M3: nested elements, each mark behind a namespace token: ]<]minimax[>[<invoke name="f">]<]minimax[>[<key>… .

Objects are elements named by their keys, lists are <item>s, and everything else is bare text, which the tool's schema
types. A call comes whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from quire.chat.tools.detect import header_of, think_of
from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import Marked, Think, bare_text, listed
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tool, Tools
from quire.chat.tools.values import types_of, value_of
from quire.engine.constraints.schemas import ANNOTATIONS
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

NAME = "minimax-m3"
NS = "]<]minimax[>["
OPEN, CLOSE, INVOKE, END = f"{NS}<tool_call>", f"{NS}</tool_call>", f'{NS}<invoke name="', f"{NS}</invoke>"
MAX_DEPTH = 64
_TAG = re.compile(r"</?[^<>\s]{1,256}>")


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if NS not in seen.source or INVOKE not in seen.one:
        return None
    think = think_of(seen) or Think("<mm:think>", "</mm:think>")
    return Marked(NAME, think, ElementSection(), cut, header_of(seen, think), more=(NS,))


@dataclass(frozen=True, slots=True)
class ElementSection:
    """The section of an answer in which MiniMax M3 writes calls."""

    openers: tuple[str, ...] = (OPEN,)
    markers: tuple[str, ...] = (NS, "<tool_call>", "</tool_call>")

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        before = t.calls
        schemas = {tool.name: tool.parameters or {} for tool in tools.tools}
        while True:
            yield from t.spaces()
            if not (yield from t.gets(INVOKE)):
                break
            name, stop = yield from t.short(Stops('">'))
            if stop is None or not name:
                return
            held: list[str] = []
            if (yield from t.upto(Stops(END), held.append)) is None:
                return  # cut short: what there is comes as text
            whole = schemas.get(name, {})
            arguments = _value("".join(held), whole, whole)
            t.begin(name)
            t.argue(json.dumps(arguments if isinstance(arguments, dict) else {}, ensure_ascii=False))
            t.hold()
        if t.calls > before and (yield from t.gets(CLOSE)):
            t.forget()

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        call = g.rule(any_of([_written(g, tool, counts) for tool, counts in tools]))
        gap = g.text("\n")
        more = f"({gap} {call})*" if many else ""
        return f"{gap} {call} {more} {gap} {g.text(CLOSE)}"


def _written(g: Lark, tool: Tool, counts: bool) -> str:
    """One call: its elements in the order of the schema."""
    head = g.text(f'{INVOKE}{tool.name}">')
    if not counts:
        if not g.has("TAG"):
            g.define("TAG", "/<\\/?[^<>\\/ \\n\\t]{1,64}>/ & ~/<\\/invoke>/")
        return f"{head} ({g.until(NS)} TAG)* {g.until(NS)} {g.text(END.removeprefix(NS))}"
    made = [head, *(_optional(_element(g, tool, key, part), must) for key, part, must in listed(tool)), g.text(END)]
    return " ".join(made)


def _optional(text: str, must: bool) -> str:
    return text if must else f"({text})?"


def _element(g: Lark, tool: Tool, key: str, schema: Any, depth: int = 0) -> str:
    """A value between its marks. What is inside has one type, or nothing could tell what it is."""
    types = types_of(schema, {})
    kind = min(types) if types is not None and len(types) == 1 else None
    unable = sorted(set(schema) - _TAKEN.get(kind or "", frozenset())) if isinstance(schema, dict) else []
    if not _TAG.fullmatch(f"<{key}>") or depth > MAX_DEPTH or not isinstance(schema, dict) or kind is None or unable:
        what = f"the keyword {unable[0]} cannot" if kind is not None and unable else "a value without one type cannot"
        raise BadRequest(f"tools: {tool.name}'s {key}: {what} be enforced in this model's notation", param="tools")
    start, end = g.text(f"{NS}<{key}>"), g.text(f"{NS}</{key}>")
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return f"{start} {any_of([g.text(v if isinstance(v, str) else json.dumps(v)) for v in values])} {end}"
    if kind == "string":
        return f"{start} {bare_text(g, tool, NS)} {g.text(f'</{key}>')}"
    if kind == "array":
        item = g.rule(_element(g, tool, "item", schema.get("items"), depth + 1))
        return f"{start} {item}{{{schema.get('minItems', 0)},{schema.get('maxItems', '')}}} {end}"
    if kind == "object":
        inner = listed(Tool(tool.name, "", schema))
        parts = [_optional(_element(g, tool, name, part, depth + 1), must) for name, part, must in inner]
        return " ".join([start, *parts, end])
    told = {word: value for word, value in schema.items() if word not in ANNOTATIONS}
    return f"{start} {g.part(Constraint(kind='json_schema', text=json.dumps(told), param=f'tools: {tool.name}'))} {end}"


_NUMBER = frozenset(
    {"type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_TAKEN = {  # keywords that can be enforced, by type
    kind: words | ANNOTATIONS
    for kind, words in {
        "string": {"type", "enum", "const"},
        "integer": _NUMBER,
        "number": _NUMBER,
        "boolean": {"type", "enum", "const"},
        "null": {"type"},
        "array": {"type", "items", "minItems", "maxItems"},
        "object": {"type", "properties", "required", "additionalProperties"},
    }.items()
}


def _value(text: str, schema: Any, whole: dict[str, Any]) -> Any:
    """The value of a run of elements, or of a bare text."""
    root: list[tuple[str, Any]] = []
    stack: list[tuple[str, list[Any]]] = [("", root)]
    parts = text.split(NS)
    texts: list[str] = [parts[0]]
    for part in parts[1:]:
        tag = _TAG.match(part)
        if tag is None or len(stack) > MAX_DEPTH:
            texts.append(NS + part)
            continue
        if tag[0].startswith("</"):
            name, items = stack.pop() if len(stack) > 1 else ("", root)
            if items is not root:
                stack[-1][1].append((name, items if items else "".join(texts)))
        else:
            stack.append((tag[0][1:-1], []))
        texts = [part[tag.end() :]]
    return _typed(root if root else "".join(texts), schema, whole)


def _typed(node: Any, schema: Any, whole: dict[str, Any]) -> Any:
    types = types_of(schema, whole)
    if isinstance(node, str):
        if node == "" and types is not None and "string" not in types:
            return [] if "array" in types else {} if "object" in types else None
        return value_of(node, types)
    inner = schema if isinstance(schema, dict) else {}
    if all(name == "item" for name, _ in node) and (types is None or "object" not in types):
        return [_typed(child, inner.get("items"), whole) for _, child in node]
    properties = inner.get("properties")
    named = properties if isinstance(properties, dict) else {}
    return {name: _typed(child, named.get(name), whole) for name, child in node}
