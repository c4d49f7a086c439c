"""A call written as a JSON object, {"name": …, "arguments": {…}}, read as it comes.

The name is told as soon as it is known, and the arguments as they are written. Keys may come in any order and under other
names; other keys are ignored. Before the name is known, what is wrong is the caller's to give back as text; afterwards
the call stands, and arguments that are no JSON are handed on as the model wrote them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.chat.tools.lark import Lark, any_of
from quire.chat.tools.marked import arguments
from quire.chat.tools.probe import RenderedTurns, last_mark
from quire.chat.tools.reader import Read, Stops, Text, new_id
from quire.chat.tools.types import Tool, Tools

NOTHING = Stops()
FENCE = Stops("```")


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of the parts of a call."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: tuple[str, ...] = ()  # the model's own id; only one before the arguments can be used


KEYS = Keys()


def read_call(
    t: Text,
    end: Stops = NOTHING,
    keys: Keys = KEYS,
    known: Callable[[str], bool] = bool,
    make_id: Callable[[], str] | None = None,
    whole: bool = False,
) -> Read[bool]:
    """Read one object. False: it is no call, or its arguments are no JSON; those go on until `end`, which is not taken.

    `whole`: without arguments it is none."""
    if not (yield from t.gets("{")):
        return False
    name: str | None = None
    id: str | None = None
    early: list[str] | None = None  # arguments that came before the name
    argued = False
    first = True
    while True:
        yield from t.spaces()
        if (yield from t.gets("}")):
            break
        if not first:
            if not (yield from t.gets(",")):
                return (yield from _broken(t, end, argued))
            yield from t.spaces()
        first = False
        key = yield from t.json_string()
        yield from t.spaces()
        if key is None or not (yield from t.gets(":")):
            return (yield from _broken(t, end, argued))
        yield from t.spaces()
        if key in keys.name and name is None:
            name = yield from t.json_string()
            if name is None or not known(name):
                return False
            if early is not None:
                t.begin(name, id or _made(make_id))
                t.argue(_object("".join(early)))
                argued = True
        elif key in keys.arguments and name is not None and not argued:
            t.begin(name, id or _made(make_id))
            argued = True
            if not (yield from _arguments(t)):
                return (yield from _broken(t, end, argued))
        elif key in keys.arguments and not argued and early is None:
            early = []
            if not (yield from t.json(early.append)):
                return False
        else:
            value: list[str] = []
            if not (yield from t.json(value.append)):
                return (yield from _broken(t, end, argued))
            if key in keys.id and id is None:
                id = _text("".join(value))
    if name is None or (whole and not argued):
        return False
    if not argued:
        t.begin(name, id or _made(make_id))
        t.argue("{}")
    return True


def _arguments(t: Text) -> Read[bool]:
    """The value of `arguments`: an object, passed on as it comes; a text that holds one; or nothing."""
    first = yield from t.next()
    if first not in '"n' or not first:
        return (yield from t.json(t.argue))
    value: list[str] = []
    whole = yield from t.json(value.append)
    t.argue(_object("".join(value)) if whole else "".join(value))
    return whole


def _object(written: str) -> str:
    """Arguments that came whole: "…" with an object in it, or null, are meant as that."""
    try:
        value = json.loads(written)
        if value is None:
            return "{}"
        if isinstance(value, str) and isinstance(json.loads(value), dict):
            return value
    except (ValueError, RecursionError):
        pass
    return written


def _broken(t: Text, end: Stops, argued: bool) -> Read[bool]:
    """The rest of a call whose arguments went out already: they go on as they were written."""
    if argued:
        yield from rest_as_arguments(t, end)
    return False


def rest_as_arguments(t: Text, end: Stops) -> Read[None]:
    """Hand on what is no JSON up to the end of the call, which is left where it is."""
    yield from t.upto(end, t.argue, take=False)


def _made(make: Callable[[], str] | None) -> str | None:
    return None if make is None else make()


def _text(written: str) -> str | None:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) and 0 < len(value) <= 256 else None


@dataclass(frozen=True, slots=True)
class ObjectSection:
    """Calls as JSON objects after a mark: one, several in a row, or a list of them. What it writes is the template's way."""

    openers: tuple[str, ...]
    closer: str = ""
    first: str = ""  # between the opener and the first object
    between: str = "\n"
    last: str = ""  # after the last object
    head: str = '{"name": "'  # \0 stands for an id
    middle: str = '", "arguments": '
    tail: str = "}"
    keys: Keys = KEYS
    make_id: Callable[[], str] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.openers, *((self.closer,) if self.closer else ()))

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        end = Stops(self.closer)
        before = t.calls
        yield from t.spaces()
        listed = yield from t.gets("[")
        while True:
            yield from t.spaces()
            if not (yield from read_call(t, end, self.keys, make_id=self.make_id)):
                break
            t.hold()
            yield from t.spaces()
            yield from t.gets(",")
            yield from t.spaces()
            if (yield from t.next()) != "{":
                break
            t.hold()
        if t.calls > before and not t.holds("{"):
            if listed:
                yield from t.gets("]")
                yield from t.spaces()
            if self.closer:
                yield from t.gets(self.closer)
            t.forget()

    def bare(self, t: Text, tools: Tools) -> Read[None]:
        """Small models forget the mark and write the object alone, or in a fence. It is a call if it begins the answer and
        names a tool of the request."""
        offered = {tool.name for tool in tools.tools}
        if not tools.parallel or any(tool.strict for tool in tools.tools):
            return  # then a grammar rules over calls, and only those behind a mark
        yield from t.spaces()
        fenced = yield from t.gets("```json", "```")
        yield from t.spaces()
        if (yield from t.next()) != "{":
            return
        if (yield from read_call(t, FENCE, self.keys, offered.__contains__, self.make_id, whole=True)):
            yield from t.spaces()
            if fenced:
                yield from t.gets("```")
                yield from t.spaces()

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        def one(tool: Tool, counts: bool) -> str:
            before = (self.head + json.dumps(tool.name)[1:-1] + self.middle).split("\0")
            head = " /[0-9a-zA-Z]{1,16}/ ".join(g.text(part) for part in before)
            return f"{head} {arguments(g, tool, counts)} {g.text(self.tail)}"

        call = g.rule(any_of([one(tool, counts) for tool, counts in tools]))
        more = f"({g.text(self.between)} {call})*" if many else ""
        return " ".join([g.text(self.first), call, more, g.text(self.last)])


def derive(seen: RenderedTurns) -> ObjectSection | None:
    """The section as the template writes it, if it writes calls as objects after a mark."""
    text = seen.two or seen.one
    one = _found(text, seen.names[0], 0)
    two = _found(text, seen.names[1], one.end()) if one is not None and seen.two else one
    if one is None or two is None:
        return None
    before, between, after = text[: one.start()], text[one.end() : two.start()], text[two.end() :]
    if two is one:  # it writes one call at a time: another would be another section
        between = after + before
    opener = last_mark(before.rstrip().rstrip("[").rstrip())
    if not opener:
        return None
    first = before[before.rindex(opener) + len(opener) :]
    closer = between[: between.index(opener)] if opener in between else after
    head = one[0][: one.start("name") - one.start()]
    return ObjectSection(
        openers=(opener,),
        closer=closer.strip().removeprefix("]").strip(),
        first=first,
        between=between,
        last=after.rstrip(),
        head=_ID.sub(r"\1" + "\0" + r"\2", head),
        middle=one[0][one.end("name") - one.start() : one.start("args") - one.start()],
        tail=one[0][one.end("args") - one.start() :],
        keys=Keys(name=(one["key"],), arguments=(one["args_key"],), id=("id",)),
        make_id=short_id if opener == "[TOOL_CALLS]" else None,
    )


def short_id() -> str:
    """Mistral's templates take no other than nine letters and digits."""
    return new_id(9, "")


_ID = re.compile(r'("(?:tool_call_)?id"\s*:\s*")[^"]*(")')


def _found(text: str, name: str, start: int) -> re.Match[str] | None:
    """The object of a call in what was written."""
    pattern = (
        r'\{[^{}]*?"(?P<key>\w+)"\s*:\s*"(?P<name>' + re.escape(name) + r')"[^{}]*?'
        r'"(?P<args_key>\w+)"\s*:\s*(?P<args>\{[^{}]*\}|"\{(?:[^"\\]|\\.)*\}")[^{}]*?\}'
    )
    return re.compile(pattern).search(text, start)
