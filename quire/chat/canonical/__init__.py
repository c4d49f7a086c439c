"""Canonicalizers: rewrite what a client changes from request to request and the model has no use for, so that prompts begin alike.

A canonicalizer is a file of this folder, and its name is how people ask for it. It has

    HELP                            a line for people
    AUTO                            whether `auto` means it: what it rewrites carries no meaning for the answer
    rewrite(turns, tools, told)     the turns and tools of a conversation, rewritten; `told` gets a line for each change, with its place

None runs unless it was asked for, since each changes the prompt. They work on what every dialect makes of a request, before the template renders it, and
never change what they are given.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any, Protocol

from quire.chat.tools.types import Tools
from quire.observe.errors import BadRequest

Turns = list[dict[str, Any]]
MAX_TOLD = 32  # lines


class Canonicalizer(Protocol):
    """What a file of this folder has."""

    HELP: str
    AUTO: bool

    def rewrite(self, turns: Turns, tools: Tools, told: list[str]) -> tuple[Turns, Tools]: ...


@functools.cache
def available() -> dict[str, Canonicalizer]:
    """Every canonicalizer by its name, in the order in which they run."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return {name: _load(name) for name in names}


def _load(name: str) -> Canonicalizer:
    module: Any = importlib.import_module(f"{__name__}.{name}")
    return module


def names(text: str, where: str) -> tuple[str, ...]:
    """The canonicalizers that a list of names with commas between them means: `auto` is all that change no meaning, `none` is none."""
    known = available()
    found: set[str] = set()
    for word in text.split(","):
        name = word.strip().lower()
        if name == "auto":
            found |= {each for each, made in known.items() if made.AUTO}
        elif name in known:
            found.add(name)
        elif name not in ("", "none"):
            raise BadRequest(
                f"{where} names {name[:64]!r}, which rewrites nothing here",
                cure=f"choose among auto, none, {', '.join(known)}",
                code="unknown_canonicalizer",
            )
    return tuple(name for name in known if name in found)


def rewrite(turns: Turns, tools: Tools, wanted: tuple[str, ...]) -> tuple[Turns, Tools, tuple[str, ...]]:
    """The conversation as these canonicalizers leave it, and what each of them changed, and where."""
    lines: list[str] = []
    for name in wanted:
        told: list[str] = []
        turns, tools = available()[name].rewrite(turns, tools, told)
        lines += [f"{name}: {line}" for line in told]
    if len(lines) > MAX_TOLD:
        lines = [*lines[: MAX_TOLD - 1], f"and {len(lines) - MAX_TOLD + 1} more changes"]
    return turns, tools, tuple(lines)


def system_turns(turns: Turns) -> list[tuple[int, str]]:
    """The places and texts of system prompts."""
    return [
        (i, turn["content"])
        for i, turn in enumerate(turns)
        if turn["role"] in ("system", "developer") and isinstance(turn.get("content"), str)
    ]


def with_text(turns: Turns, i: int, text: str) -> Turns:
    """The turns with another text at one place."""
    return [*turns[:i], turns[i] | {"content": text}, *turns[i + 1 :]]


def moved(turns: Turns, i: int, kept: str, text: str) -> tuple[Turns, str]:
    """The turns with a system prompt that says only what is `kept` of it, and the rest at the head of the first user message; and
    that place, for people. Where no user says anything, the end of the system prompt."""
    at = next(
        (j for j, turn in enumerate(turns) if turn["role"] == "user" and isinstance(turn.get("content"), str)), -1
    )
    if at < 0:
        return with_text(turns, i, f"{kept}\n{text}"), "the end of the system prompt"
    turns = with_text(turns, i, kept)
    return with_text(turns, at, f"{text}\n\n{turns[at]['content']}"), f"the head of messages[{at}] (user)"
