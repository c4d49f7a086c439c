"""The tools of a request of the Responses API: functions, namespaces of functions, and the choice among them.

A template knows a function by one name. One in a namespace gets a name for the model that no other tool of its request has; items
and answers keep namespace and name apart, because clients look their functions up by both. Tools that OpenAI's side would run
are left out where the model might as well not have used them, and the answer says so. Knows no prompts and no answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from quire.chat.tools.types import Tool, Tools
from quire.observe.errors import BadRequest
from quire.server.reading import STRICT, Reading
from quire.server.shared.tools import (
    MAX_DESCRIPTION,
    MAX_NAME,
    NOTHING,
    Kind,
    Raw,
    at,
    check_count,
    check_name,
    choose,
    chosen_by_word,
    tool,
)

WEB_SEARCH = (*("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),)
NO_SEARCH = "nothing here searches the web"


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool, flat as this API writes it."""

    type: str
    name: str
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None
    defer_loading: bool | None = None


class NamespaceTool(msgspec.Struct, forbid_unknown_fields=True):
    """Functions that belong together, each known by its own name and that of the namespace."""

    type: str
    name: str
    tools: list[Raw]
    description: str | None = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that names a function, and a tool of `allowed_tools`."""

    type: str
    name: str
    namespace: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that leaves some of the tools."""

    type: str
    mode: str
    tools: list[Raw]


Key = tuple[str | None, str]  # namespace and name, as clients know a function


@dataclass(slots=True)
class Toolset:
    """The tools of a request. Those in `choice` have the names that the model knows."""

    choice: Tools = field(default_factory=lambda: Tools(choice="none"))
    told: list[dict[str, Any]] = field(default_factory=list)  # as the answer repeats them
    names: dict[Key, str] = field(default_factory=dict)  # the model's name of every function
    left_out: set[str] = field(default_factory=set)  # kinds of tools that are not here
    reading: Reading = STRICT
    no_effect: dict[str, str] = field(default_factory=dict)  # what changes nothing, with why

    def known_as(self, namespace: str | None, name: str) -> str:
        """The model's name of a function, which may be one of an earlier request's."""
        return self.names.get((namespace, name)) or (name if namespace is None else flat(namespace, name))

    @property
    def spaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of every function in a namespace, by the model's name."""
        return {known: (space, name) for (space, name), known in self.names.items() if space is not None}


def flat(namespace: str, name: str) -> str:
    """One name of the two."""
    joined = f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    return joined if len(joined) <= MAX_NAME else _marked(namespace, name)


def _marked(namespace: str, name: str) -> str:
    """Another, which two pairs share by intent at most."""
    mark = hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:12]
    return f"{namespace}__{name}"[: MAX_NAME - len(mark) - 1] + f"_{mark}"


def read(items: Sequence[Raw], choice: Raw, parallel: bool | None, reading: Reading) -> Toolset:
    """The tools of a request, checked."""
    check_count(items)
    made = Toolset(reading=reading)
    functions: list[tuple[str, str | None, Tool]] = []  # where it stands, its namespace
    about: dict[str, str] = {}  # namespaces, by their names
    for i, raw in enumerate(items):
        where = f"tools[{i}]"
        kind = at(where, raw, Kind).type
        if kind == "namespace":
            space = _namespace(where, raw, reading)
            inside = list(_functions(where, space, made))
            functions += [(place, space.name, one) for place, one in inside]
            about.setdefault(space.name, space.description or "")
            shown = [_told(one) for _, one in inside]
            made.told.append({"type": kind, "name": space.name, "description": space.description or "", "tools": shown})
        elif kind in WEB_SEARCH:
            made.left_out.add(kind)
            made.no_effect[where] = f"{kind} is left out: {NO_SEARCH}"
        elif (one := _function(where, kind, raw, made)) is not None:
            functions.append((where, None, one))
            made.told.append(_told(one))
    check_count(functions)
    _name(made, functions)
    tools = [replace(one, name=made.names[space, one.name]) for _, space, one in functions]
    made.choice = _introduced(_choice(made, tools, choice, parallel), made, about)
    return made


def _namespace(where: str, raw: Raw, reading: Reading) -> NamespaceTool:
    space = at(where, raw, NamespaceTool, reading)
    check_name(f"{where}.name", space.name)
    check_count(space.tools, f"{where}.tools")
    if space.description is not None and len(space.description) > MAX_DESCRIPTION:
        raise BadRequest(
            f"{where}.description has {len(space.description)} characters: at most {MAX_DESCRIPTION} are taken",
            param=f"{where}.description",
        )
    return space


def _functions(where: str, space: NamespaceTool, made: Toolset) -> Iterator[tuple[str, Tool]]:
    for i, raw in enumerate(space.tools):
        place = f"{where}.tools[{i}]"
        if (one := _function(place, at(place, raw, Kind).type, raw, made)) is not None:
            yield place, one


def _function(where: str, kind: str | None, raw: Raw, made: Toolset) -> Tool | None:
    """A function; none, where a tool of another kind is excused."""
    if kind != "function":
        refusal = BadRequest(
            f"{where}.type is {str(kind)[:64]!r}: only function tools are supported",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
        made.reading.excuse(refusal)
        return None
    given = at(where, raw, FunctionTool, made.reading)
    if given.defer_loading:
        made.no_effect[f"{where}.defer_loading"] = "every function is shown at once"
    return tool(where, given.name, given.description, given.parameters, given.strict)


def _told(one: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": one.name,
        "description": one.description or None,
        "parameters": one.parameters,
        "strict": one.strict,
    }


def _name(made: Toolset, functions: Sequence[tuple[str, str | None, Tool]]) -> None:
    """Give every function a name of its own. Those outside of namespaces keep theirs."""
    taken: set[str] = set()
    for where, space, one in sorted(functions, key=lambda each: each[1] is not None):
        known = one.name if space is None else flat(space, one.name)
        if space is not None and known in taken:
            known = _marked(space, one.name)
        if (space, one.name) in made.names or known in taken:
            inside = "" if space is None else f" in {space!r}"
            raise BadRequest(f"{where}.name: there is a tool {one.name!r}{inside} already", param=f"{where}.name")
        made.names[space, one.name] = known
        taken.add(known)


def _introduced(choice: Tools, made: Toolset, about: Mapping[str, str]) -> Tools:
    """The first function of each namespace tells what the namespace is: templates have no other place for it."""
    spaces, left = made.spaces, dict(about)
    tools: list[Tool] = []
    for one in choice.tools:
        space = spaces[one.name][0] if one.name in spaces else ""
        if said := left.pop(space, ""):
            one = replace(one, description=f"{space}: {said}\n\n{one.description}".rstrip())
        tools.append(one)
    return replace(choice, tools=tuple(tools))


def _choice(made: Toolset, tools: list[Tool], raw: Raw, parallel: bool | None) -> Tools:
    where = "tool_choice"
    if not tools and made.left_out and bytes(raw) == b'"required"':
        raise _no_search(where)
    if (worded := chosen_by_word(tools, raw, parallel)) is not None:
        return worded
    kind = at(where, raw, Kind).type
    if kind == "function":
        named = at(where, raw, NamedTool, made.reading)
        known = made.names.get((named.namespace, named.name))
        if known is None and tools:
            raise _unknown(where, named)
        return choose(tools, "named", known, parallel)
    if kind in WEB_SEARCH:
        raise _no_search(where)
    if kind != "allowed_tools":
        raise BadRequest(
            f"{where}.type is {str(kind)[:64]!r}: it must be function or allowed_tools",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    allowed = at(where, raw, AllowedTools, made.reading)
    if allowed.mode not in ("auto", "required"):
        raise BadRequest(f"{where}.mode must be auto or required", param=f"{where}.mode")
    check_count(allowed.tools, f"{where}.tools")
    left = {known for i, one in enumerate(allowed.tools) if (known := _allowed(made, f"{where}.tools[{i}]", one))}
    if allowed.tools and not left and allowed.mode == "required":
        raise _no_search(where)
    return choose([one for one in tools if one.name in left], allowed.mode, parallel=parallel)


def _allowed(made: Toolset, where: str, raw: Raw) -> str | None:
    """The model's name of a tool that is allowed; None of one that is left out."""
    if at(where, raw, Kind).type in made.left_out:
        return None
    named = at(where, raw, NamedTool, made.reading)
    known = made.names.get((named.namespace, named.name))
    if known is None:
        raise _unknown("tool_choice.tools", named)
    return known


def _unknown(where: str, named: NamedTool) -> BadRequest:
    inside = f" in {named.namespace[:128]!r}" if named.namespace else ""
    return BadRequest(f"{where} names {named.name[:128]!r}{inside}, which is not among the tools", param=where)


def _no_search(where: str) -> BadRequest:
    return BadRequest(
        f"{where} demands a web search: {NO_SEARCH}", cure="send auto", param=where, code="unsupported_parameter"
    )
