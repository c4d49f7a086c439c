"""Messages in Anthropic's shape as turns for a template, and errors in the texts that Anthropic's clients look for.

A block is looked at one at a time and undecoded until its type is known. Results of tools, which come inside of user
messages, become turns of their own; turns of one role that follow each other are one, as they are for Anthropic. Places
are dotted (`messages.0.content.1.type`). Knows nothing of requests' other fields, answers or streams.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.chat.canonical import billing
from quire.observe.errors import BadRequest
from quire.server.reading import Reading
from quire.server.shared import bodies
from quire.server.shared.conversation import MAX_CALLS, History, arguments_text, check_count

ROLES = frozenset({"user", "assistant", "system"})
LATER = frozenset(
    {
        "redacted_thinking",
        "search_result",
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "container_upload",
    }
)
OWNERS = {"tool_use": "assistant", "thinking": "assistant", "tool_result": "user"}  # whose messages have such blocks
# Claude Code writes a line for its own accounting at the head of its system prompt. It is left out here, unasked: no model has a use for it, and where
# it changes, the whole prompt would be computed anew.
BILLING = "system: Claude Code's line x-anthropic-billing-header is no part of the prompt"
_INDEX = re.compile(r"\[(\d+)\]")
_NULL = msgspec.Raw(b"null")


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[msgspec.Raw]


class Block(msgspec.Struct):
    """Any content block."""

    type: str


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A text block, with what clients echo back from an answer."""

    type: str
    text: str
    cache_control: msgspec.Raw = _NULL  # any: it cannot change the tokens
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True):
    """Reasoning, sent back. Whatever its signature: there is nothing secret in it."""

    type: str
    thinking: str
    signature: str | None = None
    cache_control: msgspec.Raw = _NULL


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A call, sent back."""

    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: msgspec.Raw = _NULL
    caller: msgspec.Raw = _NULL
    toolset_name: str | None = None
    partial_json: str | None = None  # ours: the arguments of a call that was cut


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True):
    """What a tool answered."""

    type: str
    tool_use_id: str
    content: str | list[msgspec.Raw] | None = None
    is_error: bool | None = None
    cache_control: msgspec.Raw = _NULL
    toolset_name: str | None = None


class ToolReference(msgspec.Struct, forbid_unknown_fields=True):
    """In the result of a search for tools: one that was found."""

    type: str
    tool_name: str
    cache_control: msgspec.Raw = _NULL


def turns(
    messages: list[Turn], system: str | list[msgspec.Raw] | None, notes: list[str], reading: Reading
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The conversation for the template, which is empty where there are no messages; and the tools that results refer to, and where.
    `notes` gets what was left out."""
    check_count(messages)
    made: list[dict[str, Any]] = []
    history = History()
    references: dict[str, str] = {}
    if system is not None and messages:
        _add(made, {"role": "system", "content": _plain("system", system, notes, reading)})
    for i, turn in enumerate(messages):
        if turn.role not in ROLES:
            where = f"messages.{i}.role"
            raise BadRequest(f"{where}: must be one of {', '.join(sorted(ROLES))}", param=where)
        where = f"messages.{i}.content"
        if turn.role == "system":
            _add(made, {"role": "system", "content": _plain(where, turn.content, notes, reading)})
        elif isinstance(turn.content, str):
            _add(made, {"role": turn.role, "content": turn.content})
        elif turn.role == "user":
            _add_user(made, where, turn.content, history, references, reading)
        else:
            _add(made, _assistant(where, turn.content, history, reading))
    return made, references


def _add(made: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Put a turn at the end, or into the last one where both are the same side's."""
    role = turn["role"]
    if role == "system" and not turn["content"]:
        return  # nothing was said, or only what was left out
    last = made[-1] if made else None
    if last is None or last["role"] != role or role == "tool":
        made.append(turn)
        return
    last["content"] = "\n".join(text for text in (last["content"], turn["content"]) if text)
    if "reasoning_content" in turn:
        last["reasoning_content"] = "\n".join(
            text for text in (last.get("reasoning_content"), turn["reasoning_content"]) if text
        )
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", []), *turn["tool_calls"]]


def _add_user(
    made: list[dict[str, Any]],
    where: str,
    blocks: list[msgspec.Raw],
    history: History,
    references: dict[str, str],
    reading: Reading,
) -> None:
    """Results of tools and texts in their order; texts that follow each other are one turn."""
    if not blocks:
        _add(made, {"role": "user", "content": ""})
    for j, raw in enumerate(blocks):
        place = f"{where}.{j}"
        block = _block(place, raw, "user", reading)
        if isinstance(block, ToolResultBlock):
            text = _result(f"{place}.content", block, references, reading)
            _add(made, history.answered(f"{place}.tool_use_id", block.tool_use_id, text))
        elif isinstance(block, TextBlock):
            _add(made, {"role": "user", "content": block.text})


def _result(where: str, block: ToolResultBlock, references: dict[str, str], reading: Reading) -> str:
    """What a tool said; a tool that it found is its name. No template knows of errors, so a failure says so itself."""
    content = block.content or ""
    if isinstance(content, str):
        text = content
    else:
        text = "\n".join(_said(f"{where}.{k}", raw, references, reading) for k, raw in enumerate(content))
    if block.is_error and not text.lower().startswith("error"):
        return f"Error: {text}" if text else "Error"
    return text


def _said(where: str, raw: msgspec.Raw, references: dict[str, str], reading: Reading) -> str:
    """The text of a block in a result."""
    try:
        kind = bodies.decode(raw, Block).type
        found = bodies.decode(raw, ToolReference, where, reading) if kind == "tool_reference" else None
    except BadRequest as error:
        raise reworded(error, where) from None
    if found is None:
        return _text(where, raw, reading)
    references.setdefault(found.tool_name, f"{where}.tool_name")
    return found.tool_name


def _assistant(where: str, blocks: list[msgspec.Raw], history: History, reading: Reading) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for j, raw in enumerate(blocks):
        place = f"{where}.{j}"
        block = _block(place, raw, "assistant", reading)
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            if len(calls) == MAX_CALLS:
                raise BadRequest(f"{where}: at most {MAX_CALLS} calls are taken", param=where)
            arguments = block.partial_json or arguments_text(f"{place}.input", block.input)
            calls.append(history.called(place, block.id, block.name, arguments))
    made: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        made["reasoning_content"] = "\n".join(thoughts)
    return made | {"tool_calls": calls} if calls else made


def _plain(where: str, content: str | list[msgspec.Raw], notes: list[str], reading: Reading) -> str:
    """The text of a system prompt, without Claude Code's own line."""
    texts = (
        [content]
        if isinstance(content, str)
        else [_text(f"{where}.{j}", raw, reading) for j, raw in enumerate(content)]
    )
    stripped = [billing.without(text) for text in texts]
    if stripped != texts and BILLING not in notes:
        notes.append(BILLING)
    return "\n".join(text for text in stripped if text)


def _text(where: str, raw: msgspec.Raw, reading: Reading) -> str:
    block = _block(where, raw, None, reading)
    return block.text if isinstance(block, TextBlock) else ""


def _block(
    where: str, raw: msgspec.Raw, role: str | None, reading: Reading
) -> TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock:
    """A block, or a refusal that names it. `role` is whose message it is in; none: only text may be here."""
    shapes: dict[str, Any] = {"tool_use": ToolUseBlock, "tool_result": ToolResultBlock, "thinking": ThinkingBlock}
    try:
        kind = bodies.decode(raw, Block).type
        if kind == "text":
            block = bodies.decode(raw, TextBlock, where, reading)
            if not block.citations:
                return block
            raise BadRequest("citations: not supported yet", param="citations")
        if kind in shapes and role is not None and OWNERS[kind] == role:
            return bodies.decode(raw, shapes[kind], where, reading)
    except BadRequest as error:
        raise reworded(error, where) from None
    if kind in LATER:
        what = f"{kind} blocks are not supported yet"
    elif kind in OWNERS:
        what = f"{kind} blocks belong in messages of the role {OWNERS[kind]}"
    else:
        what = "this model takes text only, so type must be text"
    raise BadRequest(f"{where}.type: {what}", param=f"{where}.type", code="unsupported_content")


# Words


def dotted(path: str) -> str:
    """A field's place as Anthropic writes it: `messages.0.content`."""
    return _INDEX.sub(r".\1", path)


def reworded(error: BadRequest, under: str = "") -> BadRequest:
    """The same refusal with Anthropic's words and the whole place; `under` is where the value that was parsed lies."""
    if error.code == "invalid_json" or not (error.param or under):
        return error
    param = error.param or ""
    where = ".".join(part for part in (under, dotted(param)) if part)
    if error.code == "unknown_parameter" or "contains unknown field" in error.message:
        what, code = "Extra inputs are not permitted", "unknown_parameter"
    elif "missing required field" in error.message:
        what, code = "Field required", error.code
    else:
        what, code = error.message.removeprefix(f"{param}: "), error.code
        what = what.replace(param, where, 1) if param else what
    said = what if what.startswith(where) else f"{where}: {what}"
    return BadRequest(said, cure=error.cure, param=where, code=code)
