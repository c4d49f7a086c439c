"""The tools of a request, whatever its dialect: definitions checked and bounded, the choice among them, what a template is shown.

A dialect takes its own shape apart and hands the pieces to `tool` with the place they came from, so that every refusal names
it; `choose` makes the one `Tools` of the request. OpenAI's shape is read here too, because others write it as well. What a
tool's schema can enforce is the engine's answer, not ours: here it is only known to be a bounded object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from quire.chat.tools.types import Tool, Tools
from quire.observe.errors import BadRequest
from quire.server.reading import STRICT, Reading
from quire.server.served import Served
from quire.server.shared import bodies

MAX_TOOLS = 1024
MAX_DESCRIPTION = 64 * 1024  # characters
MAX_NAME = 128  # characters
NAME = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_NAME}}}")
NO_TOOLS = Tools(choice="none")

Raw = msgspec.Raw
ReadTool: TypeAlias = Callable[[str, Raw, Reading], Tool]  # a tool of a request, with its place in it
NOTHING = Raw()  # a field that did not come; null is one that did, and means the same


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """`tools[].function`."""

    name: str
    description: str | None = None
    parameters: Raw = NOTHING
    strict: bool | None = None


class Kind(msgspec.Struct):
    """Any tool, as far as one must look to see what it is."""

    type: str | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool in OpenAI's shape."""

    function: Function
    type: str | None = None


class Named(msgspec.Struct):
    """Something that has a name."""

    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that names a function, and a tool of `allowed_tools`."""

    function: Named
    type: str = "function"


class NamedText(msgspec.Struct, forbid_unknown_fields=True):
    """The same of a `custom` tool."""

    custom: Named
    type: str


class Allowed(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice.allowed_tools`."""

    mode: str
    tools: list[Raw]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_choice` that leaves some of the tools."""

    type: str
    allowed_tools: Allowed


def tool(
    where: str, name: str, description: str | None, schema: Raw, strict: bool | None, field: str = "parameters"
) -> Tool:
    """One tool, checked. `field` is what the dialect calls the schema."""
    check_name(f"{where}.name", name)
    if description is not None and len(description) > MAX_DESCRIPTION:
        raise BadRequest(
            f"{where}.description has {len(description)} characters: at most {MAX_DESCRIPTION} are taken",
            param=f"{where}.description",
        )
    return Tool(name, description or "", _schema(f"{where}.{field}", schema), bool(strict))


def check_name(where: str, name: str) -> None:
    """Refuse a name that no function has: formats write names between their markers."""
    if not NAME.fullmatch(name):
        raise BadRequest(
            f"{where} is {name[:64]!r}: a name has 1 to 128 letters, digits, underscores, dashes, dots, colons or slashes",
            param=where,
        )


def _schema(where: str, raw: Raw) -> dict[str, Any] | None:
    if bytes(raw) in (b"", b"null"):
        return None
    schema: Any = at(where, raw, object)
    if not isinstance(schema, dict):
        raise BadRequest(f"{where} must be a JSON schema, which is an object", param=where)
    bodies.bounded(where, schema)
    if schema.get("type", "object") != "object":
        raise BadRequest(f"{where}.type must be object: arguments have names", param=f"{where}.type")
    return schema


def at(where: str, raw: Raw, shape: Any, reading: Reading = STRICT) -> Any:
    """`raw` as `shape`; a refusal names the place within the whole request."""
    try:
        return bodies.decode(raw, shape, where, reading)
    except BadRequest as error:
        if error.code == "invalid_json":
            said = error.message.replace("the body", where, 1)
            raise BadRequest(said, param=where, code=error.code) from None
        inner = error.param or ""
        place = f"{where}{'' if not inner or inner.startswith('[') else '.'}{inner}"
        head, _, tail = error.message.partition(": ")
        what = tail if tail and inner.startswith(head) else error.message
        raise BadRequest(f"{place}: {what}", cure=error.cure, param=place, code=error.code) from None


def check_count(tools: Sequence[object], param: str = "tools") -> None:
    """Refuse a list that is longer than any honest one, before a single item is looked at."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"{param} has {len(tools)} items: at most {MAX_TOOLS} are taken", param=param)


def check_distinct(tools: Sequence[Tool], where: str = "tools[{}].name") -> None:
    """Refuse two tools of one name: a call could mean either."""
    seen: set[str] = set()
    for i, one in enumerate(tools):
        if one.name in seen:
            place = where.format(i)
            raise BadRequest(f"{place}: there is a tool {one.name!r} already", param=place)
        seen.add(one.name)


def choose(
    tools: Sequence[Tool],
    choice: str | None,
    name: str | None = None,
    parallel: bool | None = None,
    param: str = "tool_choice",
) -> Tools:
    """What the request says about tools. No word means auto where there are tools. With none they are not shown."""
    if choice in (None, "auto"):
        return Tools(tuple(tools), "auto", parallel=parallel is not False) if tools else NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    if not tools:
        raise BadRequest(f"{param} needs tools: there are none in the request", param=param)
    if choice == "named" and name not in {one.name for one in tools}:
        raise BadRequest(f"{param} names {str(name)[:128]!r}, which is not among the tools", param=param)
    return Tools(tuple(tools), choice or "auto", name, parallel=parallel is not False)


def shown(tools: Tools) -> list[dict[str, Any]]:
    """The tools as templates expect them."""
    nothing = {"type": "object", "properties": {}}
    return [
        {
            "type": "function",
            "function": {
                "name": one.name,
                "description": one.description,
                "parameters": nothing if one.parameters is None else one.parameters,
            },
        }
        for one in tools.tools
    ]


def told_in_words(served: Served) -> str | None:
    """The note for an answer where tools go into the prompt in words; None where the model's template has a place for them."""
    if not served.completer.prompts_tools:
        return None
    return f"tools: the chat template of {served.model.name} has no place for tools: they are described in the prompt (general prompt)"


# OpenAI's shape


def openai_tools(items: Sequence[Raw] | None, reading: Reading, custom: ReadTool | None = None) -> list[Tool]:
    """`tools` as OpenAI and Ollama write them. `custom` reads those of that type, where an API has them."""
    items = items or ()
    check_count(items)
    made: list[Tool] = []
    for i, raw in enumerate(items):
        where = f"tools[{i}]"
        kind = at(where, raw, Kind).type
        if kind == "custom" and custom is not None:
            made.append(custom(where, raw, reading))
            continue
        if kind not in (None, "function"):
            known = "only function tools are" if custom is None else "only function and custom tools are"
            refusal = BadRequest(
                f"{where}.type is {kind[:64]!r}: {known} supported",
                param=f"{where}.type",
                code="unsupported_parameter",
            )
            reading.excuse(refusal)
            continue
        given = at(where, raw, FunctionTool, reading).function
        made.append(tool(f"{where}.function", given.name, given.description, given.parameters, given.strict))
    check_distinct(made, "tools[{}].function.name")
    return made


def chosen_by_word(tools: Sequence[Tool], raw: Raw, parallel: bool | None) -> Tools | None:
    """A `tool_choice` that is absent or one word; None where it is an object, whose shape each API has its own of."""
    data = bytes(raw)
    if data in (b"", b"null"):
        return choose(tools, None, parallel=parallel)
    if not data.startswith(b'"'):
        return None
    word = at("tool_choice", raw, str)
    if word not in ("none", "auto", "required"):
        raise BadRequest("tool_choice must be none, auto, required or a named function", param="tool_choice")
    return choose(tools, word, parallel=parallel)


def openai_choice(tools: Sequence[Tool], raw: Raw, parallel: bool | None, reading: Reading) -> Tools:
    """`tool_choice` as chat completions write it, applied."""
    where = "tool_choice"
    if (worded := chosen_by_word(tools, raw, parallel)) is not None:
        return worded
    kind = at(where, raw, Kind).type
    if kind == "allowed_tools":
        return _allowed(tools, at(where, raw, AllowedTools, reading).allowed_tools, parallel, reading)
    if kind not in (None, "function", "custom"):
        raise BadRequest(
            f"{where}.type is {kind[:64]!r}: it must be function, custom or allowed_tools",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    return choose(tools, "named", _named(where, raw, reading), parallel)


def _named(where: str, raw: Raw, reading: Reading) -> str:
    if at(where, raw, Kind).type == "custom":
        return at(where, raw, NamedText, reading).custom.name
    return at(where, raw, NamedTool, reading).function.name


def _allowed(tools: Sequence[Tool], allowed: Allowed, parallel: bool | None, reading: Reading) -> Tools:
    """Only those tools, shown to the model and callable."""
    where = "tool_choice.allowed_tools"
    if allowed.mode not in ("auto", "required"):
        raise BadRequest(f"{where}.mode must be auto or required", param=f"{where}.mode")
    check_count(allowed.tools, f"{where}.tools")
    names = {_named(f"{where}.tools[{i}]", one, reading) for i, one in enumerate(allowed.tools)}
    unknown = names - {one.name for one in tools}
    if unknown:
        raise BadRequest(
            f"{where}.tools names {min(unknown)[:128]!r}, which is not among the tools", param=f"{where}.tools"
        )
    kept = [one for one in tools if one.name in names]
    return choose(kept, allowed.mode, parallel=parallel)
