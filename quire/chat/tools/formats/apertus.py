"""Apertus: <|tools_prefix|>[{"NAME": {…}}, …]<|tools_suffix|>, thoughts between <|inner_prefix|> and <|inner_suffix|>."""

from __future__ import annotations

import json
from dataclasses import dataclass

from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import Marked, Think, arguments
from quire.chat.tools.objects import rest_as_arguments
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tool, Tools

NAME = "apertus"
OPEN, CLOSE = "<|tools_prefix|>", "<|tools_suffix|>"


def found(seen: RenderedTurns, cut: Cut) -> Marked | None:
    if OPEN not in seen.one:
        return None
    return Marked(NAME, Think("<|inner_prefix|>", "<|inner_suffix|>"), ApertusSection(), cut, seen.header)


@dataclass(frozen=True, slots=True)
class ApertusSection:
    """The section of an answer in which Apertus writes calls."""

    openers: tuple[str, ...] = (OPEN,)
    markers: tuple[str, ...] = (OPEN, CLOSE)

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        before = t.calls
        yield from t.spaces()
        if not (yield from t.gets("[")):
            return
        while True:
            yield from t.spaces()
            if not (yield from t.gets("{")):
                break
            yield from t.spaces()
            name = yield from t.json_string()
            yield from t.spaces()
            if not name or not (yield from t.gets(":")):
                return
            yield from t.spaces()
            t.begin(name)
            if not (yield from t.json(t.argue)):
                yield from rest_as_arguments(t, Stops(CLOSE))
                break
            yield from t.spaces()
            yield from t.gets("}")
            t.hold()
            yield from t.spaces()
            yield from t.gets(",")
        yield from t.gets("]")
        yield from t.spaces()
        yield from t.gets(CLOSE)
        if t.calls > before:
            t.forget()

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        each = [f"{g.text('{' + json.dumps(tool.name) + ': ')} {arguments(g, tool, counts)}" for tool, counts in tools]
        call = g.rule(f"{any_of(each)} {g.text('}')}")
        more = f"({g.text(', ')} {call})*" if many else ""
        return f"{g.text('[')} {call} {more} {g.text(']' + CLOSE)}"
