"""The request of POST /v1/responses: its fields, the rules between them, and the `Generation` made of them.

Sampling fields and constraints are those of chat completions (`shared/sampling.py`); `text.format` is the Responses API's own name for
one of them. A request becomes a `Prepared`: items, prompt and Generation, whether it is answered, streamed, counted or kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.chat.types import Generation
from quire.engine.constraints.grammar import JSON_OBJECT, JSON_SCHEMA
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest, NotFound
from quire.runner.params import MAX_LOGPROBS
from quire.server.openai import metadata
from quire.server.openai.responses import items as response_items
from quire.server.openai.responses import tools as response_tools
from quire.server.openai.responses.items import Item
from quire.server.openai.responses.stored import UNFINISHED, StoredResponses
from quire.server.openai.responses.tools import Toolset
from quire.server.reading import Reading
from quire.server.served import Served
from quire.server.shared import bodies, conversation, fitting
from quire.server.shared.bodies import Body
from quire.server.shared.conversation import Conversation, check_prompt, template_kwargs
from quire.server.shared.fitting import Fit
from quire.server.shared.sampling import Sampling, generation
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
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "image": (None,),
    "access_programs": (None,),
    "personality": (None,),
}
# Fields that the sampling structs have and this API writes otherwise, or not at all.
ELSEWHERE = {
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

    def constraint(self) -> Constraint | None:
        """The constraint that the answer must satisfy."""
        other = super().constraint()
        own = _format(self.text.format if self.text else None)
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
)
_BY_NAME = {field.name: field for field in msgspec.structs.fields(ResponseRequest)}
CountRequest = msgspec.defstruct(
    "CountRequest", [(name, _BY_NAME[name].type, _BY_NAME[name].default) for name in COUNTED], kw_only=True
)


def parse_count(body: Body) -> ResponseRequest:
    """A request to count, as the response that it would be."""
    counted = bodies.parse(body, CountRequest, IGNORED, NEUTRAL)
    return _checked(ResponseRequest(**{name: getattr(counted, name) for name in COUNTED}), body.reading)


def parse(body: Body) -> ResponseRequest:
    """The request, every field of it accounted for."""
    return _checked(bodies.parse(body, ResponseRequest, IGNORED, NEUTRAL), body.reading)


def _checked(asked: ResponseRequest, reading: Reading) -> ResponseRequest:
    for name, (_, cure) in ELSEWHERE.items():
        value = getattr(asked, name)
        if value is not None and value is not False and not (name == "n" and value == 1):
            refusal = BadRequest(f"{name} is not for this route", cure=cure, param=name, code="unsupported_parameter")
            reading.excuse(refusal)
            setattr(asked, name, None)
    if asked.truncation not in (None, "auto", "disabled"):
        raise BadRequest("truncation must be auto or disabled", param="truncation")
    if asked.text is not None:
        _only(reading, "text.verbosity", asked.text.verbosity, *VERBOSITIES)
        _format(asked.text.format)
    if asked.reasoning is not None:
        _only(reading, "reasoning.context", asked.reasoning.context, "auto", "all_turns")
        _only(reading, "reasoning.mode", asked.reasoning.mode, "standard")
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
    _only(reading, "service_tier", asked.service_tier, *TIERS)
    if asked.background and not asked.stored:
        raise BadRequest("background needs store to be true: nobody could ask for the answer", param="background")
    _only(reading, "reasoning.summary", asked.summary, *SUMMARIES)


def _only(reading: Reading, name: str, value: str | None, *allowed: str) -> None:
    if value is not None and value not in allowed:
        refusal = BadRequest(
            f"{name} is not supported: the only accepted value is {' or '.join(allowed)}",
            param=name,
            code="unsupported_parameter",
        )
        reading.excuse(refusal)


def _hints(served: Served, asked: ResponseRequest) -> dict[str, str]:
    """The fields of a request that ask for something this model cannot be told and that does not change what an answer is, with why."""
    made: dict[str, str] = {}
    effort = asked.reasoning.effort if asked.reasoning else None
    if effort is not None and (why := conversation.effort_ignored(served, effort)):
        made["reasoning.effort"] = why
    if asked.summary is not None and not conversation.reasons_apart(served):
        made["reasoning.summary"] = (
            f"{served.model.name} does not reason apart from its answers: there is nothing to tell"
        )
    elif asked.summary == "concise":
        refusal = BadRequest(
            "reasoning.summary must be auto or detailed: nothing here writes a shorter one than the reasoning itself",
            param="reasoning.summary",
            code="unsupported_parameter",
        )
        served.reading.excuse(refusal)
    if asked.text is not None and asked.text.verbosity not in (None, "medium"):
        made["text.verbosity"] = "a model here cannot be told how much to write but in words"
    if asked.service_tier not in (None, "auto", "default"):
        made["service_tier"] = "there is one tier"
    return made


def _format(asked: TextFormat | None) -> Constraint | None:
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


@dataclass(slots=True)
class Prepared:
    """A request, ready."""

    items: list[Item]  # the whole conversation
    new_from: int  # where the request's own input begins
    tools: Toolset
    prompt: list[int]
    no_effect: dict[str, str]  # what was asked for and changes nothing, with why
    said: Conversation  # as it went into the prompt

    @property
    def input(self) -> list[Item]:
        """The request's own items."""
        return self.items[self.new_from :]


async def prepare(served: Served, stored: StoredResponses, asked: ResponseRequest) -> Prepared:
    """The conversation and its prompt."""
    before: list[Item] = []
    if asked.previous_response_id is not None:
        before = await _before(stored, served.caller.owner, asked.previous_response_id)
    items = [
        *before,
        *[
            await _resolved(stored, served.caller.owner, i, item)
            for i, item in enumerate(response_items.read(asked.input, served.reading))
        ],
    ]
    if not items:
        raise BadRequest("input is missing", param="input")
    tools = response_tools.read(asked.tools or (), asked.tool_choice, asked.parallel_tool_calls, served.reading)
    kwargs = template_kwargs(asked.chat_template_kwargs)
    effort = asked.reasoning.effort if asked.reasoning else None
    no_effect = _hints(served, asked)
    if effort is not None and "reasoning.effort" not in no_effect:
        kwargs = conversation.thinking(served, None, effort, "reasoning.effort") | kwargs
    turns = response_items.turns(served, asked.instructions, items, len(before), tools.known_as)
    said = Conversation(turns, tools.choice, kwargs)
    fit = Fit("truncation", asked.max_output_tokens) if asked.truncation == "auto" else None
    prompt = await fitting.encode(served, said, fit, "input")
    return Prepared(items, len(before), tools, prompt, no_effect | tools.no_effect, said)


async def generated(served: Served, asked: ResponseRequest, ready: Prepared) -> Generation:
    """The Generation that the engine is asked for."""
    sampling = asked.params(
        served.info.vocab_size,
        max_tokens=asked.max_output_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.includes(LOGPROBS) else None,
    )
    check_prompt(served, ready.prompt, sampling.max_tokens, "input", "max_output_tokens")
    made = generation(asked, ready.prompt, sampling)
    reading, constraint = await conversation.answering(served, ready.prompt, ready.tools.choice, made.constraint)
    return replace(made, reading=reading, constraint=constraint, origin=ready.said.origin)


async def _before(stored: StoredResponses, owner: str, previous: str) -> list[Item]:
    """The conversation up to and in a stored response."""
    where = "previous_response_id"
    record = await stored.get(previous, owner)
    if record is not None and record.body["status"] in UNFINISHED:
        raise BadRequest(f"{where}: that response is still {record.body['status']}", param=where)
    if record is not None and record.body["status"] == "failed":
        raise BadRequest(f"{where}: that response failed", param=where)
    try:
        return await stored.context(previous, owner)
    except NotFound as error:
        raise BadRequest(f"{where}: {error}", param=where, code="previous_response_not_found") from None


async def _resolved(stored: StoredResponses, owner: str, i: int, item: Item) -> Item:
    if item["type"] != "item_reference":
        return item
    found = await stored.item(item["id"], owner)
    if found is None:
        place = f"input[{i}].id"
        raise BadRequest(f"{place}: there is no stored item {item['id'][:80]!r}", param=place, code="item_not_found")
    return found
