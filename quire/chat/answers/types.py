"""What a model's answers are made of, and how a format of them is described. Names no format.

A `Format` is how one family of models writes reasoning and tool calls; `find.py` chooses it from the chat template. For
each request it makes a `Reading`, and a Reading makes one `Parser` for every choice. A parser is pure: text in, pieces
out, the same pieces however the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.chat.types import Parser, Pieces, Reading
from quire.engine.types import Constraint

__all__ = ["Format", "Parser", "Pieces", "Reading", "Tool", "Tools"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None  # a JSON schema; None: the function takes no arguments
    strict: bool = False  # arguments must validate, even where the model chooses to call by itself


@dataclass(frozen=True, slots=True)
class Tools:
    """What one request says about tools."""

    tools: Sequence[Tool] = ()
    choice: str = "auto"  # none, auto, required, or named
    name: str | None = None  # the tool that must be called, when the choice is named
    parallel: bool = True  # more than one call in an answer

    @property
    def forced(self) -> bool:
        """Whether an answer without a call is not one."""
        return self.choice in ("required", "named")


class Format(Protocol):
    """How one family of models writes what is not plain text."""

    @property
    def name(self) -> str: ...

    @property
    def reasons(self) -> bool:
        """Whether there is reasoning to be found."""
        ...

    @property
    def calls(self) -> bool:
        """Whether there are tool calls."""
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
