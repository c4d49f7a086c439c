"""Muse: messages to=self (reasoning), to=user (the answer) and to=NAME, whose body is a block of marked arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.chat.tools import channels
from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import MarkedReading
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.tagged import TaggedSection
from quire.chat.tools.types import Tools
from quire.engine.types import Constraint

NAME = "muse"
START, MESSAGE, MORE, END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
OPEN = "<atem:function_calls>"
SECTION = TaggedSection(
    begin="",
    call=f'{OPEN}\n<atem:invoke name="',
    name_end='">\n',
    key_open='<atem:parameter name="',
    key_end='">',
    other_end='">',
    value_end="</atem:parameter>\n",
    close="</atem:invoke>\n</atem:function_calls>",
    between="",
    end="",
)
_TO = re.compile(r"\bto=([^\s<]+)")


def found(seen: RenderedTurns, cut: Cut) -> Muse | None:
    return Muse(cut) if OPEN in seen.one and "to=self" in seen.source else None


@dataclass(frozen=True, slots=True)
class Muse:
    """The format."""

    cut: Cut
    name: str = NAME
    reasons: bool = True
    calls: bool = True
    markers: tuple[str, ...] = (START, MESSAGE, MORE, END)

    def reading(self, tail: str, tools: Tools) -> MarkedReading:
        opened = self._opened(tail)
        return MarkedReading(lambda t: channels.read(t, ENVELOPE, tools, opened))

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        offered = bool(tools.tools) and tools.choice != "none"
        strict = any(tool.strict for tool in tools.tools)
        calls = offered and (tools.forced or strict or not tools.parallel or answer is not None)
        if not calls and answer is None:
            return None
        if self._opened(tail) is not None:
            return answer
        g = Lark(self.cut)
        thought = f"{g.text(' to=self' + MESSAGE)} {g.any()} {g.text(MORE + START + 'assistant')}"
        options: list[str] = []
        if calls:
            each = [
                f"{g.text(f' to={t.name}{MESSAGE}{OPEN}')} {SECTION.write(g, [(t, tools.forced or t.strict)], False)}"
                for t in tools.tools
                if tools.choice != "named" or t.name == tools.name
            ]
            call = g.rule(any_of(each))
            many = tools.parallel and tools.choice != "named"
            options.append(f"{call} ({g.text(MORE + START + 'assistant')} {call})*" if many else call)
        if not (calls and tools.forced):
            options.append(f"{g.text(' to=user' + MESSAGE)} {g.part(answer) if answer is not None else g.any()}")
        return g.build(f"({thought})* {any_of(options)}", "tools" if calls or answer is None else answer.param)

    def _opened(self, tail: str) -> str | None:
        turn = tail.rpartition(START + "assistant")[2] if START + "assistant" in tail else ""
        return turn.partition(MESSAGE)[0] if MESSAGE in turn and MORE not in turn and END not in turn else None


def _address(header: str) -> tuple[str, str]:
    to = _TO.search(header)
    if to is None or to[1] == "user":
        return channels.TEXT, ""
    return (channels.REASONING, "") if to[1] == "self" else (channels.CALL, to[1])


def _body(t: Text, name: str, tools: Tools, ends: Stops) -> Read[bool]:
    yield from t.spaces()
    before = t.calls
    if (yield from t.gets(OPEN)):
        yield from SECTION.read(t, OPEN, tools)
    yield from t.spaces()
    return t.calls > before


ENVELOPE = channels.Envelope(START, MESSAGE, (MORE, END), _address, _body)
