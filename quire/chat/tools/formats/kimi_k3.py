"""Kimi K3: everything between <|open|>tag<|sep|> and <|close|>tag<|sep|>: think, response, tools, call, argument.

An argument's tag says its type, so values need no schema: strings are bare, everything else is JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import DEFINED, Marked, Think, bare_text, listed
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tool, Tools
from quire.chat.tools.values import literal, types_of
from quire.engine.constraints.schemas import ANNOTATIONS
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

NAME = "kimi-k3"
SEP = "<|sep|>"
TOOLS, CALL, ARGUMENT = f"<|open|>tools{SEP}", '<|open|>call tool="', '<|open|>argument key="'
END_TOOLS, END_CALL, END_ARGUMENT = (f"<|close|>{tag}{SEP}" for tag in ("tools", "call", "argument"))
JSON, END_JSON = f'<|open|>json type="object"{SEP}', f"<|close|>json{SEP}"
RESPONSE, END_RESPONSE = f"<|open|>response{SEP}", f"<|close|>response{SEP}"
_HEAD = re.compile(r'(?P<key>.*)" type="(?P<type>\w+)"', re.DOTALL)


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if CALL not in seen.one:
        return None
    think = Think(f"<|open|>think{SEP}", f"<|close|>think{SEP}")
    header = seen.header.split("<|open|>think")[0]
    marks = (RESPONSE, END_RESPONSE, f"<|close|>message{SEP}")
    return Marked(NAME, think, KimiSection(), cut, header, marks, ("<|open|>", "<|close|>", SEP))


@dataclass(frozen=True, slots=True)
class KimiSection:
    """The section of an answer in which Kimi K3 writes calls."""

    openers: tuple[str, ...] = (TOOLS,)
    markers: tuple[str, ...] = ("<|open|>", "<|close|>", SEP)

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        before = t.calls
        while True:
            yield from t.spaces()
            if not (yield from t.gets(CALL)):
                break
            head, stop = yield from t.short(Stops(SEP))
            name = head.split('"')[0]
            if stop is None or not name:
                return
            yield from t.spaces()
            if (yield from t.sees(ARGUMENT, JSON, END_CALL)) is None:
                return
            t.begin(name)
            if (yield from t.gets(JSON)):
                yield from t.upto(Stops(END_JSON), t.argue)
                yield from t.spaces()
            elif not (yield from _arguments(t)):
                return
            yield from t.gets(END_CALL)
            t.hold()
        if t.calls > before:
            t.forget()
            yield from t.gets(END_TOOLS)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        call = g.rule(any_of([_written(g, tool, counts) for tool, counts in tools]))
        return f"{call}{'+' if many else ''} {g.text(END_TOOLS)}"


def _arguments(t: Text) -> Read[bool]:
    """Arguments to the end of the call; False: the answer was cut."""
    count = 0
    t.argue("{")
    while True:
        yield from t.spaces()
        if not (yield from t.gets(ARGUMENT)):
            t.argue("}")
            return True
        head, stop = yield from t.short(Stops(SEP))
        match = _HEAD.fullmatch(head)
        if stop is None or match is None:
            t.argue("}")
            return True
        t.argue((", " if count else "") + json.dumps(match["key"], ensure_ascii=False) + ": ")
        count += 1
        if match["type"] == "string":
            t.argue('"')
            end = yield from t.upto(
                Stops(END_ARGUMENT), lambda text: t.argue(json.dumps(text, ensure_ascii=False)[1:-1])
            )
            if end is None:
                return False
            t.argue('"')
            continue
        held: list[str] = []
        end = yield from t.upto(Stops(END_ARGUMENT), held.append)
        read, value = literal("".join(held))
        t.argue(json.dumps(value if read else "".join(held), ensure_ascii=False))
        if end is None:
            return False


def _written(g: Lark, tool: Tool, counts: bool) -> str:
    head = f'{g.text(CALL + tool.name)} "\\" index=\\"" /[0-9]{{1,3}}/ {g.text(chr(34) + SEP)}'
    if not counts:
        one = f'{g.text(ARGUMENT)} /[^"<>]{{1,64}}" type="[a-z]{{4,8}}"/ {g.text(SEP)} {g.until(END_ARGUMENT)}'
        return f"{head} ({one})* {g.text(END_CALL)}"
    made = [head]
    for key, inner, required in listed(tool):
        types = types_of(inner, inner)
        if types is None or len(types - {"integer"}) > 1:
            raise BadRequest(f"tools: {tool.name}'s {key} needs one type, which this model writes down", param="tools")
        kind = "number" if types <= {"integer", "number"} else min(types)
        text = f"{g.text(f'{ARGUMENT}{key}{chr(34)} type={chr(34)}{kind}{chr(34)}{SEP}')} "
        if kind == "string":
            extra = sorted(set(inner) - {"type", "enum", *DEFINED, *ANNOTATIONS})
            if extra:
                raise BadRequest(f"tools: the keyword {extra[0]} of {key} cannot be enforced here", param="tools")
            options = [g.text(v) for v in inner.get("enum", ()) if isinstance(v, str)]
            text += f"{any_of(options)} {g.text(END_ARGUMENT)}" if options else bare_text(g, tool, END_ARGUMENT)
        else:
            part = Constraint(kind="json_schema", text=json.dumps(inner), param=f"tools: {tool.name}")
            text += f"{g.part(part)} {g.text(END_ARGUMENT)}"
        made.append(text if required else f"({text})?")
    made.append(g.text(END_CALL))
    return " ".join(made)
