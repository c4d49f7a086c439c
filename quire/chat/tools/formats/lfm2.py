"""LFM2: <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>, calls as Python writes them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from quire.chat.tools.detect import header_of, think_of
from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import DEFINED, Marked, json_text, listed
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.pythonic import read_call
from quire.chat.tools.reader import Read, Text
from quire.chat.tools.types import Tool, Tools
from quire.engine.constraints.schemas import ANNOTATIONS
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

NAME = "lfm2"
OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
SIGNS = (OPEN, "<|tool_list_start|>", "List of tools: [")  # templates that show tools and write no calls


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if OPEN not in seen.one and not (not seen.one and any(m in seen.source for m in SIGNS)):
        return None
    think = think_of(seen)
    return Marked(NAME, think, PythonSection(), cut, header_of(seen, think))


@dataclass(frozen=True, slots=True)
class PythonSection:
    """The section of an answer in which LFM2 writes calls."""

    openers: tuple[str, ...] = (OPEN,)
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        before = t.calls
        yield from t.spaces()
        listed = yield from t.gets("[")
        while (yield from read_call(t)):
            t.hold()
            yield from t.spaces()
            if not (yield from t.gets(",")):
                break
            yield from t.spaces()
        if t.calls == before:
            return
        if listed and not (yield from t.gets("]")):
            return
        t.forget()
        yield from t.spaces()
        yield from t.gets(CLOSE)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        call = g.rule(any_of([_written(g, tool, counts) for tool, counts in tools]))
        more = f'(", " {call})*' if many else ""
        return f'"[" {call} {more} "]" {g.text(CLOSE)}'


def _written(g: Lark, tool: Tool, counts: bool) -> str:
    """A call whose values are JSON, which but for true, false and null is Python; strings may have its other quotes."""
    if not counts:
        one = f"/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}=/ {g.part(Constraint(kind='json_schema', text='{}', param='tools'))}"
        one = g.rule(one)
        return f'{g.text(tool.name + "(")} ({one} (", " {one})*)? ")"'
    first, rest = g.rule('""'), g.rule('""')  # of what is left: where nothing was written yet, and where something was
    for key, inner, required in reversed(listed(tool)):
        if not key.isidentifier() or iskeyword(key):
            raise BadRequest(
                f"tools: {tool.name}'s {key} is no name in Python, as which this model writes it", param="tools"
            )
        item = g.rule(f"{g.text(key + '=')} {any_of(_value(g, tool, inner))}")
        first = g.rule(f"{item} {rest}" if required else f"{item} {rest} | {first}")
        rest = g.rule(f'", " {item} {rest}' if required else f'(", " {item})? {rest}')
    return f'{g.text(tool.name + "(")} {first} ")"'


def _value(g: Lark, tool: Tool, inner: Any) -> list[str]:
    if tool.grammar is not None:
        return [json_text(g, tool.grammar)]
    part = Constraint(kind="json_schema", text=json.dumps(inner), param=f"tools: {tool.name}")
    made = [g.part(part)]
    if isinstance(inner, dict):
        values = inner.get("enum")
        if isinstance(values, list):
            made += [g.text(f"'{v}'") for v in values if isinstance(v, str) and _PLAIN.fullmatch(v)]
        elif inner.get("type") == "string" and set(inner) <= {"type", *DEFINED, *ANNOTATIONS}:
            made.append(_QUOTED)
    return made


_PLAIN = re.compile(r"[^'\\\x00-\x1f\x7f]*")
_QUOTED = r"/'([^'\\\x00-\x1f\x7f]|\\['\\nrt])*'/"
