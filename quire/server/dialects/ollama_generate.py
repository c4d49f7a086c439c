"""POST /api/generate and /api/chat, as Ollama has them: JSON lines unless `stream` is false, and times in nanoseconds.

The times are measured: `load_duration` is what the request waited for the model, `prompt_eval_duration` and `eval_duration` are the
engine's own from the receipt, `total_duration` runs from the request's arrival. An empty prompt only waits for the model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Chunk, Generation
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server.dialects import _logprobs, _ollama
from quire.server.dialects._openai import check_prompt, encode_text, receipt_body
from quire.server.dialects.openai_chat import ChatMessage, encode
from quire.server.errors import Unimplemented
from quire.server.feed import Feed, News
from quire.server.service import Service
from quire.server.sse import LineStream

# What becomes of a conversation that does not fit. Nothing is cut here, and what does not fit is told.
IGNORED = frozenset({"truncate", "shift"})
NEUTRAL: dict[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "template": (None, ""),  # a template from a client is a program
    "images": (None, []),
    "tools": (None, []),
    "width": (None, 0),
    "height": (None, 0),
    "steps": (None, 0),
}


class Common(msgspec.Struct, kw_only=True):
    """The fields of both routes."""

    model: str | None = None
    stream: bool | None = None
    format: Any = None
    options: msgspec.Raw = msgspec.Raw(b"null")
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    receipts: bool | None = None  # Quire's own


class GenerateRequest(Common, kw_only=True):
    """The fields of /api/generate that are honoured."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[int] | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """One message; the fields after `content` are taken only when empty."""

    role: str
    content: str | None = None
    images: list[Any] | None = None
    thinking: str | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(Common, kw_only=True):
    """The fields of /api/chat that are honoured."""

    messages: list[Message] | None = None


GENERATE = {k: v for k, v in NEUTRAL.items() if k != "tools"}
CHAT = {"tools": NEUTRAL["tools"]}


@dataclass(slots=True)
class Clock:
    """When a request came, by time.monotonic(), and how long it waited for the model."""

    arrived: float = field(default_factory=time.monotonic)
    waited: float = 0.0


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def generate(request: Request) -> Response:
        clock = Clock()
        asked = _ollama.parse(await _ollama.read(request), GenerateRequest, IGNORED, GENERATE)
        options = await _begin(service, asked, clock)
        if not asked.prompt:
            return _only_loaded(service, asked, clock, {"response": ""})
        prompt = await _prompt(service, asked)
        say: Callable[[str], dict[str, Any]] = lambda text: {"response": text}  # noqa: E731
        return await _answer(service, request, asked, options, prompt, clock, "prompt", say, not asked.raw)

    async def chat(request: Request) -> Response:
        clock = Clock()
        asked = _ollama.parse(await _ollama.read(request), ChatRequest, IGNORED, CHAT)
        options = await _begin(service, asked, clock)
        if not asked.messages:
            return _only_loaded(service, asked, clock, {"message": {"role": "assistant", "content": ""}})
        prompt = await encode(service, _messages(asked.messages), True, _thoughtless(service, asked))
        say: Callable[[str], dict[str, Any]] = lambda text: {"message": {"role": "assistant", "content": text}}  # noqa: E731
        return await _answer(service, request, asked, options, prompt, clock, "messages", say, False)

    app.add_api_route("/api/generate", generate, methods=["POST"], response_model=None)
    app.add_api_route("/api/chat", chat, methods=["POST"], response_model=None)


async def _begin(service: Service, asked: Common, clock: Clock) -> _ollama.Options:
    """What both routes check before anything is computed; waits for a model that is still loading, as Ollama does."""
    _ollama.check_model(service, asked.model)
    options = _ollama.read_options(asked.options)
    _ollama.constraint(asked.format)
    _ollama.check_think(service, asked.think)
    _ollama.seconds(asked.keep_alive)
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (asked.top_logprobs or 0) <= MAX_LOGPROBS:
        raise BadRequest(
            f"top_logprobs is {asked.top_logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="top_logprobs"
        )
    began = time.monotonic()
    await service.loaded()
    service.generator()
    clock.waited = time.monotonic() - began
    return options


def _only_loaded(service: Service, asked: Common, clock: Clock, empty: dict[str, Any]) -> Response:
    """The answer to nothing: the model is loaded. It is never unloaded, so asking for that is refused."""
    if _ollama.seconds(asked.keep_alive) == 0:
        raise Unimplemented(
            f"keep_alive is 0: {service.name} stays loaded for as long as its server runs",
            cure="stop the server to free its memory",
            param="keep_alive",
        )
    return _ollama.answer(
        {
            "model": asked.model,
            "created_at": _ollama.now(),
            **empty,
            "done": True,
            "done_reason": "load",
            "total_duration": _ollama.nanoseconds(time.monotonic() - clock.arrived),
            "load_duration": _ollama.nanoseconds(clock.waited),
            **_notes(service, asked),
        }
    )


def _notes(service: Service, asked: Common) -> dict[str, Any]:
    """What the client asked of the model's memory and did not get."""
    wanted = _ollama.seconds(asked.keep_alive)
    if wanted is None or wanted < 0:
        return {}
    return {"quire": {"notes": [f"keep_alive: {service.name} stays loaded for as long as its server runs"]}}


async def _prompt(service: Service, asked: GenerateRequest) -> list[int]:
    """Tokens of /api/generate: what went before, then the new text as the model's template writes it."""
    text, before = asked.prompt or "", asked.context or []
    completer = service.ready()
    if asked.raw:
        for name in ("system", "context"):
            if getattr(asked, name):
                raise BadRequest(f"{name} has no place in a raw prompt", cure="write it into the prompt", param=name)
        return await encode_text(service, text, "prompt")
    if completer.template is None:
        if asked.system:
            raise BadRequest(
                f"{service.name} has no chat template: it continues text, and has no place for system", param="system"
            )
        turn = await encode_text(service, text, "prompt", None if not before else False)
    else:
        messages = [ChatMessage("system", asked.system)] if asked.system else []
        messages.append(ChatMessage("user", text))
        turn = await encode(service, messages, True, _thoughtless(service, asked))
        bos = getattr(completer.tokenizer, "bos_id", None)
        if before and turn[:1] == [bos]:
            turn = turn[1:]  # only the first text begins
    return [*before, *turn]


def _thoughtless(service: Service, asked: Common) -> dict[str, Any] | None:
    """`think: false`, for a template that knows the word."""
    knows = "enable_thinking" in str(getattr(service.ready().template, "source", ""))
    return {"enable_thinking": False} if asked.think is False and knows else None


def _messages(given: list[Message]) -> list[ChatMessage]:
    for i, message in enumerate(given):
        for name in ("images", "thinking", "tool_calls", "tool_name", "tool_call_id"):
            if getattr(message, name):
                at = f"messages[{i}].{name}"
                raise BadRequest(f"{at} is not supported yet", param=at, code="unsupported_content")
    return [ChatMessage(message.role, message.content or "") for message in given]


async def _answer(
    service: Service,
    request: Request,
    asked: Common,
    options: _ollama.Options,
    prompt: list[int],
    clock: Clock,
    param: str,
    say: Callable[[str], dict[str, Any]],
    with_context: bool,
) -> Response:
    """The answer to a prompt: lines, or one object."""
    check_prompt(service, prompt, None, param, "options.num_predict")
    context = _ollama.context_of(service, options)
    if len(prompt) >= context:
        raise BadRequest(
            f"{param} has {len(prompt)} tokens: options.num_ctx is {context}, and at least one is for the answer",
            cure="nothing is ever cut: shorten it, or send a larger num_ctx",
            param=param,
            code="context_length_exceeded",
        )
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    sampling = _ollama.params(options, service.info.vocab_size, context - len(prompt), logprobs)
    made = Generation(secrets.token_hex(12), prompt, sampling, constraint=_ollama.constraint(asked.format))
    feed = Feed(service, [made], request.receive, clock.arrived)
    lines = _Lines(asked, prompt, clock, say, with_context, _notes(service, asked))
    if asked.stream is None or asked.stream:
        return LineStream(feed, lines)
    parts: list[Chunk] = []
    async with feed:
        async for items in feed.batches():
            parts += [lines.take(chunk) for _, chunk in items]
    entries = [entry for chunk in parts for entry in chunk.logprobs]
    return _ollama.answer(lines.last("".join(chunk.text for chunk in parts), _logprobs.chat(entries)))


class _Lines:
    """Lines of an answer: one for each piece of text, and a last one with the reason, the counts and the times."""

    def __init__(
        self,
        asked: Common,
        prompt: list[int],
        clock: Clock,
        say: Callable[[str], dict[str, Any]],
        with_context: bool,
        notes: dict[str, Any],
    ):
        self.asked = asked
        self.prompt = prompt
        self.clock = clock
        self.say = say
        self.with_context = with_context
        self.notes = notes
        self.tokens: list[int] = []
        self.end = Chunk()

    def take(self, chunk: Chunk) -> Chunk:
        """Account for a chunk."""
        self.tokens += chunk.tokens
        if chunk.finish is not None:
            self.end = chunk
        return chunk

    def opening(self) -> Iterable[object]:
        return ()

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.take(chunk)
            if chunk.text or (chunk.logprobs and self.asked.logprobs):
                body = {"model": self.asked.model, "created_at": _ollama.now(), **self.say(chunk.text), "done": False}
                if self.asked.logprobs:
                    body["logprobs"] = _logprobs.chat(chunk.logprobs)
                yield body

    def closing(self) -> Iterable[object]:
        yield self.last("", [])

    def last(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        """The line that ends an answer, with `text` where there were no others."""
        body: dict[str, Any] = {"model": self.asked.model, "created_at": _ollama.now(), **self.say(text), "done": True}
        body["done_reason"] = self.end.finish
        if self.with_context:
            body["context"] = [*self.prompt, *self.tokens]
        if logprobs and self.asked.logprobs:
            body["logprobs"] = logprobs
        body["total_duration"] = _ollama.nanoseconds(time.monotonic() - self.clock.arrived)
        body["load_duration"] = _ollama.nanoseconds(self.clock.waited)
        body["prompt_eval_count"] = len(self.prompt)
        body["eval_count"] = len(self.tokens)
        if (receipt := self.end.receipt) is not None:
            body["prompt_eval_duration"] = _ollama.nanoseconds(receipt.prefill_seconds)
            body["eval_duration"] = _ollama.nanoseconds(receipt.decode_seconds)
        told = dict(self.notes.get("quire", {}))
        if self.asked.receipts:
            told["receipts"] = [receipt_body(0, self.end.receipt)]
        return body | ({"quire": told} if told else {})
