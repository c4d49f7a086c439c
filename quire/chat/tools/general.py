"""The general prompt: tools for models whose chat template has no place for them.

The tools are described in words, in the system turn or, where the template has no system role, before the first user turn. Calls are JSON
objects between <tool_call> and </tool_call>; results go back in the user's turns between <tool_response> and </tool_response>. What is said
in a conversation cannot write these marks: there, they get a space after their first character, so that no message and no result of a
tool passes for a call or a result. Answers are held to a grammar from the mark on, whatever the choice among tools: a model that was
never taught tools would write a call that looks right and is not. Knows neither requests nor engines.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from quire.chat.templates.template import ChatTemplate
from quire.chat.tools.lark import Cut, Lark
from quire.chat.tools.marked import Marked, MarkedReading, schema_of
from quire.chat.tools.objects import ObjectSection
from quire.chat.tools.reader import Read, Text
from quire.chat.tools.types import Format, Tool, Tools
from quire.engine.constraints.grammar import enforceable
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest

NAME = "general prompt"
CALL, CALL_END = "<tool_call>", "</tool_call>"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
_MARK = re.compile(r"<(?=\s*/?\s*(?:tool_call|tool_response|tools)\b)", re.IGNORECASE)
_OBJECTS = ObjectSection(
    openers=(CALL,),
    closer=CALL_END,
    first="\n",
    between=f"\n{CALL_END}\n{CALL}\n",
    last=f"\n{CALL_END}",
)

HOW = f"""# Tools

You can call functions to do what the user asks. These are the functions, one on each line as JSON:
<tools>
%s
</tools>

To call a function, write its name and its arguments as one JSON object between these marks:
{CALL}
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
{CALL_END}
Write one such block for each call. The results come in the next message, each between {RESULT} and {RESULT_END}. Call a function only \
if it helps; otherwise answer in plain words."""

Turn = dict[str, Any]


# ---- answers


@dataclass(frozen=True, slots=True)
class GeneralSection:
    """Calls after the mark, and nowhere else: an object without it is text."""

    openers: tuple[str, ...] = _OBJECTS.openers
    markers: tuple[str, ...] = ()  # plain text, even where a vocabulary has tokens of these names

    def read(self, t: Text, opener: str, tools: Tools) -> Read[None]:
        yield from _OBJECTS.read(t, opener, tools)

    def write(self, g: Lark, tools: list[tuple[Tool, bool]], many: bool) -> str:
        return _OBJECTS.write(g, tools, many)


@dataclass(frozen=True, slots=True)
class General:
    """The Format of answers to the general prompt: the model's own marks of reasoning, if it has any, and calls as described there."""

    marked: Marked
    name: str = NAME
    calls: bool = True

    @property
    def reasons(self) -> bool:
        return self.marked.reasons

    @property
    def markers(self) -> tuple[str, ...]:
        return self.marked.markers

    def reading(self, tail: str, tools: Tools) -> MarkedReading:
        return self.marked.reading(tail, tools)

    def constraint(self, tail: str, tools: Tools, answer: Constraint | None) -> Constraint | None:
        if not tools.tools or tools.choice == "none":
            return self.marked.constraint(tail, tools, answer)
        # Every schema that can be enforced is. One that cannot be leaves the arguments a JSON object, unless they are demanded.
        kept = [tool if tools.forced or tool.strict else replace(tool, strict=_can_hold(tool)) for tool in tools.tools]
        return self.marked.constraint(tail, replace(tools, tools=tuple(kept)), answer)


def general(own: Format | None, cut: Cut) -> General:
    """The format for a model whose own has no calls. `cut` is the tokenizer's."""

    def as_text(text: str) -> list[str | int]:
        return [text] if _MARK.search(text) else cut(text)

    if isinstance(own, Marked):
        return General(replace(own, section=GeneralSection(), cut=as_text, always=True))
    return General(Marked(NAME, None, GeneralSection(), as_text, always=True))


def _can_hold(tool: Tool) -> bool:
    try:
        return _enforceable(json.dumps(schema_of(tool, True), sort_keys=True))
    except (BadRequest, ValueError, RecursionError):
        return False


@lru_cache(maxsize=512)
def _enforceable(schema: str) -> bool:
    return enforceable(Constraint(kind="json_schema", text=schema, param="tools"))


# ---- prompts


def written(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[Turn]:
    """The conversation in turns of system, user and assistant alone, with the tools described, and calls and results in words."""
    made: list[Turn] = []
    joins = False  # the turn before is made of something else, so what follows in the same role is part of it
    for i, message in enumerate(messages):
        turn, rewritten = _turn(i, message)
        if made and made[-1].get("role") == turn.get("role") and (joins or rewritten):
            _append(made[-1], turn)
            joins = True
        else:
            made.append(turn)
            joins = rewritten
    if tools:
        _describe(template, made, HOW % "\n".join(_as_json(_function(tool)) for tool in tools))
    return made


def _describe(template: ChatTemplate, turns: list[Turn], how: str) -> None:
    """Put the description where this template has a place for it."""
    first = turns[0]["role"] if turns else ""
    if template.takes_system or first in ("system", "developer"):
        if first in ("system", "developer"):
            turns[0]["content"] = _joined(turns[0].get("content"), how)
        else:
            turns.insert(0, {"role": "system", "content": how})
        return
    asked = next((turn for turn in turns if turn.get("role") == "user"), None)
    if asked is None:
        turns.insert(0, {"role": "user", "content": how})
    else:
        asked["content"] = _joined(how, asked.get("content"))


def _turn(index: int, message: Mapping[str, Any]) -> tuple[Turn, bool]:
    """A message as a turn, and whether it was a call or a result."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"messages[{index}] is not an object", param=f"messages[{index}]")
    turn = {name: _defused(value) for name, value in message.items() if name != "tool_calls"}
    if message.get("role") == "tool":
        name = message.get("name")
        head = f'<tool_response name="{_defused(name)}">' if isinstance(name, str) and name else RESULT
        whole = _joined(_joined(head, turn.get("content"), "\n"), RESULT_END, "\n")
        return {"role": "user", "content": whole}, True
    calls = message.get("tool_calls")
    if not calls:
        return turn, False
    blocks = "\n".join(f"{CALL}\n{_call(call)}\n{CALL_END}" for call in calls)
    turn["content"] = _joined(turn.get("content"), blocks, "\n")
    return turn, True


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequest("tool_calls: a call has a function with a name", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # what the model wrote wrong, it sees as it was
            arguments = json.loads(arguments or "{}")
    return _as_json({"name": function["name"], "arguments": {} if arguments is None else arguments})


def _function(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


def _as_json(value: Any) -> str:
    """JSON without the marks: in its strings, their first character can be written otherwise."""
    try:
        return _MARK.sub(r"\\u003c", json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"tools: a call or a tool is no JSON ({type(error).__name__})", param="tools") from None


def _defused(value: Any) -> Any:
    """A value in whose texts the marks are none."""
    if isinstance(value, str):
        return _MARK.sub("< ", value) if "<" in value else value
    if isinstance(value, Mapping):
        return {key: _defused(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_defused(item) for item in value]
    return value


def _append(turn: Turn, more: Turn) -> None:
    turn["content"] = _joined(turn.get("content"), more.get("content"))
    for name, value in more.items():
        if name in ("reasoning_content", "reasoning", "thinking") and isinstance(value, str):
            before = turn.get(name)
            turn[name] = f"{before}\n{value}" if before else value


def _joined(first: Any, second: Any, between: str = "\n\n") -> Any:
    """Two contents as one: texts, or lists of parts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*_parts(first, between), *_parts(second)]


def _parts(content: Any, end: str = "") -> list[Any]:
    return [{"type": "text", "text": content + end.removesuffix("\n")}] if isinstance(content, str) else list(content)
