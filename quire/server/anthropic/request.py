"""Requests of Anthropic's Messages API: their fields, and the conversation, sampling parameters and tools made of them.

Owns the request structs and the tables of fields that are taken without effect. Messages and the texts of errors are
`turns.py`, tools `tools.py`, reasoning `thinking.py`, and what shortens a conversation `editing.py`. Notes on what has no effect are
collected here and told in answers. Knows nothing of answers or streams: those are `answers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from quire.engine.constraints.grammar import JSON_SCHEMA
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.server.anthropic.editing import ContextManagement, Edit, edits
from quire.server.anthropic.thinking import Thinking, keywords
from quire.server.anthropic.tools import ToolChoice, chosen
from quire.server.anthropic.turns import Turn, reworded, turns
from quire.server.served import Served
from quire.server.shared import bodies, conversation
from quire.server.shared.conversation import Conversation
from quire.server.shared.sampling import sampling

T = TypeVar("T", bound=msgspec.Struct)

IGNORED = frozenset({"cache_control"})  # prefixes are shared without being told
NEUTRAL: dict[str, tuple[object, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
}
# Hints on how to serve a request: the values that ask for nothing, and why any other has no effect here.
HINTS: dict[str, tuple[tuple[str, ...], str]] = {
    "service_tier": (("auto", "standard_only"), "every request is served alike"),
    "speed": (("standard",), "there is one speed"),
    "inference_geo": ((), "the model runs where this server does"),
}
_NULL = msgspec.Raw(b"null")


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config.format`, and `output_format` of its beta."""

    type: str
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`output_config`."""

    effort: str | None = None
    format: Format | None = None
    task_budget: msgspec.Raw = _NULL


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """`metadata`: taken, without effect."""

    user_id: str | None = None


class Prompt(msgspec.Struct, kw_only=True):
    """The fields that are counted by /v1/messages/count_tokens."""

    model: str
    messages: list[Turn]
    system: str | list[msgspec.Raw] | None = None
    tools: list[msgspec.Raw] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    service_tier: str | None = None
    speed: str | None = None
    inference_geo: str | None = None
    diagnostics: msgspec.Raw = _NULL
    context_management: ContextManagement | None = None

    def hints(self) -> list[str]:
        """What is sent and has no effect on any model, with the reason."""
        notes: list[str] = []
        for name, (usual, why) in HINTS.items():
            value = getattr(self, name)
            if value is not None and value not in usual:
                notes.append(f"{name} is {value[:64]!r}: {why}; no effect")
        if bytes(self.diagnostics) != b"null":
            notes.append("diagnostics: none are made here; no effect")
        if self.output_config is not None and bytes(self.output_config.task_budget) != b"null":
            notes.append("output_config.task_budget: no model here is told of it; no effect")
        return notes

    def constraint(self) -> Constraint | None:
        """What the answer's text must be."""
        asked, name = self.output_format, "output_format"
        if self.output_config is not None and self.output_config.format is not None:
            if asked is not None:
                raise BadRequest("output_format and output_config.format are the same: send one", param=name)
            asked, name = self.output_config.format, "output_config.format"
        if asked is None:
            return None
        if asked.type != "json_schema":
            raise BadRequest(f"{name}.type must be json_schema", param=f"{name}.type")
        return Constraint(kind=JSON_SCHEMA, text=bytes(asked.schema).decode(errors="replace"), param=name)


class MessagesRequest(Prompt, kw_only=True):
    """The fields of /v1/messages that are honoured."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    receipts: bool | None = None  # Quire's own
    metadata: Metadata | None = None

    def params(self, vocab_size: int) -> SamplingParams:
        """SamplingParams, range-checked."""
        given = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": tuple(self.stop_sequences or ()),
        }
        return sampling(given, vocab_size, names={"stop": "stop_sequences"})


def parse(body: bytes, shape: type[T]) -> T:
    """The request as `shape`, every field of it accounted for."""
    try:
        return bodies.parse(body, shape, IGNORED, NEUTRAL)
    except BadRequest as error:
        raise reworded(error) from None


def edits_of(served: Served, asked: Prompt) -> list[Edit]:
    """The edits that a request asks for."""
    try:
        return edits(asked.context_management, served.reading)
    except BadRequest as error:
        raise reworded(error) from None


def conversation_of(served: Served, asked: Prompt, notes: list[str]) -> Conversation:
    """The conversation that a request asks for. `notes` gets what of the request has no effect on this model."""
    try:
        said, references = turns(asked.messages, asked.system, notes, served.reading)
        tools = chosen(asked.tools, asked.tool_choice, references, notes, served.reading)
    except BadRequest as error:
        raise reworded(error) from None
    if not said:
        raise BadRequest("messages: at least one message is required", param="messages")
    last = said[-1]
    continues = last["role"] == "assistant"
    if continues and last.get("tool_calls"):
        raise BadRequest(
            "messages: the last message calls tools, and nothing answers it",
            cure="add tool_result blocks",
            param="messages",
        )
    thinking = asked.thinking
    if continues and thinking is not None and thinking.type == "enabled":
        if isinstance(asked, MessagesRequest):
            raise BadRequest("messages: thinking cannot go before an answer that has begun", param="messages")
        # Claude Code counts conversations that end with an answer, and asks for thinking as it always does.
        thinking = None
    effort = None if asked.output_config is None else asked.output_config.effort
    kwargs = keywords(served, thinking, effort, notes)
    return Conversation(said, tools, kwargs, continues=continues, notes=notes)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt, and what became of the edits that were to make it shorter."""

    tokens: list[int]
    before: int  # how many tokens there were before the edits
    applied: list[dict[str, Any]]  # edits that cleared something, as an answer tells them
    said: Conversation  # as it was rendered


async def encode(served: Served, said: Conversation, wanted: list[Edit]) -> Encoded:
    """Tokens of the conversation, through the model's own template, after the edits that clear something in it."""
    try:
        tokens = await conversation.encode(served, said)
        before, applied = len(tokens), []
        for edit in wanted:
            edited = edit.edited(said.turns, len(tokens))
            if edited is None:
                continue
            shorter = replace(said, turns=edited.turns)
            fewer = await conversation.encode(served, shorter)
            saved = len(tokens) - len(fewer)
            if saved >= edited.at_least:
                said, tokens = shorter, fewer
                applied.append({"type": edit.asked.type, **edited.cleared, "cleared_input_tokens": saved})
        return Encoded(tokens, before, applied, said)
    except BadRequest as error:
        if error.code == "context_length_exceeded":  # the words that clients look for
            error.message = f"prompt is too long: {error.message}"
            error.param = None
        raise


def room(served: Served, prompt: list[int]) -> int:
    """How many tokens the context leaves for the answer: at least one, or the prompt is refused."""
    most = served.info.context - 1
    if len(prompt) > most:
        raise BadRequest(f"prompt is too long: {len(prompt)} tokens > {most} maximum", code="context_length_exceeded")
    return most + 1 - len(prompt)
