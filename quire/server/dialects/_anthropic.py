"""What an Anthropic request may say, and the conversation and sampling it means.

Owns the request structs, the table of fields that are taken without effect, and every refusal in Anthropic's words
(`messages.0.content.1.type: …`, "Field required", "Extra inputs are not permitted"). A block is looked at one at a time
and undecoded until its type is known. Knows nothing of answers or streams: those are `anthropic.py`.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.server import limits
from quire.server.dialects import _fields
from quire.server.dialects._openai import check_text
from quire.server.service import Service

T = TypeVar("T", bound=msgspec.Struct)

ROLES = frozenset({"user", "assistant", "system"})
LATER = frozenset(
    {
        "tool_use",
        "tool_result",
        "thinking",
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

IGNORED = frozenset({"cache_control"})  # prefixes are shared without being told
NEUTRAL: dict[str, tuple[object, ...]] = {
    "thinking": (None, {"type": "disabled"}),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
    "output_config": (None, {}),
    "output_format": (None,),
    "container": (None,),
    "context_management": (None,),
    "diagnostics": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
}
# Claude Code writes a line about itself at the head of its system prompt. It differs in every request, so leaving it in
# would compute the whole prompt anew each time.
_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
_INDEX = re.compile(r"\[(\d+)\]")


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: str
    content: str | list[msgspec.Raw]


class ToolChoice(msgspec.Struct):
    """`tool_choice`, as far as it matters while tools are refused."""

    type: str


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata`: taken, without effect."""

    user_id: str | None = None


class Block(msgspec.Struct):
    """Any content block."""

    type: str


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A text block, with what clients echo back from an answer."""

    type: str
    text: str
    cache_control: msgspec.Raw = msgspec.Raw(b"null")  # any: it cannot change the tokens
    citations: list[Any] | None = None


class Prompt(msgspec.Struct, kw_only=True):
    """What is counted: the fields of /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[msgspec.Raw] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: ToolChoice | None = None


class MessagesRequest(Prompt, kw_only=True):
    """The fields of /v1/messages that are honoured."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None

    def params(self, vocab_size: int) -> SamplingParams:
        """SamplingParams, range-checked."""
        asked = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        try:
            return SamplingParams(
                max_tokens=self.max_tokens,
                stop=tuple(self.stop_sequences or ()),
                **{k: v for k, v in asked.items() if v is not None},  # type: ignore[arg-type]
            ).validate(vocab_size)
        except BadRequest as error:
            if error.param == "stop":
                error.param = "stop_sequences"
            raise


def parse(body: bytes, shape: type[T]) -> T:
    """The request as `shape`, every field of it accounted for."""
    try:
        return _fields.parse(body, shape, IGNORED, NEUTRAL)
    except BadRequest as error:
        raise _reworded(error) from None


def dotted(path: str) -> str:
    """A field's place as Anthropic writes it: `messages.0.content`."""
    return _INDEX.sub(r".\1", path)


async def encode(service: Service, asked: Prompt) -> list[int]:
    """Tokens of the conversation, through the model's own template."""
    _check_tools(asked)
    turns = _turns(asked)
    if not turns:
        raise BadRequest("messages: at least one message is required", param="messages")
    if turns[-1]["role"] == "assistant":
        raise BadRequest(
            "messages: continuing an assistant message (prefill) is not supported yet",
            cure="end with a user message",
            param="messages",
        )
    try:
        check_text(service, "".join(turn["content"] for turn in turns), "messages")
        return await service.ready().encode_chat(turns, add_generation_prompt=True)
    except BadRequest as error:
        if error.code == "context_length_exceeded":  # the words that clients look for
            error.message = f"prompt is too long: {error.message}"
        if error.param in ("prompt", "messages"):
            error.param = None if error.code == "context_length_exceeded" else "messages"
        raise


def room(service: Service, prompt: list[int]) -> int:
    """How many tokens the context leaves for the answer: at least one, or the prompt is refused."""
    most = service.info.context - 1
    if len(prompt) > most:
        raise BadRequest(f"prompt is too long: {len(prompt)} tokens > {most} maximum", code="context_length_exceeded")
    return most + 1 - len(prompt)


def _check_tools(asked: Prompt) -> None:
    choice = None if asked.tool_choice is None else asked.tool_choice.type
    if asked.tools and choice != "none":
        raise BadRequest(
            "tools are not supported yet", cure="leave them out, or set tool_choice to none", param="tools"
        )
    if choice not in (None, "none", "auto"):
        raise BadRequest("tool_choice is not supported yet: only none and auto are taken", param="tool_choice")


def _turns(asked: Prompt) -> list[dict[str, str]]:
    """Messages for the template. Turns of one role that follow each other are one, as they are for Anthropic."""
    said: list[tuple[str, str]] = []
    if asked.system is not None:
        said.append(("system", _text("system", asked.system, billed=True)))
    if not asked.messages:
        return []
    for i, turn in enumerate(asked.messages):
        if turn.role not in ROLES:
            where = f"messages.{i}.role"
            raise BadRequest(f"{where}: must be one of {', '.join(sorted(ROLES))}", param=where)
        said.append((turn.role, _text(f"messages.{i}.content", turn.content, billed=turn.role == "system")))
    turns: list[dict[str, str]] = []
    for role, text in said:
        if role == "system" and not text:
            continue  # nothing was said, or only what was left out
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += "\n" + text
        else:
            turns.append({"role": role, "content": text})
    return turns


def _text(where: str, content: str | list[msgspec.Raw], *, billed: bool) -> str:
    """The text of a message or a system prompt; `billed` is one that may begin with Claude Code's own line."""
    texts = [content] if isinstance(content, str) else [_block(f"{where}.{j}", raw) for j, raw in enumerate(content)]
    if not billed:
        return "\n".join(texts)
    stripped = [_BILLING.sub("", text, count=1) if _BILLING.match(text) else text for text in texts]
    return "\n".join(text for text in stripped if text)


def _block(where: str, raw: msgspec.Raw) -> str:
    """The text of a block, or a refusal that names it."""
    try:
        kind = limits.parse(raw, Block).type
        if kind == "text":
            block = limits.parse(raw, TextBlock)
            if not block.citations:
                return block.text
            raise BadRequest("citations: not supported yet", param="citations")
    except BadRequest as error:
        raise _reworded(error, where) from None
    if kind in LATER:
        what = f"{kind} blocks are not supported yet"
    else:
        what = "this model takes text only, so type must be text"
    raise BadRequest(f"{where}.type: {what}", param=f"{where}.type", code="unsupported_content")


def _reworded(error: BadRequest, under: str = "") -> BadRequest:
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
    said = what if what.startswith(where) else f"{where}: {what}"
    return BadRequest(said, cure=error.cure, param=where, code=code)
