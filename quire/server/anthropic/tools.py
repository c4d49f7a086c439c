"""The tools of Anthropic's requests: the client's own, checked; those that Anthropic runs, left out or refused; the choice among them.

A tool with `defer_loading` is shown to the model once a `tool_reference` in a result names it: the client searches, and its
result says what it found. Knows nothing of messages: what they refer to is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from quire.chat.tools.types import Tool, Tools
from quire.observe.errors import BadRequest
from quire.server.anthropic.turns import dotted
from quire.server.reading import Reading
from quire.server.shared import tools as request_tools

_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_DATED = re.compile(r"[a-z_]+_\d{8}")  # how Anthropic calls the tools that it defines
_CLIENTS = re.compile(r"(bash|text_editor|computer|memory)_\d{8}")  # of these, the ones that a client runs
_SEARCH = "tool_search_tool_"
_NULL = msgspec.Raw(b"null")


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of the client's own."""

    name: str
    input_schema: msgspec.Raw
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: msgspec.Raw = _NULL
    eager_input_streaming: bool | None = None  # arguments always come as they are made
    input_examples: list[Any] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ServerTool(msgspec.Struct):
    """A tool that Anthropic runs. Whatever else it has is not for us to know."""

    type: str
    name: str


def chosen(
    items: list[msgspec.Raw] | None,
    choice: ToolChoice | None,
    references: Mapping[str, str],
    notes: list[str],
    reading: Reading,
) -> Tools:
    """The tools that the model is shown, and the choice among them. `references` are names that results refer to, and where."""
    items = items or []
    request_tools.check_count(items)
    word, name, parallel = _choice(choice)
    made: list[Tool] = []
    named: list[Tool] = []  # every item, as far as its name goes
    deferred: set[str] = set()
    absent: dict[str, ServerTool] = {}
    for i, raw in enumerate(items):
        where = f"tools[{i}]"
        kind = request_tools.at(where, raw, request_tools.Kind).type
        if kind not in (None, "custom"):
            if (found := _absent(where, kind, raw, reading)) is not None:
                absent[where] = found
                named.append(Tool(found.name))
            continue
        given: CustomTool = request_tools.at(where, raw, CustomTool, reading)
        made.append(_tool(where, given, reading))
        named.append(made[-1])
        if given.defer_loading:
            deferred.add(given.name)
    request_tools.check_distinct(named)
    for where, one in absent.items():
        if name == one.name or (word == "required" and not made):
            raise BadRequest(
                f"{where}.type: {one.type[:64]} is a tool that a server runs, and there are none here",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
        if word != "none":
            notes.append(
                f"{dotted(where)}: {one.type[:64]} is a tool that a server runs, and there are none here; left out"
            )
    for referred, place in references.items():
        if referred not in {one.name for one in made}:
            raise BadRequest(f"{place}: there is no tool {referred[:128]!r} in the request", param=place)
    hidden = deferred - references.keys() - {name}
    if hidden and any(one.type.startswith(_SEARCH) for one in absent.values()):
        notes.append("tools: nothing can search for them here, so those with defer_loading are shown from the start")
        hidden = set()
    return request_tools.choose([one for one in made if one.name not in hidden], word, name, parallel)


def _choice(choice: ToolChoice | None) -> tuple[str | None, str | None, bool | None]:
    if choice is None:
        return None, None, None
    if choice.type not in _CHOICES:
        raise BadRequest(f"tool_choice.type: must be one of {', '.join(_CHOICES)}", param="tool_choice.type")
    if (choice.name is not None) != (choice.type == "tool"):
        raise BadRequest("tool_choice.name: belongs to the type tool, which needs it", param="tool_choice.name")
    return _CHOICES[choice.type], choice.name, not choice.disable_parallel_tool_use


def _tool(where: str, given: CustomTool, reading: Reading) -> Tool:
    for name, value in (
        ("input_examples", given.input_examples),
        ("allowed_callers", given.allowed_callers not in (None, [], ["direct"])),
    ):
        if value:
            place = f"{where}.{name}"
            reading.excuse(BadRequest(f"{place}: not supported yet", param=place, code="unsupported_parameter"))
    return request_tools.tool(where, given.name, given.description, given.input_schema, given.strict, "input_schema")


def _absent(where: str, kind: str, raw: msgspec.Raw, reading: Reading) -> ServerTool | None:
    """A tool that a server runs; none, where what is neither that nor the client's own is excused."""
    if _CLIENTS.fullmatch(kind):
        why, cure = "its schema is not here", "send it as a tool of your own, with an input_schema"
    elif _DATED.fullmatch(kind):
        return request_tools.at(where, raw, ServerTool)
    else:
        why, cure = "there are no such tools here", ""
    refusal = BadRequest(
        f"{where}.type: {kind[:64]}: {why}", cure=cure, param=f"{where}.type", code="unsupported_parameter"
    )
    reading.excuse(refusal)
    return None
