"""POST /v1/chat/completions, in OpenAI's shape with vLLM's and llama.cpp's extra fields.

Owns the request struct and the rules between its fields. Messages are `_messages.py`, tools `_tools.py`, the way to the model
`_turns.py`, answers `_chat_answers.py`. See docs/server.md for what each field does.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server import limits
from quire.server.dialects import _turns
from quire.server.dialects._chat_answers import Stream, Wishes, whole
from quire.server.dialects._fields import parse
from quire.server.dialects._messages import ChatMessage, turns
from quire.server.dialects._openai import check_open, check_prompt, envelope, generation
from quire.server.dialects._tools import NOTHING, Raw, at, openai_choice, openai_tools
from quire.server.dialects._turns import Talk
from quire.server.feed import Feed
from quire.server.limits import read_json
from quire.server.service import Service
from quire.server.sse import EventStream

# Names that a template is given by us; a client's kwargs may not take their place.
RESERVED = frozenset(
    {
        *("self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize", "return_dict"),
    }
)
TIERS = (None, "auto", "default")
MAX_DOCUMENTS = 1024


class ChatRequest(Wishes, kw_only=True):
    """The fields of a chat request that are honoured."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = NOTHING
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Raw] | None = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """`prediction`: taken, and not used."""

    type: str
    content: str | list[dict[str, str]]


def register(app: FastAPI, service: Service) -> None:
    """Add the route."""

    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse(await read_json(request), ChatRequest)
        service.check_model(asked.model)
        service.generator()
        _check(asked)
        sampling = asked.params(
            service.info.vocab_size,
            max_tokens=_max_tokens(asked),
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        )
        talk = _talk(service, asked)
        prompt = await _turns.encode(service, talk)
        max_param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        check_prompt(service, prompt, sampling.max_tokens, "messages", max_param)
        made = generation(asked, prompt, sampling)
        reading, constraint = await _turns.answering(service, prompt, talk.tools, made.constraint)
        made = replace(made, reading=reading, constraint=constraint)
        feed = Feed(service, [made], request.receive, arrived)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = envelope(service, asked, "chatcmpl", kind)
        if asked.stream:
            return EventStream(feed, Stream(asked, head, prompt, sampling.n))
        return Response(await whole(feed, asked, head, prompt), media_type="application/json")

    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"], response_model=None)


def _check(asked: ChatRequest) -> None:
    asked.check()
    if asked.top_logprobs is not None:
        if not asked.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if not 0 <= asked.top_logprobs <= MAX_LOGPROBS:
            raise BadRequest(
                f"top_logprobs is {asked.top_logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="top_logprobs"
            )
    if asked.service_tier not in TIERS:
        raise BadRequest(
            "service_tier is not supported: the only accepted value is auto or default",
            param="service_tier",
            code="unsupported_parameter",
        )
    if (
        bytes(asked.prediction) not in (b"", b"null")
        and at("prediction", asked.prediction, Prediction).type != "content"
    ):
        raise BadRequest("prediction.type must be content", param="prediction.type")
    if asked.echo:
        raise BadRequest("echo is for /v1/completions", param="echo")
    if asked.add_special_tokens:
        raise BadRequest(
            "add_special_tokens is not supported here: the template writes them", param="add_special_tokens"
        )


def _max_tokens(asked: ChatRequest) -> int | None:
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(f"max_tokens is {old} but max_completion_tokens is {new}: send one", param="max_tokens")
    value = old if new is None else new
    if value is not None and value < 1:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise BadRequest(f"{name} is {value}: it must be at least 1", param=name)
    return value


def _talk(service: Service, asked: ChatRequest) -> Talk:
    """The conversation that a request asks for."""
    continues = bool(asked.continue_final_message)
    if continues and asked.messages and asked.messages[-1].role != "assistant":
        raise BadRequest(
            "continue_final_message needs the last message to be the assistant's", param="continue_final_message"
        )
    if continues and asked.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt contradict each other", param="continue_final_message"
        )
    kwargs = template_kwargs(asked.chat_template_kwargs)
    effort = asked.reasoning_effort
    if effort is not None:
        kwargs = _turns.thinking(service, None, effort, "reasoning_effort") | kwargs
    return Talk(
        turns(service, asked.messages),
        openai_choice(openai_tools(asked.tools), asked.tool_choice, asked.parallel_tool_calls),
        kwargs,
        asked.add_generation_prompt is not False,
        continues,
        _documents(asked.documents),
    )


def _documents(items: list[Raw] | None) -> list[dict[str, Any]] | None:
    if not items:
        return None
    if len(items) > MAX_DOCUMENTS:
        raise BadRequest(f"documents has {len(items)} items: at most {MAX_DOCUMENTS} are taken", param="documents")
    made: list[dict[str, Any]] = []
    for i, raw in enumerate(items):
        made.append(at(f"documents[{i}]", raw, dict[str, Any]))
        limits.bounded(f"documents[{i}]", made[-1])
    return made


def template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """`chat_template_kwargs`, checked."""
    check_open("chat_template_kwargs", given)
    kwargs = dict(given or {})
    for name in RESERVED & kwargs.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    return kwargs
