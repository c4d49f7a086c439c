"""Kimi K2: <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|> within a section.

The model writes the ids itself, and they are kept: its template gives the results back under them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.chat.tools.detect import header_of, think_of
from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import Marked, Think, arguments
from quire.chat.tools.objects import rest_as_arguments
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tool, Tools

NAME = "kimi-k2"
BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CLOSE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-]+?)(?::\d+)?")


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if BEGIN not in seen.source or ARGUMENTS not in seen.source:
        return None
    think = think_of(seen)
    if think is not None:
        think = Think(think.open, think.close, implied=(BEGIN,))
    return Marked(NAME, think, KimiSection(), cut, header_of(seen, think))


@dataclass(frozen=True, slots=True)
class KimiSection:
    """The section of an answer in which Kimi K2 writes calls."""

    openers: tuple[str, ...] = (BEGIN, CALL)
    markers: tuple[str, ...] = (BEGIN, END, CALL, ARGUMENTS, CLOSE)

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        yield from t.spaces()
        if opener == BEGIN and not (yield from t.gets(CALL)):
            return
        while True:
            id, stop = yield from t.short(Stops(ARGUMENTS))
            id = id.strip()
            match = _ID.fullmatch(id)
            if stop is None or match is None:
                return
            t.begin(match["name"], id if id.startswith("functions.") else None)
            yield from t.spaces()
            if not (yield from t.json(t.argue)):
                yield from rest_as_arguments(t, Stops(CLOSE, END))
            yield from t.spaces()
            yield from t.gets(CLOSE)
            yield from t.spaces()
            if not (yield from t.gets(CALL)):
                break
            t.hold(CALL)
        yield from t.gets(END)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        each = [
            f"{g.text('functions.' + tool.name + ':')} /[0-9]{{1,3}}/ {g.text(ARGUMENTS)} {arguments(g, tool, counts)}"
            for tool, counts in tools
        ]
        call = g.rule(f"{g.text(CALL)} {any_of(each)} {g.text(CLOSE)}")
        return f"{call}{'+' if many else ''} {g.text(END)}"
