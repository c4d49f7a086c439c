"""Messages and tool calls in Ollama's shape: arguments are objects, results name their tool or come in order.

Owns `messages` of /api/chat and how calls are told in an answer. A call is told whole, because its arguments are an object; one
that was cut has none, and is told under `quire.notes`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.chat.types import Call
from quire.observe.errors import BadRequest
from quire.server.shared.answers import arguments_of
from quire.server.shared.conversation import MAX_CALLS, History, arguments_text, check_count

ROLES = frozenset({"system", "user", "assistant", "tool"})


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_calls[].function`."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None
    description: str | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_calls[]`."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | None = None
    images: list[Any] | None = None
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def turns(messages: list[Message]) -> list[dict[str, Any]]:
    """The conversation for the template."""
    check_count(messages)
    history = History()
    return [_turn(f"messages[{i}]", message, history) for i, message in enumerate(messages)]


def _turn(where: str, message: Message, history: History) -> dict[str, Any]:
    role, text = message.role, message.content or ""
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    if message.images:
        place = f"{where}.images"
        raise BadRequest(f"{place}: this model takes text only", param=place, code="unsupported_content")
    for name, owner in (
        ("tool_calls", "assistant"),
        ("thinking", "assistant"),
        ("tool_name", "tool"),
        ("tool_call_id", "tool"),
    ):
        if getattr(message, name) and role != owner:
            raise BadRequest(f"{where}.{name}: only a message of the role {owner} has one", param=f"{where}.{name}")
    if role == "tool":
        # Calls have no ids in this API, and clients that come from another (litellm) keep those of the results alone.
        id = None if history.unnumbered else message.tool_call_id
        return history.answered(where, id or None, text, message.tool_name or None)
    made: dict[str, Any] = {"role": role, "content": text}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    calls = message.tool_calls or []
    if len(calls) > MAX_CALLS:
        raise BadRequest(f"{where}.tool_calls has {len(calls)} items: at most {MAX_CALLS}", param=f"{where}.tool_calls")
    if calls:
        made["tool_calls"] = [
            history.called(
                f"{where}.tool_calls[{j}].function",
                call.id,
                call.function.name,
                arguments_text(f"{where}.tool_calls[{j}].function.arguments", call.function.arguments),
            )
            for j, call in enumerate(calls)
        ]
    return made


def told(call: Call, index: int) -> dict[str, Any] | str:
    """A whole call as an answer has it; of one that was cut, a sentence."""
    arguments = arguments_of(call)
    if arguments is None:
        return f"the call of {call.name} was cut before its arguments were whole: {call.arguments}"
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}
