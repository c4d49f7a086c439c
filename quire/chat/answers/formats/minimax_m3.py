"""MiniMax M3: nested elements, each mark behind a namespace token: ]<]minimax[>[<invoke name="f">]<]minimax[>[<key>… .

Objects are elements named by their keys, lists are <item>s, and everything else is bare text, which the tool's schema
types. A call comes whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from quire.chat.answers.find import header_of, think_of
from quire.chat.answers.lark import Cut, Lark
from quire.chat.answers.machine import Read, Stops, Text
from quire.chat.answers.marked import Marked, Think
from quire.chat.answers.probe import Seen
from quire.chat.answers.types import Tool, Tools
from quire.chat.answers.values import types_of, value_of
from quire.observe.errors import BadRequest

NAME = "minimax-m3"
NS = "]<]minimax[>["
OPEN, CLOSE, INVOKE, END = f"{NS}<tool_call>", f"{NS}</tool_call>", f'{NS}<invoke name="', f"{NS}</invoke>"
MAX_DEPTH = 64
_TAG = re.compile(r"</?[^<>\s]{1,256}>")


def found(seen: Seen, cut: Cut) -> Marked | None:
    if NS not in seen.source or INVOKE not in seen.one:
        return None
    think = think_of(seen) or Think("<mm:think>", "</mm:think>")
    return Marked(NAME, think, ElementSection(), cut, header_of(seen, think), more=(NS,))


@dataclass(frozen=True, slots=True)
class ElementSection:
    """How it writes calls."""

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
        raise BadRequest(
            "tools: calls cannot be demanded of this model by a grammar: it writes arguments as nested elements",
            param="tool_choice",
            cure='use tool_choice "auto" without strict tools',
        )


def _value(text: str, schema: Any, whole: dict[str, Any]) -> Any:
    """What a run of elements, or a bare text, means."""
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
