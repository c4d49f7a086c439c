"""Items of the Responses API: what a client sends, checked and made whole, and the turns that they are for a template.

An item is a plain dict in OpenAI's shape, always with an id and a type, as it is stored and listed. Reasoning, text and calls
that follow each other are one turn of the assistant's. Kinds that no model here can read are refused by name, and so is a
field that would change the meaning of one that it can; fields that clients echo back empty are fine.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import msgspec

from quire.observe.errors import BadRequest
from quire.server.reading import Reading
from quire.server.served import Served
from quire.server.shared.conversation import MAX_CALLS, History, arguments_text, check_count
from quire.server.shared.tools import at

Item = dict[str, Any]
KnownAs: TypeAlias = Callable[[str | None, str], str]

ROLES = ("user", "assistant", "system", "developer")
# What each kind may have; a field that is not here may come only empty.
FIELDS: dict[str, frozenset[str]] = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "function_call": frozenset({"type", "id", "status", "call_id", "name", "namespace", "arguments"}),
    "function_call_output": frozenset({"type", "id", "status", "call_id", "output", "name", "namespace"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "item_reference": frozenset({"type", "id"}),
}
PARTS = frozenset({"type", "text", "refusal", "annotations", "logprobs"})  # of a message's content
PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
SEAL = b"quire-reasoning:"
MAX_ID = 128


def new_id(kind: str) -> str:
    """An id for an item of that kind."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(16)}"


def read(given: str | list[msgspec.Raw] | None, reading: Reading) -> list[Item]:
    """`input` as items. References are left as they are."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    check_count(given, "input")
    return [_item(f"input[{i}]", at(f"input[{i}]", raw, dict[str, Any]), reading) for i, raw in enumerate(given)]


def _item(where: str, item: dict[str, Any], reading: Reading) -> Item:
    kind = item.get("type")
    if kind is None:  # a message, or a reference, in short
        kind = "message" if "role" in item else "item_reference"
    if not isinstance(kind, str) or kind not in FIELDS:
        raise BadRequest(
            f"{where}.type is {str(kind)[:64]!r}: the kinds that can be read here are {', '.join(FIELDS)}",
            param=f"{where}.type",
            code="unsupported_content",
        )
    for name, value in item.items():
        if name not in FIELDS[kind] and value and not (name == "caller" and value == {"type": "direct"}):
            _not_known(where, name, FIELDS[kind], reading)
    made = _MAKERS[kind](where, item, reading)
    if kind != "item_reference":
        given = _text(where, item, "id", optional=True)
        if given is not None and not 1 <= len(given) <= MAX_ID:
            raise BadRequest(f"{where}.id must have 1 to {MAX_ID} characters", param=f"{where}.id")
        made["id"] = given or new_id(kind)
    return made


def _not_known(where: str, name: str, known: Collection[str], reading: Reading) -> None:
    """A field that an item, or a part of one, does not have here: refused by its place, or ignored and told."""
    try:
        reading.unknown(name, known, where)
    except BadRequest as error:
        place = f"{where}.{name[:64]}"
        raise BadRequest(
            f"{place} is not supported", cure=error.cure, param=place, code="unsupported_content"
        ) from None


def _text(where: str, item: dict[str, Any], name: str, optional: bool = False) -> Any:
    value = item.get(name)
    if value is None and optional:
        return None
    if not isinstance(value, str):
        said = "is missing" if value is None else "must be a string"
        raise BadRequest(f"{where}.{name} {said}", param=f"{where}.{name}")
    return value


def _message(role: str, content: list[dict[str, Any]], id: str = "") -> Item:
    head = {"id": id or new_id("message"), "type": "message", "status": "completed"}
    return {**head, "role": role, "content": content}


def _read_message(where: str, item: dict[str, Any], reading: Reading) -> Item:
    role = _text(where, item, "role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    kinds = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    return _message(role, _parts(f"{where}.content", item.get("content"), kinds, reading))


def _parts(where: str, content: Any, kinds: tuple[str, ...], reading: Reading) -> list[dict[str, Any]]:
    """Content as a list of parts, each of one of these kinds; a string is a part of the first."""
    if isinstance(content, str):
        content = [{"type": kinds[0], "text": content}]
    if not isinstance(content, list):
        said = "is missing" if content is None else "must be a string or a list of parts"
        raise BadRequest(f"{where} {said}", param=where)
    made: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(part, dict):
            raise BadRequest(f"{place} must be an object", param=place)
        kind = part.get("type")
        if kind not in kinds:
            raise BadRequest(
                f"{place}.type is {str(kind)[:64]!r}: it must be {' or '.join(kinds)} here",
                param=f"{place}.type",
                code="unsupported_content",
            )
        for name, value in part.items():
            if name not in PARTS and value:
                _not_known(place, name, PARTS, reading)
        name = "refusal" if kind == "refusal" else "text"
        more = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
        made.append({"type": kind, name: _text(place, part, name), **more})
    return made


def _read_call(where: str, item: dict[str, Any], reading: Reading) -> Item:
    space = _text(where, item, "namespace", optional=True)
    return {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": _text(where, item, "call_id"),
        "name": _text(where, item, "name"),
        **({"namespace": space} if space else {}),
        "arguments": _text(where, item, "arguments"),
    }


def _read_output(where: str, item: dict[str, Any], reading: Reading) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(f"{where}.output", output, ("input_text",), reading)
    head = {"id": "", "type": "function_call_output", "status": "completed"}
    return {**head, "call_id": _text(where, item, "call_id"), "output": output}


def _read_reasoning(where: str, item: dict[str, Any], reading: Reading) -> Item:
    summary = _parts(f"{where}.summary", item.get("summary") or [], ("summary_text",), reading)
    content = _parts(f"{where}.content", item.get("content") or [], ("reasoning_text",), reading)
    sealed = _text(where, item, "encrypted_content", optional=True)
    if sealed and not content:
        content = [{"type": "reasoning_text", "text": unseal(f"{where}.encrypted_content", sealed)}]
    return {"id": "", "type": "reasoning", "status": "completed", "summary": summary, "content": content}


def _read_reference(where: str, item: dict[str, Any], reading: Reading) -> Item:
    return {"type": "item_reference", "id": _text(where, item, "id")}


_MAKERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
    "item_reference": _read_reference,
}


def seal(text: str) -> str:
    """Reasoning as `encrypted_content`, for clients that send nothing else back. It is no secret here: only wrapped."""
    return base64.b64encode(SEAL + text.encode()).decode()


def unseal(where: str, sealed: str) -> str:
    """The text that `seal` wrapped."""
    try:
        data = base64.b64decode(sealed, validate=True)
        if data.startswith(SEAL):
            return data[len(SEAL) :].decode()
    except (binascii.Error, ValueError):
        pass
    raise BadRequest(
        f"{where} was not written by this server: reasoning of another one cannot be read",
        cure="leave the item out",
        param=where,
    )


def turns(
    served: Served, instructions: str | None, items: Sequence[Item], new_from: int, known_as: KnownAs
) -> list[dict[str, Any]]:
    """Items as turns for the model's template. `items[new_from:]` are the request's input, for the names in refusals; `known_as` is
    the model's name of a function in a namespace, or in none."""
    knows_developer = "developer" in str(getattr(served.template, "source", ""))
    history = History()
    made: list[dict[str, Any]] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    for i, item in enumerate(items):
        where = f"input[{i - new_from}]" if i >= new_from else "previous_response_id"
        _add(made, where, item, history, knows_developer, known_as)
    return _one_system(made)


def _add(
    made: list[dict[str, Any]], where: str, item: Item, history: History, knows_developer: bool, known_as: KnownAs
) -> None:
    kind = item["type"]
    if kind == "function_call_output":
        output = item["output"]
        text = output if isinstance(output, str) else _joined(output)
        made.append(history.answered(f"{where}.call_id", item["call_id"], text))
    elif kind == "message" and item["role"] != "assistant":
        role = "system" if item["role"] == "developer" and not knows_developer else item["role"]
        made.append({"role": role, "content": _joined(item["content"])})
    elif kind == "message":
        turn = _assistant(made, ("content", "tool_calls"))
        turn["content"] = _joined(item["content"])
    elif kind == "reasoning":
        thought = _joined(item["content"]) or _joined(item["summary"])
        if thought:
            _assistant(made, ("content", "tool_calls", "reasoning_content"))["reasoning_content"] = thought
    else:
        turn = _assistant(made, ())
        calls = turn.setdefault("tool_calls", [])
        if len(calls) >= MAX_CALLS:
            raise BadRequest(f"{where}: a turn has at most {MAX_CALLS} calls", param=where)
        text = arguments_text(f"{where}.arguments", item["arguments"])
        calls.append(history.called(where, item["call_id"], known_as(item.get("namespace"), item["name"]), text))


def _assistant(made: list[dict[str, Any]], closed_by: tuple[str, ...]) -> dict[str, Any]:
    """The assistant's turn that goes on, or a new one where the last has any of these already."""
    last = made[-1] if made else None
    if last is None or last["role"] != "assistant" or any(last.get(name) for name in closed_by):
        made.append({"role": "assistant", "content": ""})
    return made[-1]


def _one_system(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Instructions and what else is said to the system before anybody speaks, as one turn: templates expect one."""
    count = 0
    while count < len(made) and made[count]["role"] in ("system", "developer"):
        count += 1
    if count < 2:
        return made
    text = "\n\n".join(turn["content"] for turn in made[:count])
    return [{"role": made[count - 1]["role"], "content": text}, *made[count:]]


def _joined(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part.get("text") or part.get("refusal") or "" for part in parts)
