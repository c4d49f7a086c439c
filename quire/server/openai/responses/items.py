"""Items of the Responses API: what a client sends, checked and made whole. `turns.py` makes turns of them.

An item is a plain dict in OpenAI's shape, always with an id and a type, as it is stored and listed. Kinds that no model here can read are
refused by name. A field that is not known is ignored and told, or refused where that is asked for; one that clients echo back empty is fine. What
OpenAI's side did in a conversation that began there (a web search) is set aside, and so is what only it can read; the answer says so.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from quire.observe.errors import BadRequest
from quire.server.openai.responses.calls import CALLS, OPERATIONS, OUTPUTS, Item
from quire.server.reading import Reading
from quire.server.shared.conversation import check_count
from quire.server.shared.tools import at

ROLES = ("user", "assistant", "system", "developer")
_CALL = frozenset({"type", "id", "status", "call_id"})
# What each kind may have; a field that is not here may come only empty.
FIELDS: dict[str, frozenset[str]] = {
    "message": frozenset({"type", "id", "status", "role", "content", "phase"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "function_call": _CALL | {"name", "namespace", "arguments"},
    "custom_tool_call": _CALL | {"name", "namespace", "input"},
    "local_shell_call": _CALL | {"action"},
    "shell_call": _CALL | {"action", "environment"},
    "apply_patch_call": _CALL | {"operation"},
    "tool_search_call": _CALL | {"arguments", "execution"},
    "function_call_output": _CALL | {"output", "name", "namespace"},
    "custom_tool_call_output": _CALL | {"output", "name", "namespace"},
    "local_shell_call_output": _CALL | {"output"},
    "shell_call_output": _CALL | {"output", "max_output_length"},
    "apply_patch_call_output": _CALL | {"output"},
    "tool_search_output": _CALL | {"tools", "execution"},
    "additional_tools": frozenset({"type", "id", "role", "tools"}),
    "configuration_update": frozenset({"type", "id", "reasoning", "text"}),
    "compaction": frozenset({"type", "id", "encrypted_content"}),
    "compaction_trigger": frozenset({"type", "id"}),
    "item_reference": frozenset({"type", "id"}),
}
# Other names of the same.
ALIASES = {"compaction_summary": "compaction", "context_compaction": "compaction"}
# What OpenAI's side did; its results are in the messages that followed.
SET_ASIDE = (
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "mcp_list_tools",
    "program",
    "program_output",
)
# Notes on an item that change nothing for a model: who made it, and Codex's own.
REMARKS = ("created_by", "internal_chat_message_metadata_passthrough")
EXEC = frozenset({"type", "command", "env", "timeout_ms", "user", "working_directory"})  # of a local shell's `action`
COMMANDS = frozenset({"commands", "timeout_ms", "max_output_length"})  # of a shell's
CHANGE = frozenset({"type", "path", "diff"})  # of an `operation`
RUN = frozenset({"stdout", "stderr", "outcome"})  # of what a command wrote
PARTS = frozenset({"type", "text", "refusal", "annotations", "logprobs"})  # of a message's content
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "additional_tools": "at",
    "configuration_update": "cfg",
    "compaction": "cmp",
    "compaction_trigger": "cmt",
    **dict(CALLS.values()),
    **OUTPUTS,
}
STATUSES = ("completed", "failed")
SEAL = b"quire-reasoning:"
SEAL_SUMMARY = b"quire-compaction:"
MAX_ID = 128


def new_id(kind: str) -> str:
    """An id for an item of that kind."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(16)}"


def read(given: str | list[msgspec.Raw] | None, notes: dict[str, str], reading: Reading) -> list[tuple[str, Item]]:
    """`input` as items, each with its place. References are left as they are. `notes` are told what is set aside."""
    if given is None:
        return []
    if isinstance(given, str):
        return [("input", message("user", [{"type": "input_text", "text": given}]))]
    check_count(given, "input")
    made: list[tuple[str, Item]] = []
    for i, raw in enumerate(given):
        where = f"input[{i}]"
        item = at(where, raw, dict[str, Any])
        if item.get("type") in SET_ASIDE:
            notes[where] = f"a {item['type']} was done elsewhere; it is set aside"
        elif (one := _item(where, item, notes, reading)) is not None:
            if made and made[-1][1]["type"] == "compaction_trigger":
                raise BadRequest("a compaction_trigger must be the last of the input", param=f"{made[-1][0]}.type")
            made.append((where, one))
    return made


def _item(where: str, item: dict[str, Any], notes: dict[str, str], reading: Reading) -> Item | None:
    kind = item.get("type")
    if kind is None:  # a message, or a reference, in short
        kind = "message" if "role" in item else "item_reference"
    kind = ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if not isinstance(kind, str) or kind not in FIELDS:
        raise BadRequest(
            f"{where}.type is {str(kind)[:64]!r}: the kinds that can be read here are {', '.join(FIELDS)}",
            param=f"{where}.type",
            code="unsupported_content",
        )
    for name, value in item.items():
        direct = name == "caller" and value == {"type": "direct"}
        if value and not direct and name not in FIELDS[kind] and name not in REMARKS:
            _not_known(where, name, FIELDS[kind], reading)
    made = _read_reasoning(where, item, notes, reading) if kind == "reasoning" else _MAKERS[kind](where, item, reading)
    if made is not None and kind != "item_reference":
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


def _known(where: str, given: dict[str, Any], known: Collection[str], reading: Reading) -> dict[str, Any]:
    """An object of an item without what nobody here knows."""
    for name, value in given.items():
        if name not in known and name not in REMARKS and value:
            _not_known(where, name, known, reading)
    return {name: value for name, value in given.items() if name in known}


def _text(where: str, item: dict[str, Any], name: str, optional: bool = False) -> Any:
    value = item.get(name)
    if value is None and optional:
        return None
    if not isinstance(value, str):
        said = "is missing" if value is None else "must be a string"
        raise BadRequest(f"{where}.{name} {said}", param=f"{where}.{name}")
    return value


def message(role: str, content: list[dict[str, Any]], id: str = "") -> Item:
    head = {"id": id or new_id("message"), "type": "message", "status": "completed"}
    return {**head, "role": role, "content": content}


def _read_message(where: str, item: dict[str, Any], reading: Reading) -> Item:
    role = _text(where, item, "role")
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    kinds = ("output_text", "refusal") if role == "assistant" else ("input_text",)
    return message(role, _parts(f"{where}.content", item.get("content"), kinds, reading))


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


def _read_custom(where: str, item: dict[str, Any], reading: Reading) -> Item:
    space = _text(where, item, "namespace", optional=True)
    return _head(where, item) | {
        "name": _text(where, item, "name"),
        **({"namespace": space} if space else {}),
        "input": _text(where, item, "input"),
    }


def _head(where: str, item: dict[str, Any]) -> Item:
    """What every call and every result has."""
    call = _text(where, item, "call_id", optional=True)
    if call is None:  # of old, a local shell's call and its result were tied by `id`
        call = _text(where, item, "id")
    return {"id": "", "type": item["type"], "status": "completed", "call_id": call}


def _read_action(where: str, item: dict[str, Any], reading: Reading) -> Item:
    name, known = ("command", EXEC) if item["type"] == "local_shell_call" else ("commands", COMMANDS)
    made = _head(where, item) | {"action": _known(f"{where}.action", _object(where, item, "action"), known, reading)}
    if not isinstance(made["action"].get(name), list):
        raise BadRequest(f"{where}.action.{name} must be a list of strings", param=f"{where}.action.{name}")
    if item["type"] == "shell_call":
        made["environment"] = item.get("environment") or {"type": "local"}
    return made


def _read_operation(where: str, item: dict[str, Any], reading: Reading) -> Item:
    operation = _known(f"{where}.operation", _object(where, item, "operation"), CHANGE, reading)
    made = _head(where, item) | {"operation": operation}
    if made["operation"].get("type") not in OPERATIONS:
        place = f"{where}.operation.type"
        raise BadRequest(f"{place} must be one of {', '.join(OPERATIONS)}", param=place)
    return made


def _read_search(where: str, item: dict[str, Any], reading: Reading) -> Item:
    arguments = item.get("arguments")
    return _searched(where, item) | {"arguments": {} if arguments is None else arguments}


def _searched(where: str, item: dict[str, Any]) -> Item:
    execution = item.get("execution") or "client"
    if execution not in ("client", "server"):
        raise BadRequest(f"{where}.execution must be client or server", param=f"{where}.execution")
    head: Item = {"id": "", "type": item["type"], "status": "completed", "execution": execution}
    call = _text(where, item, "call_id", optional=True)
    if call is None and execution == "client":
        raise BadRequest(f"{where}.call_id is missing", param=f"{where}.call_id")
    return head | {"call_id": call}


def _read_found(where: str, item: dict[str, Any], reading: Reading) -> Item:
    return _searched(where, item) | {"tools": _list(where, item, "tools")}


def _read_text_output(where: str, item: dict[str, Any], reading: Reading) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _parts(f"{where}.output", output, ("input_text",), reading)
    return _head(where, item) | {"output": output}


def _read_shell_output(where: str, item: dict[str, Any], reading: Reading) -> Item:
    output = _list(where, item, "output")
    if not all(isinstance(one, dict) for one in output):
        raise BadRequest(f"{where}.output must be a list of objects", param=f"{where}.output")
    output = [_known(f"{where}.output[{i}]", one, RUN, reading) for i, one in enumerate(output)]
    made = _head(where, item) | {"output": output}
    most = item.get("max_output_length")
    return made if most is None else made | {"max_output_length": most}


def _read_patch_output(where: str, item: dict[str, Any], reading: Reading) -> Item:
    if item.get("status") not in STATUSES:
        raise BadRequest(f"{where}.status must be {' or '.join(STATUSES)}", param=f"{where}.status")
    return _head(where, item) | {"status": item["status"], "output": _text(where, item, "output", optional=True)}


def _read_more_tools(where: str, item: dict[str, Any], reading: Reading) -> Item:
    return {"id": "", "type": "additional_tools", "role": "developer", "tools": _list(where, item, "tools")}


def _read_update(where: str, item: dict[str, Any], reading: Reading) -> Item:
    made: Item = {"id": "", "type": "configuration_update"}
    for name in ("reasoning", "text"):
        if item.get(name) is not None:
            made[name] = _object(where, item, name)
    return made


def _read_trigger(where: str, item: dict[str, Any], reading: Reading) -> Item:
    return {"id": "", "type": "compaction_trigger"}


def _read_compaction(where: str, item: dict[str, Any], reading: Reading) -> Item:
    return {"id": "", "type": "compaction", "encrypted_content": _text(where, item, "encrypted_content")}


def _object(where: str, item: dict[str, Any], name: str) -> dict[str, Any]:
    value = item.get(name)
    if not isinstance(value, dict):
        raise BadRequest(f"{where}.{name} must be an object", param=f"{where}.{name}")
    return value


def _list(where: str, item: dict[str, Any], name: str) -> list[Any]:
    value = item.get(name)
    if not isinstance(value, list):
        raise BadRequest(f"{where}.{name} must be a list", param=f"{where}.{name}")
    return value


def _read_reasoning(where: str, item: dict[str, Any], notes: dict[str, str], reading: Reading) -> Item | None:
    summary = _parts(f"{where}.summary", item.get("summary") or [], ("summary_text",), reading)
    content = _parts(f"{where}.content", item.get("content") or [], ("reasoning_text",), reading)
    sealed = _text(where, item, "encrypted_content", optional=True)
    if sealed and not content:
        text = unsealed(sealed, SEAL)
        if text is not None:
            content = [{"type": "reasoning_text", "text": text}]
        else:
            shown = "its summary is read in its place" if summary else "it is set aside"
            notes[f"{where}.encrypted_content"] = (
                f"reasoning that was not written by this server cannot be read; {shown}"
            )
            if not summary:
                return None
    return {"id": "", "type": "reasoning", "status": "completed", "summary": summary, "content": content}


def _read_reference(where: str, item: dict[str, Any], reading: Reading) -> Item:
    return {"type": "item_reference", "id": _text(where, item, "id")}


_MAKERS: dict[str, Callable[[str, dict[str, Any], Reading], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "custom_tool_call": _read_custom,
    "local_shell_call": _read_action,
    "shell_call": _read_action,
    "apply_patch_call": _read_operation,
    "tool_search_call": _read_search,
    "function_call_output": _read_text_output,
    "custom_tool_call_output": _read_text_output,
    "local_shell_call_output": _read_text_output,
    "shell_call_output": _read_shell_output,
    "apply_patch_call_output": _read_patch_output,
    "tool_search_output": _read_found,
    "additional_tools": _read_more_tools,
    "configuration_update": _read_update,
    "compaction": _read_compaction,
    "compaction_trigger": _read_trigger,
    "item_reference": _read_reference,
}


def seal(text: str, mark: bytes = SEAL) -> str:
    """A text as `encrypted_content`, for clients that send nothing else back. It is no secret here: only wrapped."""
    return base64.b64encode(mark + text.encode()).decode()


def unsealed(sealed: str, mark: bytes) -> str | None:
    """The text that `seal` wrapped; None where it was written by somebody else."""
    try:
        data = base64.b64decode(sealed, validate=True)
        return data[len(mark) :].decode() if data.startswith(mark) else None
    except (binascii.Error, ValueError):
        return None
