"""LFM2: <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>, calls as Python writes them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.chat.answers.find import header_of, think_of
from quire.chat.answers.lark import Cut, Lark
from quire.chat.answers.machine import Read, Text
from quire.chat.answers.marked import Marked
from quire.chat.answers.probe import Seen
from quire.chat.answers.pythonic import read_call
from quire.chat.answers.types import Tool, Tools
from quire.observe.errors import BadRequest

NAME = "lfm2"
OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
SIGNS = (OPEN, "<|tool_list_start|>", "List of tools: [")  # templates that show tools and write no calls


def found(seen: Seen, cut: Cut) -> Marked | None:
    if OPEN not in seen.one and not (not seen.one and any(m in seen.source for m in SIGNS)):
        return None
    think = think_of(seen)
    return Marked(NAME, think, PythonSection(), cut, header_of(seen, think))


@dataclass(frozen=True, slots=True)
class PythonSection:
    """How it writes calls."""

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
        raise BadRequest(
            "tools: calls cannot be demanded of this model by a grammar: it writes them as Python",
            param="tool_choice",
            cure='use tool_choice "auto" without strict tools',
        )
