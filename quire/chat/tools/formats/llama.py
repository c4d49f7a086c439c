"""Llama 3.x and 4: a bare JSON object {"name": …, "parameters": {…}}, perhaps after <|python_tag|>, or bare Python [f(a=1)].

Nothing marks a bare call, so an answer that begins so is a call only if it names a tool of the request; otherwise it is
the text it looks like. Several calls follow one another with a semicolon or a line between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.chat.tools import pythonic
from quire.chat.tools.detect import header_of, think_of
from quire.chat.tools.lark import SPACE, Cut, Lark, any_of
from quire.chat.tools.marked import MarkedReading, Think, arguments, reasoning
from quire.chat.tools.objects import read_call
from quire.chat.tools.probe import NAMES, RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tools
from quire.engine.types import Constraint

NAME = "llama"
TAG = "<|python_tag|>"
_BARE = re.compile(r'\s*\{\s*"(?:type": "function", ")?(?:name|function)"\s*:\s*"' + NAMES[0])


def found(seen: RenderedTurns, cut: Cut) -> Llama | None:
    writes = _BARE.match(seen.one) is not None
    pythonic_too = re.match(r"\s*\[\s*" + NAMES[0] + r"\(", seen.one) is not None
    # The template of Llama 4 shows its own way in words alone.
    told = not seen.one and (TAG in seen.source or "[func_name1(params_name1" in seen.source)
    if not (writes or pythonic_too or told):
        return None
    think = think_of(seen)
    key = '", "parameters": ' if '"parameters"' in seen.one or not seen.one else '", "arguments": '
    return Llama(cut, think, header_of(seen, think), key)


@dataclass(frozen=True, slots=True)
class Llama:
    """The format."""

    cut: Cut
    think: Think | None
    header: str
    middle: str
    name: str = NAME
    calls: bool = True

    @property
    def reasons(self) -> bool:
        return self.think is not None

    @property
    def markers(self) -> tuple[str, ...]:
        return (TAG, *((self.think.open, self.think.close) if self.think else ()))

    def reading(self, tail: str, tools: Tools) -> MarkedReading:
        opened = self.think is not None and self.think.opened(tail, self.header)
        return MarkedReading(lambda t: _answer(t, self.think, opened, tools))

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        offered = bool(tools.tools) and tools.choice != "none"
        strict = any(tool.strict for tool in tools.tools)
        calls = offered and (tools.forced or strict or not tools.parallel or answer is not None)
        if not calls and (answer is None or self.think is None):
            return answer
        g = Lark(self.cut)
        start: list[str] = []
        if self.think is not None:
            rest = f"{g.until(self.think.close)} {SPACE}"
            opened = self.think.opened(tail, self.header)
            start.append(rest if opened else f"({g.text(self.think.open)} {rest})?")
        options: list[str] = []
        if calls:
            chosen = [t for t in tools.tools if tools.choice != "named" or t.name == tools.name]
            heads = [g.text('{"name": "' + t.name + self.middle) for t in chosen]
            each = [
                f"{head} {arguments(g, t, tools.forced or t.strict)} {g.text('}')}"
                for head, t in zip(heads, chosen, strict=True)
            ]
            call = g.rule(any_of(each))
            many = f'("; " {call})*' if tools.parallel and tools.choice != "named" else ""
            options.append(f"{call} {many}")
        if not (calls and tools.forced):
            options.append(g.part(answer) if answer is not None else r"/([^ \n\t{<\[](.|\n)*)?/")
        start.append(any_of(options))
        return g.build(" ".join(start), "tools" if calls or answer is None else answer.param)


def _answer(t: Text, think: Think | None, opened: bool, tools: Tools) -> Read[None]:
    if think is not None:
        t.hold()
        if not opened:
            yield from t.spaces()
            opened = (yield from t.gets(think.open)) is not None
        if opened:
            t.forget()
            yield from reasoning(t, Stops(think.close))
        t.settle()
    offered = {tool.name for tool in tools.tools} if tools.choice != "none" else set[str]()
    if not offered:
        yield from t.upto(Stops(), t.speak)
        return
    while True:
        t.hold()
        yield from t.spaces()
        yield from t.gets(TAG)
        yield from t.spaces()
        before = t.calls
        char = yield from t.next()
        if char == "{":
            yield from read_call(t, known=offered.__contains__)
        elif char == "[":
            yield from _listed(t, offered)
        t.settle()
        if t.calls == before:
            break
        t.hold()
        yield from t.spaces()
        if (yield from t.gets(";", ",")) is None and (yield from t.next()) != "{":
            t.forget()
            break
    # A call may follow text only where it is marked.
    while (yield from t.upto(Stops(TAG), t.say)) is not None:
        t.hold(TAG)
        yield from t.spaces()
        if (yield from t.next()) == "{":
            yield from read_call(t, known=offered.__contains__)
        t.settle()


def _listed(t: Text, offered: set[str]) -> Read[None]:
    """[f(a=1), g()] or a list of objects."""
    t.take(1)
    yield from t.spaces()
    before = t.calls
    while True:
        if (yield from t.next()) == "{":
            whole = yield from read_call(t, known=offered.__contains__)
        else:
            whole = yield from pythonic.read_call(t, offered.__contains__)
        if not whole:
            return
        t.hold()
        yield from t.spaces()
        if not (yield from t.gets(",")):
            break
        yield from t.spaces()
    if t.calls > before and (yield from t.gets("]")):
        t.forget()
