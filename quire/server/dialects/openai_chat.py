"""POST /v1/chat/completions, in OpenAI's shape with vLLM's extra fields.

Owns the request struct, the messages' rules and the two answers (a body, a stream). Text only for now: images, audio
and tools are refused by name. See docs/server.md for what each field does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Chunk
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server.dialects import _logprobs
from quire.server.dialects._fields import parse
from quire.server.dialects._openai import (
    Envelope,
    Sampling,
    Usage,
    check_open,
    check_prompt,
    check_text,
    collect,
    envelope,
    generation,
    receipt_body,
)
from quire.server.feed import Feed, News
from quire.server.limits import read_json
from quire.server.service import Service
from quire.server.sse import EventStream

ROLES = frozenset({"system", "developer", "user", "assistant"})
LATER = frozenset({"tool", "function"})
# Names that a template is given by us; a client's kwargs may not take their place.
RESERVED = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "return_dict"}
)


class Part(msgspec.Struct):
    """One piece of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message. The fields after `name` are what clients echo back from an answer; only empty ones are taken."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None


ECHOED = tuple(f.name for f in msgspec.structs.fields(ChatMessage)[3:])


class ChatRequest(Sampling, kw_only=True):
    """The fields of a chat request that are honoured."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
        prompt = await encode(service, asked.messages, asked.add_generation_prompt, asked.chat_template_kwargs)
        max_param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        check_prompt(service, prompt, sampling.max_tokens, "messages", max_param)
        feed = Feed(service, [generation(asked, prompt, sampling)], request.receive, arrived)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = envelope(service, asked, "chatcmpl", kind)
        if asked.stream:
            return EventStream(feed, _Stream(asked, head, prompt, sampling.n))
        return Response(await _whole(feed, asked, head, prompt), media_type="application/json")

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
    if asked.tools and asked.tool_choice != "none":
        raise BadRequest(
            "tools are not supported yet", cure="leave them out, or set tool_choice to none", param="tools"
        )
    if asked.tool_choice not in (None, "none", "auto"):
        raise BadRequest("tool_choice is not supported yet: only none and auto are taken", param="tool_choice")
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


async def encode(
    service: Service,
    messages: list[ChatMessage],
    add_generation_prompt: bool | None,
    template_kwargs: dict[str, Any] | None,
) -> list[int]:
    """Tokens of a conversation, through the model's own template."""
    if not messages:
        raise BadRequest("messages is empty", param="messages")
    check_open("chat_template_kwargs", template_kwargs)
    kwargs = dict(template_kwargs or {})
    for name in RESERVED & kwargs.keys():
        raise BadRequest(f"chat_template_kwargs may not set {name}", param="chat_template_kwargs")
    completer = service.ready()
    # A template that was never taught "developer" would drop or refuse it; its meaning is "system".
    knows_developer = "developer" in str(getattr(completer.template, "source", ""))
    rendered = [_message(i, m, knows_developer) for i, m in enumerate(messages)]
    check_text(service, "".join(m["content"] for m in rendered), "messages")
    kwargs["add_generation_prompt"] = True if add_generation_prompt is None else add_generation_prompt
    try:
        return await completer.encode_chat(rendered, **kwargs)
    except BadRequest as error:
        if error.param == "prompt":  # the text that the template wrote
            error.param = "messages"
        raise


def _message(i: int, message: ChatMessage, knows_developer: bool) -> dict[str, str]:
    where = f"messages[{i}]"
    if message.role in LATER:
        raise BadRequest(f"{where}.role: {message.role} messages are not supported yet", param=f"{where}.role")
    if message.role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(sorted(ROLES))}", param=f"{where}.role")
    for name in ECHOED:
        if getattr(message, name):
            raise BadRequest(f"{where}.{name} is not supported yet", param=f"{where}.{name}")
    role = "system" if message.role == "developer" and not knows_developer else message.role
    body = {"role": role, "content": _content(where, message.content)}
    return body if message.name is None else body | {"name": message.name}


def _content(where: str, content: str | list[Part] | None) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise BadRequest(f"{where}.content is missing", param=f"{where}.content")
    texts: list[str] = []
    for j, part in enumerate(content):
        at = f"{where}.content[{j}]"
        if part.type != "text":
            raise BadRequest(
                f"{at}.type: this model takes text only, so type must be text",
                param=f"{at}.type",
                code="unsupported_content",
            )
        if part.text is None:
            raise BadRequest(f"{at}.text is missing", param=f"{at}.text")
        texts.append(part.text)
    return "\n".join(texts)


async def _whole(feed: Feed, asked: ChatRequest, head: Envelope, prompt: list[int]) -> bytes:
    choices, prompt_logprobs = await collect(feed)
    usage = Usage([len(prompt)])
    body: list[dict[str, Any]] = []
    for (_, index), choice in sorted(choices.items()):
        usage.finish(index, choice.receipt, len(choice.tokens))
        item: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": {"content": _logprobs.chat(choice.logprobs), "refusal": None} if asked.logprobs else None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if asked.return_token_ids:
            item["token_ids"] = choice.tokens
        body.append(item)
    more: dict[str, Any] = {"usage": usage.body()}
    if asked.prompt_logprobs is not None:
        more["prompt_logprobs"] = _logprobs.prompt(prompt_logprobs.get(0, []), len(prompt))
    if asked.return_token_ids:
        more["prompt_token_ids"] = prompt
    if asked.receipts:
        more["quire"] = {"receipts": [receipt_body(i, c.receipt) for (_, i), c in sorted(choices.items())]}
    return msgspec.json.encode(head.wrap(body, **more))


class _Stream:
    """Chunks of a chat answer: a role for each choice, then text, then a finish reason, then usage if asked for."""

    def __init__(self, asked: ChatRequest, head: Envelope, prompt: list[int], n: int):
        self.asked = asked
        self.head = head
        self.prompt = prompt
        self.n = n
        self.usage = Usage([len(prompt)])
        self.delivered = [0] * n
        # With include_usage every chunk but the last has `usage: null`.
        self.more: dict[str, Any] = {"usage": None} if asked.wants_usage else {}

    def opening(self) -> Iterable[object]:
        more = self.more | ({"prompt_token_ids": self.prompt} if self.asked.return_token_ids else {})
        for index in range(self.n):
            yield self.head.wrap([_delta(index, {"role": "assistant", "content": ""})], **more)

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.delivered[chunk.index] += len(chunk.tokens)
            more = dict(self.more)
            if chunk.prompt_logprobs:
                more["prompt_logprobs"] = _logprobs.prompt(chunk.prompt_logprobs, len(self.prompt))
            says = chunk.text or chunk.finish or more.keys() - self.more.keys()
            if says or (chunk.logprobs and self.asked.logprobs) or (chunk.tokens and self.asked.return_token_ids):
                yield self._chunk(chunk, more)

    def _chunk(self, chunk: Chunk, more: dict[str, Any]) -> dict[str, Any]:
        item = _delta(chunk.index, {"content": chunk.text} if chunk.text else {})
        if self.asked.logprobs and chunk.logprobs:
            item["logprobs"] = {"content": _logprobs.chat(chunk.logprobs), "refusal": None}
        if self.asked.return_token_ids:
            item["token_ids"] = chunk.tokens
        if chunk.finish is not None:
            item["finish_reason"], item["stop_reason"] = chunk.finish, chunk.stop_reason
            self.usage.finish(chunk.index, chunk.receipt, self.delivered[chunk.index])
            if self.asked.receipts:
                more["quire"] = {"receipts": [receipt_body(chunk.index, chunk.receipt)]}
        return self.head.wrap([item], **more)

    def closing(self) -> Iterable[object]:
        if self.asked.wants_usage:
            yield self.head.wrap([], usage=self.usage.body())


def _delta(index: int, delta: dict[str, str]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
