"""The tools of a request of the Responses API: those of its `tools` and those that its items bring along, and the choice among them.

A template knows a function by one name. One in a namespace gets a name for the model that no other tool of its request has; items
and answers keep namespace and name apart, because clients look their functions up by both. Tools that wait for a search
(`defer_loading`) are shown once an item says that it was found. Which types of tools there are is `builtin.py`. Knows no prompts and no answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from quire.chat.tools.types import Tool, Tools
from quire.observe.errors import BadRequest
from quire.server.openai.responses import builtin
from quire.server.openai.responses.builtin import LEFT_OUT, Entry
from quire.server.openai.responses.calls import APPLY_PATCH, CUSTOM, FUNCTION, LOCAL_SHELL, SEARCH, SHELL, Known
from quire.server.reading import STRICT, Reading
from quire.server.shared.tools import (
    MAX_DESCRIPTION,
    MAX_NAME,
    Kind,
    Raw,
    at,
    check_count,
    check_name,
    choose,
    chosen_by_word,
)


class NamespaceTool(msgspec.Struct, forbid_unknown_fields=True):
    """Tools that belong together, each known by its own name and that of the namespace."""

    type: str
    name: str
    tools: list[Raw]
    description: str | None = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that names a tool, and a tool of `allowed_tools`."""

    type: str
    name: str = ""
    namespace: str | None = None


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that leaves some of the tools."""

    type: str
    mode: str
    tools: list[Raw]


Key = tuple[str, str | None, str]  # kind, namespace and name, as clients know a tool
_BUILT_IN = (LOCAL_SHELL, SHELL, APPLY_PATCH, SEARCH)  # known by their types alone


@dataclass(frozen=True, slots=True)
class Brought:
    """Tools that an item of the conversation brings along. `found`: it is the result of a search, so those that waited are shown."""

    where: str
    tools: list[Any]
    found: bool


@dataclass(slots=True)
class Toolset:
    """The tools of a request. Those in `choice` have the names that the model knows."""

    choice: Tools = field(default_factory=lambda: Tools(choice="none"))
    told: list[dict[str, Any]] = field(default_factory=list)  # as the answer repeats them
    names: dict[Key, str] = field(default_factory=dict)  # the model's name of every tool
    known: dict[str, Known] = field(default_factory=dict)  # what each of them stands for
    waiting: list[Entry] = field(default_factory=list)  # those that a search may find, by the model's names
    left_out: set[str] = field(default_factory=set)  # kinds of tools that are not here
    reading: Reading = STRICT
    no_effect: dict[str, str] = field(default_factory=dict)  # what changes nothing, with why
    spaces: dict[str, str] = field(default_factory=dict)  # namespaces and what they say of themselves
    told_of: set[str] = field(default_factory=set)  # those of which the model was told

    def known_as(self, kind: str, namespace: str | None, name: str) -> str:
        """The model's name of a tool, which may be one of an earlier request's."""
        found = self.names.get((kind, namespace, name))
        if found is None and kind in (FUNCTION, CUSTOM):  # a client that calls one the other
            found = self.names.get((CUSTOM if kind == FUNCTION else FUNCTION, namespace, name))
        return found or (name if namespace is None else flat(namespace, name))

    @property
    def searches(self) -> bool:
        """Whether searches for tools are done here."""
        return any(one.here for one in self.known.values())


def flat(namespace: str, name: str) -> str:
    """One name of the two."""
    joined = f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"
    return joined if len(joined) <= MAX_NAME else _marked(namespace, name)


def _marked(namespace: str, name: str) -> str:
    """Another, which two pairs share by intent at most."""
    mark = hashlib.sha256(f"{namespace}\0{name}".encode()).hexdigest()[:12]
    return f"{namespace}__{name}"[: MAX_NAME - len(mark) - 1] + f"_{mark}"


def read(
    items: Sequence[Raw], brought: Sequence[Brought], choice: Raw, parallel: bool | None, reading: Reading
) -> Toolset:
    """The tools of a request, checked."""
    made = Toolset(reading=reading)
    own = _entries("tools", items, made, made.told)
    later: dict[Key, Entry] = {}
    found: set[Key] = set()
    for one in brought:
        raws = [Raw(msgspec.json.encode(tool)) for tool in one.tools]
        entries = _entries(f"{one.where}.tools", raws, made, [])
        later |= {_key(entry): entry for entry in entries}
        found |= {_key(entry) for entry in entries if one.found}
    entries = [later.pop(_key(entry), entry) if _key(entry) not in found else entry for entry in own]
    own_keys = {_key(entry) for entry in own}
    entries += [entry for key, entry in later.items() if key not in own_keys]
    check_count(entries)
    _name(made, entries)
    named = [replace(one, tool=replace(one.tool, name=made.names[_key(one)])) for one in entries]
    if SEARCH in {one.known.kind for one in entries}:
        asked = _demanded(made, choice)
        made.waiting = [one for one in named if one.deferred and _key(one) not in found and one.tool.name != asked]
    else:
        made.no_effect |= {f"{one.where}.defer_loading": "every tool is shown at once" for one in named if one.deferred}
    hidden = {one.tool.name for one in made.waiting}
    tools = [one.tool for one in named if one.tool.name not in hidden]
    _check_searches(made, named)
    chosen = _choice(made, tools, choice, parallel)
    made.choice = replace(chosen, tools=introduced(chosen.tools, made))
    return made


def _entries(where: str, items: Sequence[Raw], made: Toolset, told: list[dict[str, Any]]) -> list[Entry]:
    """The tools of one list, those in namespaces included; `told` gets them as the answer repeats them."""
    check_count(items, where)
    entries: list[Entry] = []
    for i, raw in enumerate(items):
        place = f"{where}[{i}]"
        kind = at(place, raw, Kind).type
        if kind == "namespace":
            space = _namespace(place, raw, made.reading)
            inside = [
                entry
                for n, one in enumerate(space.tools)
                if (entry := builtin.read(f"{place}.tools[{n}]", one, space.name, made.no_effect, made.reading))
            ]
            entries += inside
            made.spaces.setdefault(space.name, space.description or "")
            shown = [one.told for one in inside]
            told.append({"type": kind, "name": space.name, "description": space.description or "", "tools": shown})
        elif kind in LEFT_OUT:
            made.left_out.add(kind)
            made.no_effect[place] = f"{kind} is left out: {LEFT_OUT[kind]}"
        elif (entry := builtin.read(place, raw, None, made.no_effect, made.reading)) is not None:
            entries.append(entry)
            told.append(entry.told)
    seen: set[Key] = set()
    for one in entries:
        key = _key(one)
        key = (FUNCTION, *key[1:]) if key[0] == CUSTOM else key
        if key in seen:
            inside_of = "" if one.known.space is None else f" in {one.known.space!r}"
            raise BadRequest(
                f"{one.where}.name: there is a tool {one.known.name!r}{inside_of} already", param=f"{one.where}.name"
            )
        seen.add(key)
    return entries


def _key(one: Entry) -> Key:
    return one.known.kind, one.known.space, one.known.name


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


def _name(made: Toolset, entries: Sequence[Entry]) -> None:
    """Give every tool a name of its own. Functions outside of namespaces keep theirs."""
    for one in sorted(entries, key=lambda each: (each.known.space is not None, each.known.kind in _BUILT_IN)):
        known = one.known
        name = known.name if known.space is None else flat(known.space, known.name)
        if name in made.known and (known.space is not None or known.kind in _BUILT_IN):
            name = _marked(known.space or known.kind, known.name)
        if name in made.known:
            raise BadRequest(f"{one.where}.name: there is a tool {known.name!r} already", param=f"{one.where}.name")
        made.names[_key(one)] = name
        made.known[name] = known


def _check_searches(made: Toolset, entries: Sequence[Entry]) -> None:
    """A search that is done here tells the model which namespaces there are to search."""
    if made.searches and not made.waiting:
        where = next(one.where for one in entries if one.known.here)
        made.no_effect[where] = "there is nothing to search: no tool has defer_loading, or all were found"


def introduced(tools: Sequence[Tool], made: Toolset) -> tuple[Tool, ...]:
    """The first tool of each namespace tells what the namespace is: templates have no other place for it. Once it has, it is not told again."""
    shown: list[Tool] = []
    for one in tools:
        space = made.known[one.name].space or ""
        if said := made.spaces.get(space) if space not in made.told_of else "":
            one = replace(one, description=f"{space}: {said}\n\n{one.description}".rstrip())
        made.told_of.add(space)
        shown.append(one)
    return tuple(shown)


def _choice(made: Toolset, tools: list[Tool], raw: Raw, parallel: bool | None) -> Tools:
    where = "tool_choice"
    if not tools and made.left_out and bytes(raw) == b'"required"':
        raise _left_out(where, made.left_out)
    if (worded := chosen_by_word(tools, raw, parallel)) is not None:
        return worded
    kind = at(where, raw, Kind).type
    if kind in (FUNCTION, CUSTOM, *_BUILT_IN):
        known = _named(made, where, raw)
        if known not in {one.name for one in tools} and tools:
            raise _unknown(where, at(where, raw, NamedTool, made.reading))
        return choose(tools, "named", known, parallel)
    if kind in LEFT_OUT:
        raise _left_out(where, {kind})
    if kind != "allowed_tools":
        raise BadRequest(
            f"{where}.type is {str(kind)[:64]!r}: it must be function, custom, {', '.join(_BUILT_IN)} or allowed_tools",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    allowed = at(where, raw, AllowedTools, made.reading)
    if allowed.mode not in ("auto", "required"):
        raise BadRequest(f"{where}.mode must be auto or required", param=f"{where}.mode")
    check_count(allowed.tools, f"{where}.tools")
    left = {known for i, one in enumerate(allowed.tools) if (known := _allowed(made, f"{where}.tools[{i}]", one))}
    if allowed.tools and not left and allowed.mode == "required":
        raise _left_out(where, made.left_out)
    return choose([one for one in tools if one.name in left], allowed.mode, parallel=parallel)


def _demanded(made: Toolset, raw: Raw) -> str | None:
    """The model's name of the one tool that the choice names, which needs no search."""
    where = "tool_choice"
    if not bytes(raw).startswith(b"{") or at(where, raw, Kind).type not in (FUNCTION, CUSTOM):
        return None
    return _named(made, where, raw)


def _allowed(made: Toolset, where: str, raw: Raw) -> str | None:
    """The model's name of a tool that is allowed; None of one that is left out."""
    if at(where, raw, Kind).type in made.left_out:
        return None
    known = _named(made, where, raw)
    if known is None:
        raise _unknown("tool_choice.tools", at(where, raw, NamedTool, made.reading))
    return known


def _named(made: Toolset, where: str, raw: Raw) -> str | None:
    named = at(where, raw, NamedTool, made.reading)
    if named.type in _BUILT_IN:
        return made.names.get((named.type, None, named.type))
    if not named.name:
        raise BadRequest(f"{where}.name is missing", param=f"{where}.name")
    return made.names.get((named.type, named.namespace, named.name))


def _unknown(where: str, named: NamedTool) -> BadRequest:
    inside = f" in {named.namespace[:128]!r}" if named.namespace else ""
    return BadRequest(
        f"{where} names {(named.name or named.type)[:128]!r}{inside}, which is not among the tools", param=where
    )


def _left_out(where: str, kinds: set[str]) -> BadRequest:
    kind = min(kinds, default="tool")
    return BadRequest(
        f"{where} demands a {kind}: {LEFT_OUT.get(kind, 'it is not here')}",
        cure="send auto",
        param=where,
        code="unsupported_parameter",
    )
