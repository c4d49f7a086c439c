"""What becomes of a field that is not known here, or known and not to be honoured: refused, or ignored and told.

Three levels, of the server (`--strict`, `--lenient`) or of one request, whose header says more than the server's option:

    strict     an unknown field is a 400 that names it          X-Quire-Strict: true
    tell       an unknown field is ignored and told             the default
    lenient    so is a known one that cannot be honoured        X-Quire-Lenient: true

Known fields that can be honoured are, at every level. `unknown` and `excuse` decide; `pruned` is for objects in a body, whose structs forbid
unknown fields: it takes those out, at any depth, and leaves every other byte as it came. Nothing here runs for a body that is known to the last field.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import inspect
from starlette.types import Scope

from quire.observe.errors import BadRequest
from quire.server import ignored

Level = Literal["strict", "tell", "lenient"]
HEADERS: dict[bytes, Level] = {b"x-quire-strict": "strict", b"x-quire-lenient": "lenient"}
TELL: Level = "tell"
_LEVEL = "quire.level"  # where a scope has its level, once it was asked for
_WORDS = {b"true": True, b"1": True, b"false": False, b"0": False}
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
Tell: TypeAlias = Callable[[str, Iterable[str], str], None]  # a field, those that are known, and the object that has it
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


def level(scope: Scope | None) -> Level:
    """How a request is read, found out once. What no request brought is read strictly."""
    if scope is None:
        return "strict"
    if (found := scope.get(_LEVEL)) is None:
        found = scope[_LEVEL] = _level(scope["app"].state.server.config.fields, scope["headers"])
    return found


def _level(chosen: Level, headers: Iterable[tuple[bytes, bytes]]) -> Level:
    given = {name: value.strip().lower() for name, value in headers if name in HEADERS}
    for name, value in given.items():
        if value not in _WORDS:
            raise BadRequest(f"the header {name.decode()} must be true or false")
    asked: list[Level] = [HEADERS[name] for name, value in given.items() if _WORDS[value]]
    if len(asked) > 1:
        raise BadRequest("a request cannot be strict and lenient: send one of the headers")
    if asked:
        return asked[0]
    if any(HEADERS[name] == chosen for name in given):  # the header takes the option back
        return TELL
    return chosen


def unknown(scope: Scope | None, name: str, known: Iterable[str], where: str = "") -> None:
    """A field that nobody here knows: refused, or ignored and told with the one that was probably meant."""
    if scope is None or level(scope) == "strict":
        name = name[:64]
        raise BadRequest(
            f"Unrecognized request argument supplied: {name}",
            cure=_meant(name, known),
            param=name,
            code="unknown_parameter",
        )
    found = ignored.of(scope)
    meant = _meant(name, known) if found.count < ignored.MOST else ""
    found.add(within(where, name[: ignored.LONGEST]), f"unknown here, ignored{meant and f'; {meant}'}")


def excuse(scope: Scope | None, error: BadRequest, where: str = "") -> None:
    """A known field that cannot be honoured: the refusal is raised, unless the request or the server asks for leniency.

    `where` is the object in which the refusal names it.
    """
    if scope is None or level(scope) != "lenient":
        raise error
    name = error.param or "request"
    said = error.message.removeprefix(f"{name}: ").removeprefix(f"{name} ")
    ignored.of(scope).add(within(where, name), f"{said}; ignored")


def within(where: str, name: str) -> str:
    """The path of a field."""
    return f"{where}.{name}" if where else name


def _meant(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:64], sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else ""


# Objects in a body


def pruned(tell: Tell, raw: bytes | msgspec.Raw, shape: Any, where: str = "") -> msgspec.Raw:
    """JSON for `shape` without the fields that its structs forbid; they are told by their paths. What is no JSON comes back as it is."""
    return _pruned(tell, msgspec.Raw(bytes(raw)), _type(shape), where)


@cache
def _type(shape: Any) -> inspect.Type:
    return inspect.type_info(shape)


def _pruned(tell: Tell, raw: msgspec.Raw, kind: inspect.Type, where: str) -> msgspec.Raw:
    first = bytes(raw).lstrip()[:1]
    if first == b"{":
        return _object(tell, raw, _member(kind, inspect.StructType, inspect.DictType), where)
    if first == b"[":
        return _items(tell, raw, _member(kind, inspect.ListType), where)
    return raw


def _member(kind: inspect.Type, *classes: type[inspect.Type]) -> inspect.Type | None:
    """The type that JSON of that kind is read as, where it is one that can hold structs."""
    options = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    return next((one for one in options if isinstance(one, classes)), None)


def _object(tell: Tell, raw: msgspec.Raw, kind: inspect.Type | None, where: str) -> msgspec.Raw:
    if kind is None or not _holds(kind):
        return raw
    try:
        given = _OBJECT.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return raw  # whoever reads it says what is wrong
    made: dict[str, msgspec.Raw] = {}
    fields = {one.encode_name: one.type for one in kind.fields} if isinstance(kind, inspect.StructType) else None
    for name, value in given.items():
        if fields is None:
            assert isinstance(kind, inspect.DictType)
            made[name] = _pruned(tell, value, kind.value_type, within(where, name[:64]))
        elif name in fields:
            made[name] = _pruned(tell, value, fields[name], within(where, name))
        elif isinstance(kind, inspect.StructType) and kind.forbid_unknown_fields:
            tell(name, fields, where)
        else:
            made[name] = value
    return msgspec.Raw(msgspec.json.encode(made))


def _items(tell: Tell, raw: msgspec.Raw, kind: inspect.Type | None, where: str) -> msgspec.Raw:
    if not isinstance(kind, inspect.ListType) or not _holds(kind):
        return raw
    try:
        given = _LIST.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return raw
    return msgspec.Raw(
        msgspec.json.encode([_pruned(tell, one, kind.item_type, f"{where}[{i}]") for i, one in enumerate(given)])
    )


def _holds(kind: inspect.Type) -> bool:
    """Whether a struct that forbids unknown fields is, or is in, values of this type."""
    if isinstance(kind, inspect.StructType):
        return _struct_holds(kind.cls)
    if isinstance(kind, inspect.UnionType):
        return any(map(_holds, kind.types))
    if isinstance(kind, inspect.ListType):
        return _holds(kind.item_type)
    return isinstance(kind, inspect.DictType) and _holds(kind.value_type)


@cache
def _struct_holds(cls: type[msgspec.Struct]) -> bool:
    kind = _type(cls)
    if not isinstance(kind, inspect.StructType):
        return False
    return kind.forbid_unknown_fields or any(_holds(one.type) for one in kind.fields)
