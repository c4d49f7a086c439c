"""POST /api/generate and /api/chat, as Ollama has them: JSON lines unless `stream` is false, and times in nanoseconds.

The times are measured: `load_duration` is what the request waited for the model, `prompt_eval_duration` and `eval_duration` are the
engine's own from the receipt, `total_duration` runs from the request's arrival. An empty prompt only waits for the model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.tools.types import Tools
from quire.chat.types import Chunk, Generation
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server.dialects import _logprobs, _ollama, _ollama_created, _turns
from quire.server.dialects._answers import Calls
from quire.server.dialects._infill import gap
from quire.server.dialects._ollama_turns import Message, turns
from quire.server.dialects._ollama_turns import told as tell_call
from quire.server.dialects._openai import Partial, check_prompt, encode_text, receipt_body
from quire.server.dialects._tools import NO_TOOLS, choose, openai_tools
from quire.server.dialects._turns import Talk
from quire.server.errors import Unimplemented
from quire.server.feed import Feed, News
from quire.server.replies import reply
from quire.server.service import Service
from quire.server.sse import LineStream
from quire.weights.store.manifest import Defaults

# What becomes of a conversation that does not fit. Nothing is cut here, and what does not fit is told.
IGNORED = frozenset({"truncate", "shift"})
NEUTRAL: dict[str, tuple[object, ...]] = {
    "template": (None, ""),  # a template from a client is a program
    "images": (None, []),
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
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[int] | None = None


class ChatRequest(Common, kw_only=True):
    """The fields of /api/chat that are honoured."""

    messages: list[Message] | None = None
    tools: list[msgspec.Raw] | None = None


@dataclass(slots=True)
class Clock:
    """When a request came, by time.monotonic(), and how long it waited for the model."""

    arrived: float = field(default_factory=time.monotonic)
    waited: float = 0.0


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def generate(request: Request) -> Response:
        clock = Clock()
        asked = _ollama.parse(await _ollama.read(request), GenerateRequest, IGNORED, NEUTRAL)
        options, made = await _begin(service, asked, clock)
        if not asked.prompt:
            return _only_loaded(service, asked, clock, {"response": ""})
        if asked.suffix:
            prompt, ends = await _filling(service, asked)
            lines = _Lines(service, asked, prompt, clock, False, chat=False)
            return await _answer(service, request, lines, options, None, "prompt", ends)
        prompt = await _prompt(service, asked, made)
        lines = _Lines(service, asked, prompt, clock, not asked.raw, chat=False)
        reads = not asked.raw and service.ready().template is not None  # a raw prompt's answer is told as it comes
        return await _answer(service, request, lines, options, NO_TOOLS if reads else None, "prompt")

    async def chat(request: Request) -> Response:
        clock = Clock()
        asked = _ollama.parse(await _ollama.read(request), ChatRequest, IGNORED)
        options, made = await _begin(service, asked, clock)
        if not asked.messages:
            return _only_loaded(service, asked, clock, {"message": {"role": "assistant", "content": ""}})
        tools = choose(openai_tools(asked.tools), None)
        said = _ollama_created.conversation(made, turns(asked.messages))
        talk = Talk(said, tools, _ollama.thinking(service, asked.think))
        prompt = await _turns.encode(service, talk)
        lines = _Lines(service, asked, prompt, clock, False, chat=True)
        return await _answer(service, request, lines, options, tools, "messages")

    app.add_api_route("/api/generate", generate, methods=["POST"], response_model=None)
    app.add_api_route("/api/chat", chat, methods=["POST"], response_model=None)


async def _begin(service: Service, asked: Common, clock: Clock) -> tuple[_ollama.Options, Defaults | None]:
    """What both routes check before anything is computed, and what a name that was made here says by default; waits for a model
    that is still loading, as Ollama does."""
    began = time.monotonic()
    if asked.model and not _ollama.is_served(service, asked.model):
        await service.loaded()  # it may be the name of an adapter, which is known when the engine has it
    made = _ollama.defaults_of(service, _ollama.check_model(service, asked.model))
    options = _ollama.read_options(_ollama_created.options(made, asked.options))
    _ollama.constraint(asked.format)
    _ollama.seconds(asked.keep_alive)
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (asked.top_logprobs or 0) <= MAX_LOGPROBS:
        raise BadRequest(
            f"top_logprobs is {asked.top_logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="top_logprobs"
        )
    await service.loaded()
    service.generator()
    _ollama_created.speak(service, made)
    clock.waited = time.monotonic() - began
    return options, made


def _only_loaded(service: Service, asked: Common, clock: Clock, empty: dict[str, Any]) -> Response:
    """The answer to nothing: the model is loaded. It is never unloaded, so asking for that is refused."""
    if _ollama.seconds(asked.keep_alive) == 0:
        raise Unimplemented(
            f"keep_alive is 0: {service.name} stays loaded for as long as its server runs",
            cure="stop the server to free its memory",
            param="keep_alive",
        )
    return reply(
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


async def _prompt(service: Service, asked: GenerateRequest, made: Defaults | None) -> list[int]:
    """Tokens of /api/generate: what went before, then the new text as the model's template writes it."""
    text, before = asked.prompt or "", asked.context or []
    completer = service.ready()
    if asked.raw:
        for name in ("system", "context", "think"):
            if getattr(asked, name):
                raise BadRequest(f"{name} has no place in a raw prompt", cure="write it into the prompt", param=name)
        return await encode_text(service, text, "prompt")
    if completer.template is None:
        if asked.system or (made is not None and (made.system or made.messages)):
            raise BadRequest(
                f"{service.name} has no chat template: it continues text, and has no place for system", param="system"
            )
        _ollama.thinking(service, asked.think)
        turn = await encode_text(service, text, "prompt", None if not before else False)
    else:
        said: list[dict[str, Any]] = [{"role": "system", "content": asked.system}] if asked.system else []
        said.append({"role": "user", "content": text})
        if not before:  # what went before began with them
            said = _ollama_created.conversation(made, said)
        turn = await _turns.encode(service, Talk(said, kwargs=_ollama.thinking(service, asked.think)), "prompt")
        bos = getattr(completer.tokenizer, "bos_id", None)
        if before and turn[:1] == [bos]:
            turn = turn[1:]  # only the first text begins
    return [*before, *turn]


async def _filling(service: Service, asked: GenerateRequest) -> tuple[list[int], tuple[int, ...]]:
    """Tokens of a gap between `prompt` and `suffix`, and those that end what fills it."""
    for name in ("system", "context", "think"):
        if getattr(asked, name):
            raise BadRequest(f"{name} has no place beside suffix: there is no conversation", param=name)
    return await gap(service, asked.prompt or "", asked.suffix or "")


async def _answer(
    service: Service,
    request: Request,
    lines: _Lines,
    options: _ollama.Options,
    tools: Tools | None,
    param: str,
    ends: tuple[int, ...] = (),
) -> Response:
    """The answer to a prompt: lines, or one object. Without `tools` all of it is text. `ends`: tokens that end it too."""
    asked, prompt = lines.asked, lines.prompt
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
    if ends:
        sampling = msgspec.structs.replace(sampling, stop_token_ids=ends)
    reading, constraint = None, _ollama.constraint(asked.format)
    if tools is not None:
        reading, constraint = await _turns.answering(service, prompt, tools, constraint)
    made = Generation(secrets.token_hex(12), prompt, sampling, constraint=constraint, reading=reading)
    feed = Feed(service, [made], request.receive, lines.clock.arrived)
    if asked.stream is None or asked.stream:
        return LineStream(feed, lines)
    said = Partial()
    async with feed:
        async for items in feed.batches():
            for _, chunk in items:
                said.add(lines.take(chunk))
    return reply(lines.whole(said))


class _Lines:
    """Lines of an answer: one for each piece of it, and a last one with the reason, the counts and the times."""

    def __init__(
        self, service: Service, asked: Common, prompt: list[int], clock: Clock, with_context: bool, *, chat: bool
    ):
        self.asked = asked
        self.prompt = prompt
        self.clock = clock
        self.with_context = with_context
        self.chat = chat
        self.notes: list[str] = list(_notes(service, asked).get("quire", {}).get("notes", []))
        self.tokens: list[int] = []
        self.calls = Calls()
        self.told = 0  # calls
        self.end = Chunk()

    def take(self, chunk: Chunk) -> Chunk:
        """Account for a chunk."""
        self.tokens += chunk.tokens
        self.calls.add(chunk.calls)
        if chunk.finish is not None:
            self.end = chunk
        return chunk

    def opening(self) -> Iterable[object]:
        return ()

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.take(chunk)
            calls = self._ready(chunk.finish is not None)
            if chunk.text or chunk.reasoning or calls or (chunk.logprobs and self.asked.logprobs):
                body = {**self._head(chunk.text, chunk.reasoning, calls), "done": False}
                if self.asked.logprobs:
                    body["logprobs"] = _logprobs.chat(chunk.logprobs)
                yield body

    def closing(self) -> Iterable[object]:
        yield self.last("", "", [], [])

    def whole(self, said: Partial) -> dict[str, Any]:
        """The answer as one object."""
        calls = self._ready(True)
        return self.last("".join(said.text), "".join(said.reasoning), calls, _logprobs.chat(said.logprobs))

    def _ready(self, ended: bool) -> list[dict[str, Any]]:
        """Calls that became whole: when the next one begins, or at the end."""
        made: list[dict[str, Any]] = []
        calls = self.calls.all() if len(self.calls.ids) > self.told else []
        for index in range(self.told, len(calls) if ended else len(calls) - 1):
            told = tell_call(calls[index], index)
            if isinstance(told, str):
                self.notes.append(told)
            else:
                made.append(told)
            self.told = index + 1
        return made

    def _head(self, text: str, reasoning: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        head: dict[str, Any] = {"model": self.asked.model, "created_at": _ollama.now()}
        thought = {"thinking": reasoning} if reasoning else {}
        if not self.chat:
            return head | {"response": text} | thought
        message = {"role": "assistant", "content": text} | thought | ({"tool_calls": calls} if calls else {})
        return head | {"message": message}

    def last(
        self, text: str, reasoning: str, calls: list[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The line that ends an answer, with what it says where there were no others."""
        body: dict[str, Any] = {**self._head(text, reasoning, calls), "done": True}
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
        told: dict[str, Any] = {"notes": self.notes} if self.notes else {}
        if self.asked.receipts:
            told["receipts"] = [receipt_body(0, self.end.receipt)]
        return body | ({"quire": told} if told else {})
