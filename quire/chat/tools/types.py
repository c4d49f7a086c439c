"""The parts of an answer (text, reasoning, tool calls), and the interface of a format that tells them apart. Names no format.

A `Format` is how one family of models writes reasoning and tool calls; `detect.py` chooses it from the chat template. For
each request it makes a `Reading`, and a Reading makes one `Parser` for every choice. A parser is pure: text in, pieces
out, the same pieces however the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.engine.types import Constraint

# A template with none of these in its source has neither reasoning nor calls, so detection is skipped.
SIGNS = ("think", "THINK", "reasoning", "tool", "channel", "functions")
TEXT = "input"  # the one argument of a tool that takes a text


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None  # a JSON schema; None: the function takes no arguments
    strict: bool = False  # arguments must validate, even where the model chooses to call by itself
    grammar: Constraint | None = (
        None  # of a tool whose one argument is a text (TEXT): what the text must be, in lark or regex
    )


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request, and its choice among them."""

    tools: Sequence[Tool] = ()
    choice: str = "auto"  # none, auto, required, or named
    name: str | None = None  # the tool that must be called, when the choice is named
    parallel: bool = True  # more than one call in an answer

    @property
    def forced(self) -> bool:
        """Whether an answer must have a call."""
        return self.choice in ("required", "named")


@dataclass(frozen=True, slots=True)
class CallPart:
    """News of one tool call. The first part of a call has its id and name; arguments of all parts, joined, are JSON."""

    index: int  # which call of the choice, from 0
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a stretch of text, in this order: reasoning, then text, then calls."""

    reasoning: str = ""
    text: str = ""
    calls: list[CallPart] = field(default_factory=list)


class Parser(Protocol):
    """Reads one answer as it comes."""

    def feed(self, text: str) -> list[Pieces]:
        """Take text in; give what is certain."""
        ...

    def finish(self) -> list[Pieces]:
        """The answer ended: give what was held back. What looked like a call and is none comes as text."""
        ...


class Reading(Protocol):
    """A format, ready for the choices of one request."""

    def parser(self) -> Parser:
        """A parser for one choice."""
        ...


class Format(Protocol):
    """The way in which a family of models writes reasoning and tool calls."""

    @property
    def name(self) -> str: ...

    @property
    def reasons(self) -> bool:
        """Whether the format has reasoning."""
        ...

    @property
    def calls(self) -> bool:
        """Whether the format has tool calls."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the parser must see; all others are skipped as ever."""
        ...

    def reading(self, tail: str, tools: Tools) -> Reading:
        """`tail` is how the prompt ended, special tokens written out: it may have opened the reasoning already."""
        ...

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        """A grammar for the whole answer, its reasoning included: calls where they are forced or strict, and `answer` (what
        the text must be, if anything) after the reasoning. None: nothing to enforce."""
        ...
