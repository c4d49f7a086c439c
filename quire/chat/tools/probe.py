"""Probes of a chat template: what it writes for an assistant's turn, found by rendering conversations. Names no format.

`TurnRenderer.turn` gives the part of a rendered conversation that the assistant would have written, and what stands before it:
the difference between a conversation with that turn and one that ends before it. `render_turns` is what formats are chosen by.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.chat.templates.template import ChatTemplate
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
    prompt: str  # the generation prompt, which may have begun the reasoning


@dataclass(frozen=True, slots=True)
class RenderedTurns:
    """The texts that a template writes for the probe conversations."""

    source: str
    header: str  # the generation prompt
    two: str = ""  # a turn of two calls; "" where the template does not write them
    one: str = ""  # a turn of one call
    wrap: tuple[str, ...] = ()  # marks around a plain text
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


class TurnRenderer:
    """Renders an assistant's turns with one template."""

    def __init__(self, template: ChatTemplate, ends: Iterable[str]):
        """`ends` are texts of tokens that end an answer."""
        self._template = template
        self._ends = tuple(end for end in ends if end)
        self._asked: dict[tuple[bool, str], tuple[str, str]] = {}

    def turn(self, message: dict[str, Any], tools: list[dict[str, Any]] | None, **kwargs: Any) -> Turn:
        """The text that the template writes for this turn. Raises BadRequest where it refuses it."""
        bare, prompt = self.asked(tools, **kwargs)
        whole = self._template.render([USER, message], add_generation_prompt=False, tools=tools, **kwargs)
        if whole.startswith(prompt):
            start = len(prompt)
        else:
            start = len(common_prefix(prompt, whole))
            least = len(common_prefix(bare, whole))
            while start > least and not _ends_whole(whole[:start]):
                start -= 1
        text = whole[start:]
        header = prompt[len(common_prefix(bare, prompt)) :]
        if start < len(prompt) and header:  # the template writes something between the question and the header
            begun = next((i for i in range(len(header)) if text.startswith(header[i:])), len(header))
            start, text = start + len(header) - begun, text[len(header) - begun :]
        text = text.removesuffix(from_mark(common_suffix(bare, text)))  # what stands at the end of any conversation
        cut = True
        while cut:
            cut = False
            for end in self._ends:
                if text.rstrip().endswith(end):
                    text, cut = text.rstrip().removesuffix(end), True
        return Turn(whole[:start], text, prompt)

    def tried(self, message: dict[str, Any], tools: list[dict[str, Any]] | None, **kwargs: Any) -> Turn | None:
        """The text for this turn, or None where the template refuses it."""
        try:
            return self.turn(message, tools, **kwargs)
        except BadRequest:
            return None

    def asked(self, tools: list[dict[str, Any]] | None, **kwargs: Any) -> tuple[str, str]:
        """The conversation before the turn: without and with the generation prompt."""
        key = tools is not None, ",".join(kwargs)
        if key not in self._asked:
            bare, prompt = (
                self._template.render([USER], add_generation_prompt=add, tools=tools, **kwargs) for add in (False, True)
            )
            self._asked[key] = bare, prompt
        return self._asked[key]


def render_turns(template: ChatTemplate, ends: Iterable[str]) -> RenderedTurns:
    """Render the turns that a format is detected by."""
    renderer = TurnRenderer(template, ends)
    try:
        bare, prompt = renderer.asked(None)
        header = prompt[len(common_prefix(bare, prompt)) :]
    except BadRequest:
        header = ""
    source = template.whole_source
    think = _marks(renderer, source) if any(word in source for word in ("think", "THINK", "reason")) else None
    wrap: list[str] = []
    message = {"role": "assistant", "content": TEXT, "reasoning_content": REASON}
    thought = None if think is None else renderer.tried(message, None)
    if thought is not None and header.strip()[:1] == "<" and header.strip() in thought.text:
        wrap.append(header.strip())  # reasoning is a turn of its own
    for tools in (None, TOOLS):
        plain = renderer.tried({"role": "assistant", "content": TEXT}, tools)
        if plain is not None and TEXT in plain.text:
            before, _, after = _unthought(plain.text, think).partition(TEXT)
            wrap += [mark for mark in (before.strip(), after.strip()) if mark[:1] in ("<", "[") and mark not in wrap]
            break
    arguments = {KEYS[0]: VALUES[0], KEYS[1]: int(VALUES[1])}
    calls = [called(name, arguments, id) for name, id in zip(NAMES, IDS, strict=True)]
    two, one = (_called(renderer, calls[:n], think) for n in (2, 1))
    return RenderedTurns(
        source=source,
        header=header,
        two=two,
        one=one,
        wrap=tuple(wrap),
        think=think,
    )


def _called(renderer: TurnRenderer, calls: list[dict[str, Any]], think: tuple[str, str] | None) -> str:
    """The text that is written for these calls; "" where some are not in it."""
    for tools in (TOOLS, None):
        seen = renderer.tried({"role": "assistant", "content": "", "tool_calls": calls}, tools)
        if seen is not None and all(call["function"]["name"] in seen.text for call in calls):
            return _unthought(seen.text, think)
    return ""


def _unthought(text: str, think: tuple[str, str] | None) -> str:
    """A turn without the reasoning it begins with."""
    close = think[1] if think is not None else "</think>"
    start = text.find(close)
    return text[start + len(close) :] if start >= 0 else text


def _marks(renderer: TurnRenderer, source: str) -> tuple[str, str] | None:
    """The marks that the template puts around reasoning."""
    message: dict[str, Any] = {"role": "assistant", "content": TEXT, "reasoning_content": REASON}
    call = called(NAMES[0], {KEYS[0]: VALUES[0], KEYS[1]: int(VALUES[1])}, IDS[0])
    with_call = {**message, "content": "", "tool_calls": [call]}
    for kwargs, given in (
        ({}, message),
        ({}, with_call),
        ({"enable_thinking": True}, message),
        ({"thinking": True}, message),
    ):
        if any(word not in source for word in kwargs):
            continue  # nobody looks at it
        seen = renderer.tried(given, TOOLS if given is with_call else None, **kwargs)
        if seen is None or REASON not in seen.text:
            continue
        whole = seen.before + seen.text
        at = whole.rindex(REASON)
        before, after = _MARK.findall(whole[:at].rstrip()), _MARK.match(whole[at + len(REASON) :].lstrip())
        if before and after and whole[:at].rstrip().endswith(before[-1]):
            return before[-1], after[0]
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
    """The longest text that both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return a[:low]


def common_suffix(a: str, b: str) -> str:
    """The longest text that both end with."""
    return common_prefix(a[::-1], b[::-1])[::-1]


def _ends_whole(text: str) -> bool:
    """Whether a prompt may end here: not in the middle of a mark."""
    return text[-1:] in (">", "]", "\n", ":", "▷") or not text
