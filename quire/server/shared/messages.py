"""Messages in OpenAI's shape, which several dialects take, as turns for a template.

Owns the rules of `messages`: roles, content parts, calls and their results, reasoning that a client sends back. Media are
refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.observe.errors import BadRequest
from quire.server.reading import Reading
from quire.server.served import Served
from quire.server.shared.conversation import MAX_CALLS, History, arguments_text, check_count
from quire.server.shared.texts import arguments_with
from quire.server.shared.tools import at

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
ECHOED = ("refusal", "annotations", "audio", "function_call")  # of an answer: only empty ones are taken


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """One piece of a message's content. What holds media is known, so that a refusal of the type is what a client reads."""

    type: str
    text: str | None = None
    cache_control: msgspec.Raw = msgspec.Raw()  # of no effect: prefixes are shared without being told
    refusal: msgspec.Raw = msgspec.Raw()
    image_url: msgspec.Raw = msgspec.Raw()
    input_audio: msgspec.Raw = msgspec.Raw()
    video_url: msgspec.Raw = msgspec.Raw()
    file: msgspec.Raw = msgspec.Raw()


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. The fields after `name` are what clients send back of an answer, or in answer to one."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: list[msgspec.Raw] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    provider_specific_fields: Any = None  # litellm's notes on an answer, which it sends back: of no effect


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_calls[].function`."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_calls[]`."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None  # of a stream
    provider_specific_fields: Any = None  # litellm's notes, of no effect


class CalledText(msgspec.Struct, forbid_unknown_fields=True):
    """`tool_calls[].custom`."""

    name: str
    input: str


class TextCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call of a `custom` tool in `tool_calls[]`."""

    custom: CalledText
    type: str
    id: str | None = None
    index: int | None = None
    provider_specific_fields: Any = None


class _Kind(msgspec.Struct):
    type: str | None = None


def turns(served: Served, messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The conversation for the template."""
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    check_count(messages)
    # A template that was never taught "developer" would drop or refuse it; its meaning is "system".
    knows_developer = "developer" in str(getattr(served.completer.template, "source", ""))
    history = History()
    return [_turn(i, message, knows_developer, history, served.reading) for i, message in enumerate(messages)]


def _turn(i: int, message: ChatMessage, knows_developer: bool, history: History, reading: Reading) -> dict[str, Any]:
    where, role = f"messages[{i}]", message.role
    if role == "function":
        raise BadRequest(
            f"{where}.role: function messages are not supported", cure="send tool messages", param=f"{where}.role"
        )
    if role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    for name in ECHOED:
        if getattr(message, name):
            raise BadRequest(f"{where}.{name} is not supported", param=f"{where}.{name}", code="unsupported_content")
    for name, owner in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, name) and role != owner:
            place = f"{where}.{name}"
            raise BadRequest(f"{place}: only a message of the role {owner} has one", param=place)
    if role == "tool":
        if message.tool_call_id is None:
            raise BadRequest(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
        text = _content(where, message.content)
        return history.answered(f"{where}.tool_call_id", message.tool_call_id, text, message.name)
    body: dict[str, Any] = {"role": "system" if role == "developer" and not knows_developer else role}
    if role == "assistant" and message.content is None and (message.tool_calls or _reasoning(where, message)):
        body["content"] = ""
    else:
        body["content"] = _content(where, message.content)
    if message.name is not None:
        body["name"] = message.name
    if role == "assistant":
        if thought := _reasoning(where, message):
            body["reasoning_content"] = thought
        if message.tool_calls:
            body["tool_calls"] = _calls(where, message.tool_calls, history, reading)
    return body


def _reasoning(where: str, message: ChatMessage) -> str | None:
    """The reasoning that was sent back, under either of its names."""
    old, new = message.reasoning_content, message.reasoning
    if old and new and old != new:
        raise BadRequest(f"{where}: reasoning and reasoning_content differ: send one", param=f"{where}.reasoning")
    return old or new


def _calls(where: str, items: list[msgspec.Raw], history: History, reading: Reading) -> list[dict[str, Any]]:
    if len(items) > MAX_CALLS:
        raise BadRequest(
            f"{where}.tool_calls has {len(items)} items: at most {MAX_CALLS} are taken", param=f"{where}.tool_calls"
        )
    made: list[dict[str, Any]] = []
    for j, raw in enumerate(items):
        place = f"{where}.tool_calls[{j}]"
        kind = at(place, raw, _Kind).type
        if kind == "custom":
            said: TextCall = at(place, raw, TextCall, reading)
            text = arguments_with(said.custom.input)
            made.append(history.called(f"{place}.custom", said.id, said.custom.name, text))
            continue
        if kind not in (None, "function"):
            raise BadRequest(
                f"{place}.type is {kind[:64]!r}: only function and custom calls are supported",
                param=f"{place}.type",
                code="unsupported_content",
            )
        call: ToolCall = at(place, raw, ToolCall, reading)
        text = arguments_text(f"{place}.function.arguments", call.function.arguments)
        made.append(history.called(f"{place}.function", call.id, call.function.name, text))
    return made


def _content(where: str, content: str | list[Part] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
    texts: list[str] = []
    for j, part in enumerate(content):
        place = f"{where}.content[{j}]"
        if part.type != "text":
            raise BadRequest(
                f"{place}.type: this model takes text only, so type must be text",
                param=f"{place}.type",
                code="unsupported_content",
            )
        if part.text is None:
            raise BadRequest(f"{place}.text is missing", param=f"{place}.text")
        texts.append(part.text)
    return "\n".join(texts)
