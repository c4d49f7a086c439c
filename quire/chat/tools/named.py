"""Calls with the name in front and the arguments as JSON after it: mark NAME mark {…} mark.

DeepSeek, Mistral, functionary and others write so. The arguments are passed on as they come. What it demands in a grammar
is what the template writes; what it reads is that with any spaces between.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.chat.tools.lark import Lark, any_of
from quire.chat.tools.marked import arguments
from quire.chat.tools.objects import rest_as_arguments, short_id
from quire.chat.tools.probe import IDS, RenderedTurns, common_prefix, common_suffix, from_mark
from quire.chat.tools.reader import Read, Stops, Text
from quire.chat.tools.types import Tool, Tools

NAME = re.compile(r"[\w.\-:/]{1,256}")


@dataclass(frozen=True, slots=True)
class NamedSection:
    """Calls as a name and its arguments."""

    begin: str  # before the first call; may be empty
    call: str  # before a name
    middle: str  # between the name and the arguments
    close: str  # after the arguments
    between: str  # between the close of one call and the next call's `call`
    end: str  # after the close of the last call
    make_id: Callable[[], str] | None = None
    id: str = "/[0-9a-zA-Z_-]{1,32}/"  # what an id looks like, where `call` or `middle` has a place for one (\0)

    @property
    def openers(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.begin.strip(), self.call.split("\0")[0].strip()) if mark)

    @property
    def markers(self) -> tuple[str, ...]:
        texts = (self.begin, self.call, self.middle, self.close, self.end)
        return tuple(dict.fromkeys(mark for text in texts for mark in marks(text)))

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        call, _, before_name = (part.strip() for part in self.call.partition("\0"))
        close, end = self.close.strip(), self.end.strip()
        if opener != call:
            yield from t.spaces()
            if not (yield from t.gets(call)):
                return
        first, _, last = (part.strip() for part in self.middle.partition("\0"))
        middle = Stops(first or self.middle[:1] or "{", last)
        over = Stops(*(mark for mark in (close, end, call) if mark))
        while True:
            id: str | None = None
            if before_name:
                id, stop = yield from t.short(Stops(before_name))
                if stop is None:
                    return
            name, stop = yield from t.short(middle)
            name = name.strip()
            if stop is None or not NAME.fullmatch(name):
                return
            if last and stop != last:
                id, stop = yield from t.short(Stops(last))
                if stop is None:
                    return
            yield from t.spaces()
            if (yield from t.next()) != "{":
                return
            t.begin(name, (id or "").strip() or (None if self.make_id is None else self.make_id()))
            if not (yield from t.json(t.argue)):
                yield from rest_as_arguments(t, over)
            yield from t.spaces()
            if close:
                yield from t.gets(close)
                yield from t.spaces()
            if not (yield from t.gets(call)):
                break
            t.hold(call)
        if end:
            yield from t.gets(end)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        def one(tool: Tool, counts: bool) -> str:
            return f"{spaced(tool.name + self.middle)} {arguments(g, tool, counts)} {g.text(self.close)}"

        def spaced(text: str) -> str:
            return f" {self.id} ".join(g.text(part) for part in text.split("\0"))

        call = g.rule(any_of([one(tool, counts) for tool, counts in tools]))
        first = f"{self.begin}{self.call}".lstrip()[len(self.openers[0]) :]
        more = f"({spaced(self.between + self.call)} {call})*" if many else ""
        return " ".join([spaced(first), call, more, g.text(self.end.rstrip())])


def marks(text: str) -> list[str]:
    """The parts of a text that may be control tokens."""
    return re.findall(r"<[^<>\s]{1,60}>|\[[A-Z_]{2,30}\]", text)


def derive(seen: RenderedTurns) -> NamedSection | None:
    """The section as the template writes it, if it writes a name and then JSON."""
    text, found = seen.two, []
    for id in IDS:
        text = text.replace(id, "\0")
    at = 0
    for name in seen.names:
        start = text.find(name, at)
        args = re.compile(r"\{[^{}]*" + re.escape(seen.keys[0]) + r"[^{}]*\}").search(text, max(start, 0))
        if start < 0 or args is None:
            return None
        found.append((start, start + len(name), args.start(), args.end()))
        at = args.end()
    (s1, e1, a1, z1), (s2, e2, a2, z2) = found
    before, middle, gap, after = text[:s1], text[e1:a1], text[z1:s2], text[z2:]
    if middle != text[e2:a2] or '"' in middle:
        return None
    call = from_mark(common_suffix(before, gap))
    if not call.strip():
        return None
    close = common_prefix(gap[: len(gap) - len(call)], after)
    return NamedSection(
        begin=before[: len(before) - len(call)].lstrip(),
        call=call,
        middle=middle,
        close=close,
        between=gap[len(close) : len(gap) - len(call)],
        end=after[len(close) :].rstrip(),
        make_id=short_id if "[TOOL_CALLS]" in call else None,
        id="/[0-9a-zA-Z]{9}/" if "[TOOL_CALLS]" in call else "/[0-9a-zA-Z_-]{1,32}/",
    )
