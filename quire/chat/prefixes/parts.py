"""The map from a place in a prompt to the part of the request that it came from: which message, which tool.

A prompt is rendered by a template that may do anything with what it is given, so the map is found by trying: every text is given marks
(characters for private use, each at most once) at its beginning and its end, the template writes the prompt again, and the marks are looked for in it. The marks
taken out, the prompt must be the same text as before, or the map would not be this prompt's; then the messages' texts are searched for in their order
instead. Computed only when a break is explained.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.chat.templates.template import ChatTemplate, Conversation
from quire.observe.errors import BadRequest

if TYPE_CHECKING:
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.chat.types import Origin

FIRST_MARK, LAST_MARK = 0x100000, 0x10FFFD  # the second plane for private use: the first one is `protect`'s
_MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
_SYSTEM = frozenset({"system", "developer"})


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a request."""

    kind: str  # system, tools, message, template, prompt or unknown
    where: str  # for people: messages[3] (tool), tools[12] (web_search)


TEMPLATE = Part("template", "the chat template's own text")
PROMPT = Part("prompt", "the prompt")
UNKNOWN = Part("unknown", "the prompt (its chat template hides which part)")


class Map:
    """Where each part of a rendered prompt begins, in characters."""

    def __init__(self, text: str, begins: Sequence[tuple[int, Part]]):
        self.text = text
        self._places = [at for at, _ in begins]
        self._parts = [part for _, part in begins]

    def at(self, offset: int) -> Part:
        """The part that a character belongs to."""
        i = bisect_right(self._places, offset) - 1
        return self._parts[i] if i >= 0 else TEMPLATE


def part_of(origin: Origin | None, template: ChatTemplate | None, tokenizer: Tokenizer, ids: Sequence[int]) -> Part:
    """The part that the token behind `ids`, which are a prompt's first ones, belongs to."""
    if origin is None or template is None:
        return PROMPT
    try:
        found = map_of(template.conversation(origin.messages, **origin.given))
    except BadRequest:
        return UNKNOWN
    offset = _characters(found.text, tokenizer, ids)
    return UNKNOWN if offset is None else found.at(offset)


def map_of(conversation: Conversation) -> Map:
    """The parts of a conversation's prompt."""
    text = conversation.write()
    for ends in (True, False):
        marked, parts = _marked(conversation, ends)
        if marked is None:
            break
        try:
            told = marked.write()
        except BadRequest:
            continue
        if _MARKS.sub("", told) == text:
            return Map(text, _found(told, parts))
    return Map(text, _searched(conversation, text))


def _characters(text: str, tokenizer: Tokenizer, ids: Sequence[int]) -> int | None:
    """How many characters of a prompt's text its first tokens are; None where they are not its beginning."""
    said = tokenizer.decode(ids).rstrip("\ufffd")
    bos = tokenizer.bos_id
    if bos is not None and not text.startswith(said[:64]):
        said = said.removeprefix(tokenizer.token_text(bos))
    return len(said) if text.startswith(said) else None


class _Marker:
    """Puts marks into texts, and remembers which part each begins."""

    def __init__(self, ends: bool):
        self.ends = ends  # a mark at the beginning of each text too, not only at its end
        self.parts: list[tuple[Part, bool]] = []  # of each mark in turn, and whether the part begins there

    def mark(self, text: Any, part: Part) -> Any:
        if not isinstance(text, str) or not text.strip():
            return text
        lead, tail = len(text) - len(text.lstrip()), len(text.rstrip())
        first = self._next(part, True) if self.ends else ""
        return text[:lead] + first + text[lead:tail] + self._next(part, False) + text[tail:]

    def _next(self, part: Part, begins: bool) -> str:
        if FIRST_MARK + len(self.parts) > LAST_MARK:
            raise OverflowError
        self.parts.append((part, begins))
        return chr(FIRST_MARK + len(self.parts) - 1)


def _marked(conversation: Conversation, ends: bool) -> tuple[Conversation | None, list[tuple[Part, bool]]]:
    """The conversation with marks in it; None where there are more texts than marks, or a text has such characters itself."""
    marker = _Marker(ends)
    try:
        tools = [_tool(i, tool, marker) for i, tool in enumerate(conversation.tools or ())]
        messages = [_message(i, message, marker) for i, message in enumerate(conversation.messages)]
    except OverflowError:
        return None, []
    made = replace(conversation, messages=messages, tools=tools if conversation.tools else conversation.tools)
    return made, marker.parts


def _message(i: int, message: dict[str, Any], marker: _Marker) -> dict[str, Any]:
    part = message_part(i, message)
    made = dict(message)
    for name in (
        "reasoning_content",
        "reasoning",
        "thinking",
    ):  # one text under several names: one mark would come once
        if name in made:
            made[name] = marker.mark(made[name], part)
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = [
            {key: marker.mark(value, part) if key in ("text", "thinking") else value for key, value in each.items()}
            if isinstance(each, dict)
            else each
            for each in content
        ]
    else:
        made["content"] = marker.mark(content, part)
    if made.get("tool_calls"):
        made["tool_calls"] = [_call(i, j, call, marker) for j, call in enumerate(made["tool_calls"])]
    return made


def _call(i: int, j: int, call: Any, marker: _Marker) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    name = marker.mark(function.get("name"), Part("message", f"messages[{i}].tool_calls[{j}] (assistant)"))
    return call | {"function": function | {"name": name}}


def _tool(i: int, tool: Any, marker: _Marker) -> Any:
    """A tool with marks around its name and its description. Its schema lies between them and the next tool's."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    part = Part("tools", f"tools[{i}] ({str(function.get('name'))[:64]})")
    told = {name: marker.mark(function[name], part) for name in ("name", "description") if name in function}
    return tool | {"function": function | told}


def message_part(i: int, message: dict[str, Any]) -> Part:
    """The part that a message is. Its number counts what the model was given, which may be more messages than a client sent."""
    role = str(message.get("role"))
    return Part("system" if role in _SYSTEM else "message", f"messages[{i}] ({role[:32]})")


def _found(told: str, parts: list[tuple[Part, bool]]) -> list[tuple[int, Part]]:
    """Where parts begin in the text without marks. What the template writes between two belongs to the one behind, but for the rest of
    a tool or of a call, whose own texts are marked at their heads."""
    begins: list[tuple[int, Part]] = []
    ends_alone = not any(opens for _, opens in parts)
    before = 0
    for count, match in enumerate(_MARKS.finditer(told)):
        part, opens = parts[ord(match.group()) - FIRST_MARK]
        at = match.start() - count
        if ends_alone:  # so a part is all up to its end
            begins.append((before, part))
            before = at
            continue
        if opens or not begins or begins[-1][1] != part:
            begins.append((at, part))
        if not opens and part.kind in ("system", "message") and ".tool_calls" not in part.where:
            following = _following(told, match.end(), parts)
            begins.append((at + 1, following))  # what differs at the very end is a text that ends or goes on
    return [*begins, (before, TEMPLATE)] if ends_alone and begins else begins


def _following(told: str, at: int, parts: list[tuple[Part, bool]]) -> Part:
    match = _MARKS.search(told, at)
    return TEMPLATE if match is None else parts[ord(match.group()) - FIRST_MARK][0]


def _searched(conversation: Conversation, text: str) -> list[tuple[int, Part]]:
    """Where messages' texts lie in the prompt, each behind the one before; what is not found has no place."""
    begins: list[tuple[int, Part]] = []
    at = 0
    for i, message in enumerate(conversation.messages):
        content = message.get("content")
        said = content.strip() if isinstance(content, str) else ""
        found = text.find(said, at) if said else -1
        if found >= 0:
            begins.append((found, message_part(i, message)))
            at = found + len(said)
    return begins
