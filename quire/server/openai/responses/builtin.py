"""The tools of a request of the Responses API one by one: which types there are, what a model is shown of each, and how an answer repeats it.

Shells, the patch tool and the search for tools have no definitions in a request: those that a model is shown are written here. Tools that
OpenAI's side runs are not here; the few that a model might as well not have used are left out, and the answer says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.chat.tools.types import Tool
from quire.observe.errors import BadRequest
from quire.server.openai.responses.calls import (
    APPLY_PATCH,
    CUSTOM,
    FUNCTION,
    LOCAL_SHELL,
    OPERATIONS,
    SEARCH,
    SHELL,
    Known,
)
from quire.server.reading import Reading
from quire.server.shared.texts import flat_format, text_tool
from quire.server.shared.tools import NOTHING, Kind, Raw, at, tool

WEB_SEARCH = (*("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),)
LEFT_OUT = dict.fromkeys(WEB_SEARCH, "nothing here searches the web") | {
    "image_generation": "nothing here makes images",
    "code_interpreter": "nothing here runs code",
    "programmatic_tool_calling": "nothing here runs programs that call tools",
}
TYPES = (FUNCTION, CUSTOM, "namespace", LOCAL_SHELL, SHELL, APPLY_PATCH, SEARCH)


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function, flat as this API writes it."""

    type: str
    name: str
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: Raw = NOTHING
    allowed_callers: list[str] | None = None
    async_: bool | None = msgspec.field(default=None, name="async")


class CustomTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool that takes a text."""

    type: str
    name: str
    description: str | None = None
    format: Raw = NOTHING
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    async_: bool | None = msgspec.field(default=None, name="async")


class ShellTool(msgspec.Struct, forbid_unknown_fields=True):
    """`local_shell`, `shell` and `apply_patch`."""

    type: str
    environment: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None


class SearchTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_search`."""

    type: str
    execution: str | None = None
    description: str | None = None
    parameters: Raw = NOTHING


@dataclass(frozen=True, slots=True)
class Entry:
    """One tool of a request."""

    where: str
    known: Known
    tool: Tool
    told: dict[str, Any]
    deferred: bool = False  # shown once a search has found it


def read(where: str, raw: Raw, space: str | None, notes: dict[str, str], reading: Reading) -> Entry | None:
    """A tool, checked; none, where one that cannot be here is excused. `notes` are told what has no effect."""
    kind = at(where, raw, Kind).type
    allowed = (FUNCTION, CUSTOM) if space is not None else TYPES
    if kind not in allowed:
        refusal = BadRequest(
            f"{where}.type is {str(kind)[:64]!r}: it must be {' or '.join(allowed)}",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
        reading.excuse(refusal)
        return None
    return _READERS[kind](where, raw, space, notes, reading)


def _function(where: str, raw: Raw, space: str | None, notes: dict[str, str], reading: Reading) -> Entry:
    given = at(where, raw, FunctionTool, reading)
    _hints(where, given, notes, reading)
    made = tool(where, given.name, given.description, given.parameters, given.strict)
    told: dict[str, Any] = {
        "type": FUNCTION,
        "name": made.name,
        "description": made.description or None,
        "parameters": made.parameters,
        "strict": made.strict,
    }
    if bytes(given.output_schema) not in (b"", b"null"):
        told["output_schema"] = at(f"{where}.output_schema", given.output_schema, dict[str, Any])
        notes[f"{where}.output_schema"] = "results are shown to the model as they come"
    return _entry(where, Known(FUNCTION, made.name, space), made, told, given.defer_loading)


def _custom(where: str, raw: Raw, space: str | None, notes: dict[str, str], reading: Reading) -> Entry:
    given = at(where, raw, CustomTool, reading)
    _hints(where, given, notes, reading)
    grammar = flat_format(f"{where}.format", given.format, reading)
    made = text_tool(where, given.name, given.description, grammar)
    shape = {"type": "text"} if grammar is None else {"type": "grammar", **msgspec.structs.asdict(grammar)}
    about = {} if given.description is None else {"description": given.description}
    told = {"type": CUSTOM, "name": made.name, **about, "format": shape}
    return _entry(where, Known(CUSTOM, made.name, space), made, told, given.defer_loading)


def _entry(where: str, known: Known, made: Tool, told: dict[str, Any], deferred: bool | None) -> Entry:
    return Entry(where, known, made, told | ({"defer_loading": True} if deferred else {}), bool(deferred))


def _hints(where: str, given: FunctionTool | CustomTool | ShellTool, notes: dict[str, str], reading: Reading) -> None:
    if given.allowed_callers is not None and "direct" not in given.allowed_callers:
        place = f"{where}.allowed_callers"
        refusal = BadRequest(
            f"{place}: only programs may call it, and none run here",
            cure="allow direct",
            param=place,
            code="unsupported_parameter",
        )
        reading.excuse(refusal)
    if getattr(given, "async_", None):
        notes[f"{where}.async"] = "every call waits for its result"


def _shell(where: str, raw: Raw, space: str | None, notes: dict[str, str], reading: Reading) -> Entry | None:
    given = at(where, raw, ShellTool, reading)
    _hints(where, given, notes, reading)
    place = (given.environment or {}).get("type", "local")
    if place != "local":
        refusal = BadRequest(
            f"{where}.environment.type is {str(place)[:64]!r}: there are no containers here",
            cure='send {"type": "local"}, and run the commands yourself',
            param=f"{where}.environment.type",
            code="unsupported_parameter",
        )
        reading.excuse(refusal)
        return None
    description, parameters = _BUILT_IN[given.type]
    made = Tool(given.type, description, parameters, True)
    told: dict[str, Any] = {"type": given.type}
    if given.type == SHELL:
        told["environment"] = given.environment or {"type": "local"}
        if skills := told["environment"].get("skills"):
            lines = "\n".join(
                f"- {s.get('name')}: {s.get('description')} ({s.get('path')})" for s in skills if isinstance(s, dict)
            )
            made = replace(made, description=f"{description} Skills, each a folder with a SKILL.md:\n{lines}")
    return _entry(where, Known(given.type, given.type), made, told, False)


def _search(where: str, raw: Raw, space: str | None, notes: dict[str, str], reading: Reading) -> Entry:
    given = at(where, raw, SearchTool, reading)
    execution = given.execution or "server"
    if execution not in ("server", "client"):
        raise BadRequest(f"{where}.execution must be server or client", param=f"{where}.execution")
    description, parameters = _BUILT_IN[SEARCH]
    here = execution == "server"
    made = tool(where, SEARCH, given.description or description, NOTHING if here else given.parameters, False)
    made = replace(made, parameters=made.parameters or parameters, strict=here)
    told: dict[str, Any] = {"type": SEARCH, "execution": execution}
    if not here:
        told |= {"description": given.description, "parameters": made.parameters}
    return _entry(where, Known(SEARCH, SEARCH, None, here), made, told, False)


_READERS = {
    FUNCTION: _function,
    CUSTOM: _custom,
    **dict.fromkeys((LOCAL_SHELL, SHELL, APPLY_PATCH), _shell),
    SEARCH: _search,
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT = {"type": "string"}
_MILLISECONDS = {"type": "integer", "description": "When to give up, in milliseconds."}
_BUILT_IN: dict[str, tuple[str, dict[str, Any]]] = {
    LOCAL_SHELL: (
        "Runs one command on the user's machine and returns its output.",
        _object(
            ["command"],
            command={"type": "array", "items": _TEXT, "description": "The program and its arguments."},
            working_directory={**_TEXT, "description": "Where to run it."},
            timeout_ms=_MILLISECONDS,
        ),
    ),
    SHELL: (
        "Runs shell commands one after another on the user's machine and returns their outputs.",
        _object(
            ["commands"],
            commands={"type": "array", "items": _TEXT, "description": "The commands, each one line for the shell."},
            timeout_ms=_MILLISECONDS,
            max_output_length={"type": "integer", "description": "The most characters of output to return."},
        ),
    ),
    APPLY_PATCH: (
        "Creates, changes or deletes one file. A diff has lines that begin with a space (kept), - (removed) or + (added), in sections that begin "
        "with @@; the diff of a new file is its lines, each after a +. A file that is deleted needs an empty diff.",
        _object(
            ["type", "path", "diff"],
            type={"type": "string", "enum": list(OPERATIONS)},
            path={**_TEXT, "description": "The file, relative to the working directory."},
            diff=_TEXT,
        ),
    ),
    SEARCH: (
        "Finds tools by what they do. Tools that it finds can be called afterwards.",
        _object(["query"], query={**_TEXT, "description": "What a tool should do, in a few words."}),
    ),
}


def parameter_words(made: Tool) -> str:
    """The names and descriptions of a tool's parameters, for a search."""
    properties = (made.parameters or {}).get("properties")
    return json.dumps(properties, ensure_ascii=False)[:4096] if isinstance(properties, dict) else ""
