"""functionary 3.2: >>>recipient, a line end, and what is for them: `all` gets text, a tool gets its arguments as JSON.

The prompt ends with the first >>>. Three such signs in a text mean nothing unless a recipient of the request follows.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import MarkedReading, arguments
from quire.chat.tools.objects import rest_as_arguments
from quire.chat.tools.probe import NAMES, RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tools
from quire.engine.types import Constraint

NAME = "functionary-v3.2"
SIGN = ">>>"
NEWLINE = '"\\n"'


def found(seen: RenderedTurns, cut: Cut) -> Functionary | None:
    return Functionary(cut) if seen.one.strip().removeprefix(SIGN).startswith(NAMES[0] + "\n{") else None


@dataclass(frozen=True, slots=True)
class Functionary:
    """The format."""

    cut: Cut
    name: str = NAME
    reasons: bool = False
    calls: bool = True
    markers: tuple[str, ...] = ()

    def reading(self, tail: str, tools: Tools) -> MarkedReading:
        begun = tail.rstrip().endswith(SIGN)
        return MarkedReading(lambda t: _answer(t, begun, tools))

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        offered = bool(tools.tools) and tools.choice != "none"
        strict = any(tool.strict for tool in tools.tools)
        calls = offered and (tools.forced or strict or not tools.parallel or answer is not None)
        if not calls and answer is None:
            return None
        g = Lark(self.cut)
        first = "" if tail.rstrip().endswith(SIGN) else g.text(SIGN)
        options: list[str] = []
        if calls:
            each = [
                f"{g.text(tool.name)} {NEWLINE} {arguments(g, tool, tools.forced or tool.strict)}"
                for tool in tools.tools
                if tools.choice != "named" or tool.name == tools.name
            ]
            call = g.rule(any_of(each))
            many = tools.parallel and tools.choice != "named"
            options.append(f"{call} ({g.text(SIGN)} {call})*" if many else call)
        if not (calls and tools.forced):
            text = g.part(answer) if answer is not None else g.free(SIGN)
            options.append(f"{g.text('all')} {NEWLINE} {text}")
            if answer is None and calls:
                options.append(f"{g.text('all')} {NEWLINE} {g.until(SIGN)} {options[0]}")
        return g.build(f"{first} {any_of(options)}", "tools" if calls or answer is None else answer.param)


def _answer(t: Text, begun: bool, tools: Tools) -> Read[None]:
    names = [tool.name for tool in tools.tools] if tools.choice != "none" else []
    heads = {f"{name}\n": name for name in [*names, "all"]}
    marks = {SIGN + head: name for head, name in heads.items()}
    stops = Stops(*marks)
    to: str | None = None
    if begun:
        t.hold()
        head = yield from t.gets(*heads, *marks)
        to = heads.get(head or "") or marks.get(head or "")
        if to is None:
            t.settle()
    while True:
        if to is not None and to in names:
            yield from t.spaces()
            if (yield from t.next()) == "{":
                t.begin(to)
                if not (yield from t.json(t.argue)):
                    yield from rest_as_arguments(t, stops)
                yield from t.spaces()
            t.settle()
        t.forget()
        mark = yield from t.upto(stops, t.say)
        if mark is None:
            return
        to = marks[mark]
        t.hold(mark)
