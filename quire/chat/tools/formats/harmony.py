"""gpt-oss: harmony. Channels analysis (reasoning), commentary (calls, and words before them) and final (the answer).

The model goes on after `<|start|>assistant`. A call is a message to `functions.NAME`, said before or after the channel; it
is the last of its answer, so there is one at a time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.chat.tools import channels
from quire.chat.tools.lark import Cut, Lark, any_of
from quire.chat.tools.marked import MarkedReading, arguments
from quire.chat.tools.objects import rest_as_arguments
from quire.chat.tools.probe import RenderedTurns
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tools
from quire.engine.types import Constraint

NAME = "harmony"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ENDS = (END, "<|return|>", "<|call|>")
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def found(seen: RenderedTurns, cut: Cut) -> Harmony | None:
    writes = CHANNEL in seen.one and MESSAGE in seen.one and "to=functions." in seen.one
    return Harmony(cut) if writes or (CHANNEL + "analysis" + MESSAGE in seen.source) else None


@dataclass(frozen=True, slots=True)
class Harmony:
    """The format."""

    cut: Cut
    name: str = NAME
    reasons: bool = True
    calls: bool = True
    markers: tuple[str, ...] = (START, CHANNEL, MESSAGE, *ENDS, "<|constrain|>")

    def reading(self, tail: str, tools: Tools) -> MarkedReading:
        opened = self._opened(tail)
        return MarkedReading(lambda t: channels.read(t, ENVELOPE, tools, opened))

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        offered = bool(tools.tools) and tools.choice != "none"
        calls = offered and (tools.forced or any(tool.strict for tool in tools.tools) or answer is not None)
        if not calls and answer is None:
            return None  # one call at a time is all there is
        if self._opened(tail) is not None:
            return answer
        g = Lark(self.cut)
        analysis = f"{g.text(CHANNEL + 'analysis' + MESSAGE)} {g.any()} {g.text(END + START + 'assistant')}"
        options: list[str] = []
        if calls:
            for tool in tools.tools:
                if tools.choice != "named" or tool.name == tools.name:
                    head = g.text(f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}")
                    early = g.text(f" to=functions.{tool.name}{CHANNEL}commentary json{MESSAGE}")
                    options.append(f"({head} | {early}) {arguments(g, tool, tools.forced or tool.strict)}")
        if not tools.forced or not calls:
            final = g.part(answer) if answer is not None else g.any()
            options.append(f"{g.text(CHANNEL + 'final' + MESSAGE)} {final}")
        return g.build(f"({analysis})? {any_of(options)}", "tools" if calls else answer.param if answer else "tools")

    def _opened(self, tail: str) -> str | None:
        turn = tail.rpartition(START + "assistant")[2] if START + "assistant" in tail else ""
        return turn.partition(MESSAGE)[0] if MESSAGE in turn and not any(end in turn for end in ENDS) else None


def _address(header: str) -> tuple[str, str]:
    to, channel = _TO.search(header), _CHANNEL.search(header)
    where = channel[1] if channel is not None else "final"
    if to is not None and to[1].startswith("functions."):
        return channels.CALL, to[1].removeprefix("functions.")
    return (channels.REASONING if where == "analysis" else channels.TEXT), ""


def _body(t: Text, name: str, tools: Tools, ends: Stops) -> Read[bool]:
    yield from t.spaces()
    if (yield from t.next()) != "{":
        return False
    t.begin(name)
    if not (yield from t.json(t.argue)):
        yield from rest_as_arguments(t, ends)
    yield from t.spaces()
    return True


ENVELOPE = channels.Envelope(START, MESSAGE, ENDS, _address, _body)
