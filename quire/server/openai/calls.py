"""Calls in answers of chat completions: of functions, and of `custom` tools, whose calls have a text in place of arguments.

A model calls every tool as a function; the names of a request's `custom` tools say which calls are told as texts. Knows calls and OpenAI's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.chat.types import Call, CallPart
from quire.server.shared.answers import merged
from quire.server.shared.texts import TextArgument, text_of


def whole(calls: Iterable[Call], texts: frozenset[str]) -> list[dict[str, Any]]:
    """`tool_calls` of a message. `texts` are the names of tools that take a text."""
    return [_custom(one) if one.name in texts else _function(one) for one in calls]


def _function(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _custom(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_of(call.arguments)}}


class CallDeltas:
    """`tool_calls` of the chunks of one choice."""

    def __init__(self, texts: frozenset[str]):
        self._texts = texts
        self._open: dict[int, TextArgument] = {}  # calls with a text that are not over, by index: one at most

    def news(self, parts: list[CallPart], over: bool) -> list[dict[str, Any]]:
        """What is told of these parts, one entry for each call. `over`: the choice ends with them."""
        made: dict[int, dict[str, Any]] = {}
        for part in merged(parts):
            if part.id is not None:
                self._finish(made)
                if part.name in self._texts:
                    self._open[part.index] = TextArgument()
            if part.index in self._open:
                self._text(made, part)
            else:
                made[part.index] = _delta(part)
        if over:
            self._finish(made)
        return [made[index] for index in sorted(made)]

    def _text(self, made: dict[int, dict[str, Any]], part: CallPart) -> None:
        text = self._open[part.index].feed(part.arguments)
        if part.id is not None:
            custom = {"name": part.name, "input": text}
            made[part.index] = {"index": part.index, "id": part.id, "type": "custom", "custom": custom}
        elif text:
            made[part.index] = {"index": part.index, "custom": {"input": text}}

    def _finish(self, made: dict[int, dict[str, Any]]) -> None:
        for index, text in self._open.items():
            if rest := text.finish():
                delta = made.setdefault(index, {"index": index, "custom": {"input": ""}})
                delta["custom"]["input"] += rest
        self._open.clear()


def _delta(part: CallPart) -> dict[str, Any]:
    """News of a call of a function: what it is comes once, with its first part."""
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
