"""The fields of requests to POST /v1/responses and its siblings, and the rules between them. `request.py` makes a prompt of them.

Sampling fields and constraints are those of chat completions (`shared/sampling.py`); `text.format` is the Responses API's own name for
one of them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.engine.constraints.grammar import JSON_OBJECT, JSON_SCHEMA
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server.openai import metadata
from quire.server.reading import Reading
from quire.server.shared import bodies
from quire.server.shared.bodies import Body
from quire.server.shared.sampling import Sampling
from quire.server.shared.tools import NOTHING, Raw, at

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# The others ask for parts of tools and media that are not here, so there is nothing to include.
INCLUDES = (
    *(LOGPROBS, SEALED, "file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
IGNORED = {
    "prompt_cache_options": "prefixes are found without being told",
    "client_metadata": "the client's own notes, such as Codex's; they are not kept",
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "moderation": (None,),
    "image": (None,),
    "access_programs": (None,),
    "personality": (None,),
}
# Fields that this API has and that name something on OpenAI's side; and those that the sampling structs have and this API writes otherwise.
ELSEWHERE = {
    "conversation": ("conv_1", "there are no conversations here: follow a response by previous_response_id"),
    "prompt": ({"id": "pmpt_1"}, "there are no prompt templates here: send their text as instructions and input"),
    "max_tokens": (5, "send max_output_tokens"),  # a value that is refused, and the cure
    "response_format": ({"type": "json_object"}, "send text.format"),
    "n": (2, "send the request several times"),
    "prompt_logprobs": (0, "use /v1/chat/completions"),
    "return_token_ids": (True, "use /v1/chat/completions"),
    "request_id": ("x", "ids are the server's own here"),
    "truncate_prompt_tokens": (5, "send truncation: auto"),
    "truncation_side": ("left", "send truncation: auto"),
}
# Values of fields that are hints: known ones are taken, and the answer says which have no effect.
VERBOSITIES = ("medium", "low", "high")
TIERS = ("default", "auto", "flex", "priority", "scale", "fast")
SUMMARIES = ("auto", "detailed", "concise")
MAX_NAME = 512  # characters of user, prompt_cache_key and the like


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`text.format`. A schema is always enforced, so `strict` changes nothing."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: Raw = NOTHING
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its old name
    context: str | None = None
    mode: str | None = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of `context_management`."""

    type: str
    compact_threshold: int | None = None


class ResponseRequest(Sampling, kw_only=True):
    """The fields that are honoured."""

    input: str | list[Raw] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = NOTHING
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    context_management: list[ContextManagement] | None = None
    conversation: Any = None
    prompt: Any = None

    def constraint(self) -> Constraint | None:
        """The constraint that the answer must satisfy."""
        other = super().constraint()
        own = format_of(self.text.format if self.text else None)
        if own is not None and other is not None:
            raise BadRequest(f"text.format and {other.param} both say what the answer must be", param=other.param)
        return own or other

    @property
    def stored(self) -> bool:
        """Whether the answer is stored, which it is unless the request says otherwise."""
        return self.store is not False

    def includes(self, name: str) -> bool:
        """Whether that part of the answer is asked for."""
        return name in (self.include or ())

    @property
    def summary(self) -> str | None:
        """The kind of summary of the reasoning that is asked for."""
        return (self.reasoning.summary or self.reasoning.generate_summary) if self.reasoning else None


# Those of its fields that make a prompt, which is all that counting its tokens takes.
COUNTED = (
    "model",
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "truncation",
    "chat_template_kwargs",
    "conversation",
)
_BY_NAME = {field.name: field for field in msgspec.structs.fields(ResponseRequest)}
CountRequest = msgspec.defstruct(
    "CountRequest", [(name, _BY_NAME[name].type, _BY_NAME[name].default) for name in COUNTED], kw_only=True
)


COMPACTED = (
    *(
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
    ),
    *("tools", "parallel_tool_calls", "reasoning", "text", "max_output_tokens"),  # the last line: as Codex sent them
)
CompactRequest = msgspec.defstruct(
    "CompactRequest", [(name, _BY_NAME[name].type, _BY_NAME[name].default) for name in COMPACTED], kw_only=True
)


def parse_count(body: Body) -> ResponseRequest:
    """A request to count, as the response that it would be."""
    counted = bodies.parse(body, CountRequest, IGNORED, NEUTRAL)
    return _checked(ResponseRequest(**{name: getattr(counted, name) for name in COUNTED}), body.reading)


def parse(body: Body) -> ResponseRequest:
    """The request, every field of it accounted for."""
    return _checked(bodies.parse(body, ResponseRequest, IGNORED, NEUTRAL), body.reading)


def parse_compact(body: Body) -> ResponseRequest:
    """A request to compact, as the response that would."""
    given = bodies.parse(body, CompactRequest, IGNORED, NEUTRAL)
    return _checked(ResponseRequest(**{name: getattr(given, name) for name in COMPACTED}, store=False), body.reading)


def _checked(asked: ResponseRequest, reading: Reading) -> ResponseRequest:
    for name, (_, cure) in ELSEWHERE.items():
        value = getattr(asked, name)
        if value is not None and value is not False and not (name == "n" and value == 1):
            refusal = BadRequest(f"{name} is not for this route", cure=cure, param=name, code="unsupported_parameter")
            reading.excuse(refusal)
            setattr(asked, name, None)
    for entry in asked.context_management or ():
        only(reading, "context_management.type", entry.type, "compaction")
    if asked.truncation not in (None, "auto", "disabled"):
        raise BadRequest("truncation must be auto or disabled", param="truncation")
    if asked.text is not None:
        only(reading, "text.verbosity", asked.text.verbosity, *VERBOSITIES)
        format_of(asked.text.format)
    if asked.reasoning is not None:
        only(reading, "reasoning.context", asked.reasoning.context, "auto", "all_turns")
        only(reading, "reasoning.mode", asked.reasoning.mode, "standard")
    return asked


def check(asked: ResponseRequest, reading: Reading) -> None:
    """Rules between fields."""
    asked.check(reading)
    metadata.check(asked.metadata)
    for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"):
        value = getattr(asked, name)
        if value is not None and len(value) > MAX_NAME:
            raise BadRequest(f"{name} has over {MAX_NAME} characters", param=name)
    for value in asked.include or ():
        if value not in INCLUDES:
            raise BadRequest(f"include has {value[:64]!r}: it may have {', '.join(INCLUDES)}", param="include")
    if asked.top_logprobs is not None and not 0 <= asked.top_logprobs <= MAX_LOGPROBS:
        raise BadRequest(
            f"top_logprobs is {asked.top_logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="top_logprobs"
        )
    if asked.top_logprobs and not asked.includes(LOGPROBS):
        raise BadRequest(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    if asked.max_output_tokens is not None and asked.max_output_tokens < 1:
        raise BadRequest(
            f"max_output_tokens is {asked.max_output_tokens}: it must be at least 1", param="max_output_tokens"
        )
    if asked.max_tool_calls is not None and asked.max_tool_calls < 1:
        raise BadRequest("max_tool_calls must be at least 1", param="max_tool_calls")
    only(reading, "service_tier", asked.service_tier, *TIERS)
    if asked.background and not asked.stored:
        raise BadRequest("background needs store to be true: nobody could ask for the answer", param="background")
    only(reading, "reasoning.summary", asked.summary, *SUMMARIES)


def only(reading: Reading, name: str, value: str | None, *allowed: str) -> None:
    if value is not None and value not in allowed:
        refusal = BadRequest(
            f"{name} is not supported: the only accepted value is {' or '.join(allowed)}",
            param=name,
            code="unsupported_parameter",
        )
        reading.excuse(refusal)


def format_of(asked: TextFormat | None) -> Constraint | None:
    where = "text.format"
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Constraint(kind=JSON_OBJECT, param=where)
    if asked.type != "json_schema":
        raise BadRequest(f"{where}.type must be text, json_object or json_schema", param=f"{where}.type")
    if bytes(asked.schema) in (b"", b"null"):
        raise BadRequest(f"{where}.schema is missing", param=f"{where}.schema")
    if not asked.name:
        raise BadRequest(f"{where}.name is missing", param=f"{where}.name")
    schema_of(asked)
    return Constraint(kind=JSON_SCHEMA, text=bytes(asked.schema).decode(errors="replace"), param=where)


def schema_of(asked: TextFormat) -> dict[str, Any]:
    """The schema as an object, bounded. Whether it can be enforced is the engine's answer."""
    where = "text.format.schema"
    schema = at(where, asked.schema, object)
    if not isinstance(schema, dict):
        raise BadRequest(f"{where} must be an object", param=where)
    bodies.bounded(where, schema)
    return schema
