"""What a chat template writes for an assistant's turn, found by having it written. Names no format.

`turn` gives the part of a rendered conversation that the assistant would have written, and what stands before it: the
difference between a conversation with that turn and one that ends before it. `look` is what formats are chosen by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.chat.template import ChatTemplate
from quire.observe.errors import BadRequest

NAMES = ("probe_one", "probe_two")
KEYS = ("probe_alpha", "probe_beta")
VALUES = ("palpha", "4711")
IDS = ("abcdefgh1", "abcdefgh2")
TEXT = "A probe of text."
REASON = "A probe of reasoning."
USER = {"role": "user", "content": "A probe of a question."}
_MARK = re.compile(r"<[^<>\s]{1,60}>|\[[A-Z_]{2,30}\]|◁[^◁▷]{1,30}▷|functools(?=\[?$)")


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn as it was written."""

    before: str  # the prompt that leads to it
    text: str  # what the model would have written, without what ends the turn


@dataclass(frozen=True, slots=True)
class Seen:
    """What a template was seen to write."""

    source: str
    header: str  # the generation prompt
    two: str = ""  # a turn of two calls; "" where the template does not write them
    one: str = ""  # a turn of one call
    bare: str = ""  # a turn of one call without arguments
    think: tuple[str, str] | None = None  # the marks around reasoning
    names: tuple[str, str] = NAMES
    keys: tuple[str, str] = KEYS
    values: tuple[str, str] = VALUES


def tool(name: str, properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """A tool as the APIs write it."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": schema}}


TOOLS = [
    tool(name, {KEYS[0]: {"type": "string", "description": "A"}, KEYS[1]: {"type": "integer", "description": "B"}})
    for name in NAMES
]


def called(name: str, arguments: dict[str, Any], id: str) -> dict[str, Any]:
    """A call as the APIs write it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def turn(
    template: ChatTemplate,
    message: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    ends: Iterable[str],
    **kwargs: Any,
) -> Turn:
    """What the template writes for this turn. Raises BadRequest where it refuses it."""
    bare = template.render([USER], add_generation_prompt=False, tools=tools, **kwargs)
    prompt = template.render([USER], add_generation_prompt=True, tools=tools, **kwargs)
    whole = template.render([USER, message], add_generation_prompt=False, tools=tools, **kwargs)
    if whole.startswith(prompt):
        start = len(prompt)
    else:
        start = len(common_prefix(prompt, whole))
        least = len(common_prefix(bare, whole))
        while start > least and not _ends_whole(whole[:start]):
            start -= 1
    text = whole[start:]
    cut = True
    while cut:  # what ends a turn: the template's own mark, spaces, tokens that end an answer
        cut = False
        for end in ends:
            if end and text.rstrip().endswith(end):
                text, cut = text.rstrip().removesuffix(end), True
    return Turn(whole[:start], text)


def look(template: ChatTemplate, ends: Iterable[str]) -> Seen:
    """Have the template write what formats are known by."""
    ends = tuple(ends)
    header = _header(template)
    plain = _try(template, {"role": "assistant", "content": TEXT}, None, ends)
    closing = plain.text[plain.text.index(TEXT) + len(TEXT) :].strip() if plain and TEXT in plain.text else ""
    ends = (closing, *ends) if closing else ends
    arguments = {KEYS[0]: VALUES[0], KEYS[1]: int(VALUES[1])}
    calls = [called(name, arguments, id) for name, id in zip(NAMES, IDS, strict=True)]
    two = _try(template, {"role": "assistant", "content": "", "tool_calls": calls}, TOOLS, ends)
    one = _try(template, {"role": "assistant", "content": "", "tool_calls": calls[:1]}, TOOLS, ends)
    none = _try(
        template, {"role": "assistant", "content": "", "tool_calls": [called(NAMES[0], {}, IDS[0])]}, TOOLS, ends
    )
    return Seen(
        source=template.source,
        header=header,
        two=two.text if two and all(name in two.text for name in NAMES) else "",
        one=one.text if one and NAMES[0] in one.text else "",
        bare=none.text if none and NAMES[0] in none.text else "",
        think=_marks(template, ends),
    )


def _header(template: ChatTemplate) -> str:
    try:
        bare = template.render([USER], add_generation_prompt=False)
        prompt = template.render([USER], add_generation_prompt=True)
    except BadRequest:
        return ""
    return prompt[len(common_prefix(bare, prompt)) :]


def _marks(template: ChatTemplate, ends: tuple[str, ...]) -> tuple[str, str] | None:
    """The marks that the template puts around reasoning."""
    message = {"role": "assistant", "content": TEXT, "reasoning_content": REASON}
    for kwargs in ({}, {"enable_thinking": True}, {"thinking": True}):
        seen = _try(template, message, None, ends, **kwargs)
        if seen is None or REASON not in seen.text:
            continue
        whole = seen.before + seen.text
        at = whole.rindex(REASON)
        before, after = _MARK.findall(whole[:at].rstrip()), _MARK.match(whole[at + len(REASON) :].lstrip())
        if before and after and whole[:at].rstrip().endswith(before[-1]):
            return before[-1], after[0]
    return None


def _try(
    template: ChatTemplate,
    message: dict[str, Any],
    tools: list[dict[str, Any]] | None,
    ends: tuple[str, ...],
    **kwargs: Any,
) -> Turn | None:
    try:
        return turn(template, message, tools, ends, **kwargs)
    except BadRequest:
        return None


def last_mark(text: str) -> str:
    """The mark that a text ends with; "" where it ends with none."""
    found = [m for m in _MARK.finditer(text) if m.end() == len(text)]
    return found[-1][0] if found else ""


def from_mark(text: str) -> str:
    """A text from where its first mark begins."""
    at = min((i for i in map(text.find, "<[◁") if i >= 0), default=len(text))
    return text[at:]


def common_prefix(a: str, b: str) -> str:
    """What both begin with."""
    size = min(len(a), len(b))
    at = next((i for i in range(size) if a[i] != b[i]), size)
    return a[:at]


def common_suffix(a: str, b: str) -> str:
    """What both end with."""
    return common_prefix(a[::-1], b[::-1])[::-1]


def _ends_whole(text: str) -> bool:
    """Whether a prompt may end here: not in the middle of a mark."""
    return text[-1:] in (">", "]", "\n", ":", "▷") or not text
