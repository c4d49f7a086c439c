"""Answers of the common shape: reasoning between two marks, then text, and calls that a mark begins.

    [open reasoning close] text {opener call … closer} text …

A format gives the marks (`Think`) and how its calls are read and written (`Section`); this file owns the order of these parts,
which is the same for all such formats. Spaces between the parts belong to none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from quire.chat.tools.lark import SPACE, Cut, Lark, any_of, lark_regex
from quire.chat.tools.reader import Read, Reader, Stops, Text
from quire.chat.tools.types import TEXT, Parser, Tool, Tools
from quire.engine.constraints.closed import closed
from quire.engine.constraints.escaped import pattern_of
from quire.engine.constraints.schemas import ANNOTATIONS
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DEFINED = ("$defs", "definitions")
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Think:
    """The marks around reasoning."""

    open: str
    close: str
    implied: tuple[str, ...] = ()  # openers of calls that end reasoning too, where nobody writes them by chance

    def opened(self, tail: str, header: str) -> bool:
        """Whether the prompt ends inside reasoning. Only what follows the header of the answer counts, if it is there."""
        start = tail.rfind(header) if header else -1
        if start < 0:
            return tail.rstrip().endswith(self.open.rstrip())
        turn = tail[start + len(header) :]
        return turn.rfind(self.open.rstrip()) > turn.rfind(self.close.strip())


class Section(Protocol):
    """The part of an answer in which a format writes calls."""

    @property
    def openers(self) -> tuple[str, ...]:
        """The texts that begin calls. The first is what a grammar demands."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Every mark that may be a control token."""
        ...

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        """Read on after an opener. What is held when it returns without a call becomes text."""
        ...

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        """A grammar of what follows the opener: one call, or one and more. The bool: this tool's schema counts."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """A Format of this shape."""

    name: str
    think: Think | None
    section: Section | None
    cut: Cut  # the tokenizer's
    header: str = ""  # what begins the answer, before any reasoning
    wrap: tuple[str, ...] = ()  # marks around the text, which are not part of it
    more: tuple[str, ...] = ()  # further special tokens that must be seen
    always: bool = False  # calls are held to a grammar from their mark on, even where nothing demands it

    @property
    def reasons(self) -> bool:
        return self.think is not None

    @property
    def calls(self) -> bool:
        return self.section is not None

    @property
    def markers(self) -> tuple[str, ...]:
        marks = (self.think.open.strip(), self.think.close.strip()) if self.think else ()
        return (*marks, *(self.section.markers if self.section else ()), *self.wrap, *self.more)

    def reading(self, tail: str, tools: Tools) -> MarkedReading:
        opened = self.think is not None and self.think.opened(tail, self.header)
        return MarkedReading(lambda t: answer(t, self.think, self.section, opened, tools, self.wrap))

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        offered = bool(tools.tools) and tools.choice != "none"
        strict = any(tool.strict for tool in tools.tools)
        calls = offered and (self.always or tools.forced or strict or not tools.parallel or answer is not None)
        if not calls and (answer is None or self.think is None):
            return answer
        g = Lark(self.cut)
        start: list[str] = []
        if self.think is not None:
            rest = f"{g.until(self.think.close.strip())} {SPACE}"
            if self.think.opened(tail, self.header):
                start.append(rest)
            else:
                none = g.text(self.think.close.strip())  # some say that there is no reasoning by ending it
                start.append(f"({g.text(self.think.open.strip())} {rest} | {none} {SPACE})?")
        if self.think is not None or tools.forced:
            start.insert(0, SPACE)  # some begin with a line end
        if calls:
            start.append(self._calls(g, tools, answer))
        elif answer is not None:
            start.append(self._wrapped(g, g.part(answer)))
        return g.build(" ".join(start), "tools" if calls else answer.param if answer is not None else "tools")

    def _calls(self, g: Lark, tools: Tools, answer: Constraint | None) -> str:
        section = self.section
        if section is None:
            raise BadRequest("this model's template writes no tool calls", param="tools")
        chosen = [
            (tool, tools.forced or tool.strict)
            for tool in tools.tools
            if tools.choice != "named" or tool.name == tools.name
        ]
        if not chosen:
            raise BadRequest(f"tool_choice names {tools.name!r}, which is not among the tools", param="tool_choice")
        opener = section.openers[0]
        # Where text may follow a call, a further call is a section of its own: a list of them would have to go on with another.
        alone = self.always and not tools.forced and answer is None
        rest = g.rule(section.write(g, chosen, tools.parallel and tools.choice != "named" and not alone))
        if tools.forced:
            return self._wrapped(g, f"{g.text(opener)} {rest}")
        if answer is not None:
            return any_of([self._wrapped(g, f"{g.text(opener)} {rest}"), self._wrapped(g, g.part(answer))])
        text = self._wrapped(g, g.free(*section.openers, *self.wrap))
        before = f"({self._wrapped(g, g.free(*section.openers, *self.wrap))})?" if self.wrap else ""
        one = f"{before} {g.until(opener)} {rest}"
        return f"({one})* {text}" if tools.parallel else any_of([f"{one} {SPACE}", text])

    def _wrapped(self, g: Lark, text: str) -> str:
        """A rule for what may stand between the marks around a text."""
        if not self.wrap:
            return text
        marks = g.rule(" | ".join(g.text(mark) for mark in self.wrap))
        return f"{marks}* {text} {marks}*"


@dataclass(frozen=True, slots=True)
class MarkedReading:
    """A Reading from a reading generator."""

    body: Callable[[Text], Read[None]]

    def parser(self) -> Parser:
        return Reader(self.body)


def answer(
    t: Text, think: Think | None, section: Section | None, opened: bool, tools: Tools, wrap: tuple[str, ...] = ()
) -> Read[None]:
    """Read one answer."""
    calling = section if tools.tools and tools.choice != "none" else None
    openers = calling.openers if calling is not None else ()
    pending: str | None = None
    if think is not None:
        if not opened:
            t.hold()
            yield from t.spaces()
            mark = yield from t.gets(think.open.strip(), think.close.strip())
            opened = mark == think.open.strip()
            if mark is None:
                t.settle()
            else:  # some models say that there is no reasoning by ending it
                t.forget()
                yield from t.spaces()
        if opened:
            implied = tuple(o for o in think.implied if o in openers)
            stop = yield from reasoning(t, Stops(think.close.strip(), *implied))
            pending = stop if stop in implied else None
    bare = getattr(calling, "bare", None)  # a section may know a call that no mark begins
    if bare is not None and pending is None:
        t.hold()
        yield from bare(t, tools)
        t.settle()
    yield from text_and_calls(t, calling, openers, tools, pending, wrap)


def reasoning(t: Text, stops: Stops) -> Read[str | None]:
    """Reasoning up to its end, without the spaces around it."""
    yield from t.spaces()
    held: list[str] = []

    def sink(text: str) -> None:
        kept = text.rstrip()
        if kept:
            t.reason("".join(held) + kept)
            held.clear()
        if len(kept) < len(text):
            held.append(text[len(kept) :])

    stop = yield from t.upto(stops, sink)
    yield from t.spaces()
    return stop


def text_and_calls(
    t: Text,
    section: Section | None,
    openers: tuple[str, ...],
    tools: Tools,
    pending: str | None = None,
    wrap: tuple[str, ...] = (),
) -> Read[None]:
    """Text with calls in it, to the end of the answer. `pending` is an opener that was taken already."""
    stops = Stops(*openers, *wrap)
    while True:
        stop = pending or (yield from t.upto(stops, t.say if openers else t.speak))
        pending = None
        if stop in wrap:
            continue
        if stop is None or section is None:
            return
        t.hold(stop)
        before = t.calls
        yield from section.read(t, stop, tools)
        t.settle()
        if t.calls > before:
            yield from t.spaces()


def arguments(g: Lark, tool: Tool, counts: bool, where: str = "tools") -> str:
    """The grammar of a tool's arguments as JSON."""
    if counts and tool.grammar is not None:
        return f"{g.text(_dumps({TEXT: 0})[:-2])} {json_text(g, tool.grammar)} {g.text('}')}"
    return g.part(Constraint(kind="json_schema", text=_dumps(schema_of(tool, counts)), param=f"{where}: {tool.name}"))


def json_text(g: Lark, grammar: Constraint) -> str:
    """A JSON string whose text a grammar describes."""
    if grammar.kind == "regex":
        schema = {"type": "string", "pattern": f"^(?:{grammar.text})$"}
        return g.part(Constraint(kind="json_schema", text=_dumps(schema), param=grammar.param))
    return f"{g.text(chr(34))} {g.part(Constraint(kind='escaped_lark', text=grammar.text, param=grammar.param))} {g.text(chr(34))}"


def bare_text(g: Lark, tool: Tool, mark: str, before: str = "") -> str:
    """A text as it is, up to a mark, and the mark; `before` stands between the two. A reader takes the first mark for the end, so none
    may stand in what a tool's grammar describes."""
    if tool.grammar is None:
        return g.until(mark)
    grammar = tool.grammar
    control = not isinstance(g.cut(mark)[0], str)
    try:
        pattern = _of_one_line(grammar.text) if grammar.kind == "regex" else pattern_of(grammar.text)
    except ValueError as error:
        if not control:
            raise BadRequest(f"{grammar.param}: {error}", param=grammar.param, code="unsupported_constraint") from None
        pattern = None
    if control:
        return f"{g.part(grammar)} {g.text(before + mark)}"
    if pattern is None:
        raise BadRequest(
            f"{grammar.param}: a rule that names itself cannot be enforced in the way this model writes calls",
            param=grammar.param,
            code="unsupported_constraint",
        )
    return g.first(lark_regex(pattern), before, mark)


def _of_one_line(pattern: str) -> str:
    """A pattern without the anchors around it, which it has anyhow."""
    whole = pattern.removeprefix("^")
    whole = whole[:-1] if whole.endswith("$") and not whole.endswith("\\$") else whole
    return f"(?:{whole})".replace("\n", "\\n")


def schema_of(tool: Tool, counts: bool) -> dict[str, Any]:
    """The schema that the arguments must satisfy."""
    if not counts:
        return ANY_ARGUMENTS
    if tool.parameters is None:
        return NO_ARGUMENTS
    if tool.parameters.get("type", "object") != "object":
        raise BadRequest(f"tools: the parameters of {tool.name} are not an object", param="tools")
    return closed({**tool.parameters, "type": "object"})


_OF_THE_WHOLE = frozenset({"type", "properties", "required", "additionalProperties", *ANNOTATIONS, "$schema", *DEFINED})


def listed(tool: Tool) -> list[tuple[str, Any, bool]]:
    """A tool's arguments for a format that writes them one by one: name, schema, and whether it must be there.

    What such a format cannot hold to, a keyword about all of them together, is refused by its name.
    """
    schema = schema_of(tool, True)
    named = schema.get("properties") or {}
    required = schema.get("required") or []
    unable = sorted(set(schema) - _OF_THE_WHOLE)
    if unable or not isinstance(named, dict) or not set(required) <= set(named):
        word = unable[0] if unable else "required"
        raise BadRequest(
            f"tools: the keyword {word} of {tool.name}'s parameters cannot be enforced in the way this model writes calls",
            param="tools",
        )
    defined = {word: schema[word] for word in DEFINED if word in schema}
    return [
        (key, {**inner, **defined} if isinstance(inner, dict) and defined else inner, key in required)
        for key, inner in named.items()
    ]


def _dumps(value: Any) -> str:
    import json

    return json.dumps(value)
