"""POST /api/generate and /api/chat, as Ollama has them: JSON lines unless `stream` is false, and times in nanoseconds.

The times are measured: `load_duration` is what the request waited for the model, `prompt_eval_duration` and `eval_duration` are the
engine's own from the receipt, `total_duration` runs from the request's arrival. An empty prompt only waits for the model.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.shifting import Shift
from quire.chat.tools.types import Tools
from quire.chat.types import Chunk, Generation, Origin
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server import ignored
from quire.server.errors import Unimplemented
from quire.server.feed import Feed, News
from quire.server.ollama import created, requests
from quire.server.ollama.names import Names
from quire.server.ollama.turns import Message, turns
from quire.server.ollama.turns import told as tell_call
from quire.server.reading import Reading
from quire.server.replies import LineStream, reply
from quire.server.served import Served
from quire.server.shared import conversation, fitting
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.answers import Calls, Partial, receipt_body
from quire.server.shared.compat import Endpoint, Fields
from quire.server.shared.conversation import Conversation, Dropped, check_prompt, encode_text
from quire.server.shared.fitting import HEADER, Fit, shifted_note
from quire.server.shared.infill import gap
from quire.server.shared.tools import NO_TOOLS, choose, openai_tools
from quire.weights.store.manifest import Defaults

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
    # Ollama's own default for both is true, and silent. Here a conversation is cut, and an answer goes on past the context, where it is asked.
    truncate: bool | None = None
    shift: bool | None = None

    def fit(self, options: requests.Options, context: int) -> Fit | None:
        """What is to be cut, if anything."""
        predict = requests.whole("num_predict", options.num_predict)
        answer = None if predict is None or predict < 1 else min(predict, context // 2)
        return Fit("truncate", answer, context) if self.truncate else None


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


def register(app: FastAPI, names: Names) -> None:
    """Add the routes."""

    async def generate(request: Request) -> Response:
        clock = Clock()
        asked = requests.parse(await requests.read(request), GenerateRequest, neutral=NEUTRAL)
        served, options, made = await _begin(names, request, asked, clock)
        if not asked.prompt:
            return _only_loaded(served, asked, clock, {"response": ""})
        if asked.suffix:
            prompt, ends = await _filling(served, asked)
            lines = _Lines(served, asked, prompt, clock, False, chat=False)
            return await _answer(served, request, lines, options, None, "prompt", ends)
        prompt, dropped = await _prompt(served, asked, options, made)
        lines = _Lines(served, asked, prompt, clock, not asked.raw, chat=False)
        if dropped is not None:
            lines.dropped = dropped
            lines.notes.append(dropped.note)
        reads = not asked.raw and served.template is not None  # a raw prompt's answer is told as it comes
        return await _answer(served, request, lines, options, NO_TOOLS if reads else None, "prompt")

    async def chat(request: Request) -> Response:
        clock = Clock()
        asked = requests.parse(await requests.read(request), ChatRequest)
        served, options, made = await _begin(names, request, asked, clock)
        if not asked.messages:
            return _only_loaded(served, asked, clock, {"message": {"role": "assistant", "content": ""}})
        tools = choose(openai_tools(asked.tools, served.reading), None)
        said = created.conversation(made, turns(asked.messages))
        whole = Conversation(said, tools, requests.thinking(served, asked.think))
        prompt = await fitting.encode(served, whole, asked.fit(options, requests.context_of(served, options)))
        lines = _Lines(served, asked, prompt, clock, False, chat=True)
        lines.dropped = whole.dropped
        lines.notes += whole.notes
        return await _answer(served, request, lines, options, whole.tools, "messages", origin=whole.origin)

    app.add_api_route("/api/generate", generate, methods=["POST"], response_model=None)
    app.add_api_route("/api/chat", chat, methods=["POST"], response_model=None)


async def _begin(
    names: Names, request: Request, asked: Common, clock: Clock
) -> tuple[Served, requests.Options, Defaults | None]:
    """What both routes check before anything is computed, what answers, and what a name that was made here says by default; waits for a
    model that is still loading, as Ollama does."""
    began = time.monotonic()
    if asked.model and names.get(asked.model) is None:
        await names.settled(asked.model)
    _, _, made = names.choose(asked.model)
    options = requests.read_options(created.options(made, asked.options), Reading(request.scope))
    requests.constraint(asked.format)
    requests.seconds(asked.keep_alive)
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not 0 <= (asked.top_logprobs or 0) <= MAX_LOGPROBS:
        raise BadRequest(
            f"top_logprobs is {asked.top_logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="top_logprobs"
        )
    served, _ = await names.resolve(request, asked.model)
    served.generates()
    if made is None and not served.adapter and asked.model and names.get(asked.model) is None:
        asked.model = served.name  # a name that means nothing (--any-model-name): the answer tells who gives it
    clock.waited = time.monotonic() - began
    return served, options, made


def _only_loaded(served: Served, asked: Common, clock: Clock, empty: dict[str, Any]) -> Response:
    """The answer to nothing: the model is loaded. It is never unloaded, so asking for that is refused."""
    if requests.seconds(asked.keep_alive) == 0:
        raise Unimplemented(
            f"keep_alive is 0: {served.model.name} stays loaded for as long as its server runs",
            cure="stop the server to free its memory",
            param="keep_alive",
        )
    return reply(
        {
            "model": asked.model,
            "created_at": requests.now(),
            **empty,
            "done": True,
            "done_reason": "load",
            "total_duration": requests.nanoseconds(time.monotonic() - clock.arrived),
            "load_duration": requests.nanoseconds(clock.waited),
            **_notes(served, asked),
        }
    )


def _notes(served: Served, asked: Common) -> dict[str, Any]:
    """What the client asked of the model's memory and did not get."""
    wanted = requests.seconds(asked.keep_alive)
    if wanted is None or wanted < 0:
        return {}
    return {"quire": {"notes": [f"keep_alive: {served.model.name} stays loaded for as long as its server runs"]}}


async def _prompt(
    served: Served, asked: GenerateRequest, options: requests.Options, made: Defaults | None
) -> tuple[list[int], Dropped | None]:
    """Tokens of /api/generate: what went before, then the new text as the model's template writes it; cut where the request asks for it."""
    before, turn = await _parts(served, asked, made)
    context = requests.context_of(served, options)
    fit = asked.fit(options, context)
    if fit is None:
        return [*before, *turn], None
    newest = len(turn) if before or not asked.raw else 1
    keep = min(max(0, requests.whole("num_keep", options.num_keep) or 0), len(before) + len(turn) - newest)
    return fitting.without_middle([*before, *turn], fit, context, "prompt", keep, newest)


async def _parts(served: Served, asked: GenerateRequest, made: Defaults | None) -> tuple[list[int], list[int]]:
    """The tokens that went before, and those of the new text."""
    text, before = asked.prompt or "", asked.context or []
    completer = served.completer
    if asked.raw:
        for name in ("system", "context", "think"):
            if getattr(asked, name):
                raise BadRequest(f"{name} has no place in a raw prompt", cure="write it into the prompt", param=name)
        return [], await encode_text(served, text, "prompt")
    if completer.template is None:
        if asked.system or (made is not None and (made.system or made.messages)):
            raise BadRequest(
                f"{served.model.name} has no chat template: it continues text, and has no place for system",
                param="system",
            )
        requests.thinking(served, asked.think)
        turn = await encode_text(served, text, "prompt", None if not before else False)
    else:
        said: list[dict[str, Any]] = [{"role": "system", "content": asked.system}] if asked.system else []
        said.append({"role": "user", "content": text})
        if not before:  # what went before began with them
            said = created.conversation(made, said)
        turn = await conversation.encode(
            served, Conversation(said, kwargs=requests.thinking(served, asked.think)), "prompt"
        )
        bos = getattr(completer.tokenizer, "bos_id", None)
        if before and turn[:1] == [bos]:
            turn = turn[1:]  # only the first text begins
    return before, turn


async def _filling(served: Served, asked: GenerateRequest) -> tuple[list[int], tuple[int, ...]]:
    """Tokens of a gap between `prompt` and `suffix`, and those that end what fills it."""
    for name in ("system", "context", "think"):
        if getattr(asked, name):
            raise BadRequest(f"{name} has no place beside suffix: there is no conversation", param=name)
    return await gap(served, asked.prompt or "", asked.suffix or "")


async def _answer(
    served: Served,
    request: Request,
    lines: _Lines,
    options: requests.Options,
    tools: Tools | None,
    param: str,
    ends: tuple[int, ...] = (),
    origin: Origin | None = None,
) -> Response:
    """The answer to a prompt: lines, or one object. Without `tools` all of it is text. `ends`: tokens that end it too."""
    asked, prompt = lines.asked, lines.prompt
    check_prompt(served, prompt, None, param, "options.num_predict")
    context = requests.context_of(served, options)
    if len(prompt) >= context:
        raise BadRequest(
            f"{param} has {len(prompt)} tokens: options.num_ctx is {context}, and at least one is for the answer",
            cure="shorten it, send a larger num_ctx, or ask for it to be cut (truncate)",
            param=param,
            code="context_length_exceeded",
        )
    logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    sampling = requests.params(served, options, context - len(prompt), logprobs)
    if ends:
        sampling = msgspec.structs.replace(sampling, stop_token_ids=ends)
    reading, constraint = None, requests.constraint(asked.format)
    if tools is not None:
        reading, constraint = await conversation.answering(served, prompt, tools, constraint)
    made = Generation(secrets.token_hex(12), prompt, sampling, constraint=constraint, reading=reading, origin=origin)
    lines.notes += ignored.take(request.scope)
    if asked.shift:
        made = lines.shifting(made, requests.shift(options, len(prompt), context), options)
    feed = Feed(served, [made], request.receive, lines.clock.arrived)
    headers = None if lines.dropped is None else {HEADER: lines.dropped.header}
    if asked.stream is None or asked.stream:
        return LineStream(feed, lines, headers)
    said = Partial()
    async with feed:
        async for items in feed.batches():
            for _, chunk in items:
                said.add(lines.take(chunk))
    return reply(lines.whole(said), headers=headers)


class _Lines:
    """Lines of an answer: one for each piece of it, and a last one with the reason, the counts and the times."""

    def __init__(
        self, served: Served, asked: Common, prompt: list[int], clock: Clock, with_context: bool, *, chat: bool
    ):
        self.asked = asked
        self.prompt = prompt
        self.clock = clock
        self.with_context = with_context
        self.chat = chat
        self.dropped: Dropped | None = None  # of the prompt
        self.notes: list[str] = list(_notes(served, asked).get("quire", {}).get("notes", []))
        self.tokens: list[int] = []
        self.calls = Calls()
        self.told = 0  # calls
        self.end = Chunk()

    def shifting(self, made: Generation, shift: Shift, options: requests.Options) -> Generation:
        """The generation that goes on past the context; a grammar's cannot, and that is told."""
        if made.constraint is not None:
            self.notes.append("shift: the answer is held to a grammar, so it ends where the context does")
            return made
        asked = requests.whole("num_predict", options.num_predict)
        most = asked if asked is not None and asked > 0 else None
        return replace(made, sampling=msgspec.structs.replace(made.sampling, max_tokens=most), shift=shift)

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
                    body["logprobs"] = token_logprobs.chat(chunk.logprobs)
                yield body

    def closing(self) -> Iterable[object]:
        yield self.last("", "", [], [])

    def whole(self, said: Partial) -> dict[str, Any]:
        """The answer as one object."""
        calls = self._ready(True)
        return self.last("".join(said.text), "".join(said.reasoning), calls, token_logprobs.chat(said.logprobs))

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
        head: dict[str, Any] = {"model": self.asked.model, "created_at": requests.now()}
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
        body["total_duration"] = requests.nanoseconds(time.monotonic() - self.clock.arrived)
        body["load_duration"] = requests.nanoseconds(self.clock.waited)
        body["prompt_eval_count"] = len(self.prompt)
        body["eval_count"] = len(self.tokens)
        if (receipt := self.end.receipt) is not None:
            body["prompt_eval_duration"] = requests.nanoseconds(receipt.prefill_seconds)
            body["eval_duration"] = requests.nanoseconds(receipt.decode_seconds)
        told: dict[str, Any] = {} if self.dropped is None else {"dropped": self.dropped.body()}
        gone = self.end.receipt.shifted_tokens if self.end.receipt is not None else 0
        if notes := self.notes + ([shifted_note("shift", gone)] if gone else []):
            told["notes"] = notes
        if self.asked.receipts:
            told["receipts"] = [receipt_body(0, self.end.receipt)]
        return body | ({"quire": told} if told else {})


_USER = [{"role": "user", "content": "hi"}]
_OPTIONS = Fields(
    shape=requests.Options,
    inside="options",
    ignored=dict.fromkeys(requests.IGNORED_OPTIONS, "the server's to decide; it cannot change the tokens"),
    neutral=requests.NEUTRAL_OPTIONS,
    notes={
        "num_ctx": "bounds prompt and answer together; more than is served is refused",
        "num_keep": "with `truncate` or `shift`: tokens of the prompt's beginning that stay; -1 with `shift`: all",
        "num_predict": "-1 and -2: as many as there is room for",
        "temperature": "0.8 by default",
        "top_k": "40 by default",
        "top_p": "0.9 by default",
        "repeat_penalty": "1 by default, over the whole text",
        "repeat_last_n": "beside a penalty only -1",
        "seed": "-1: any",
    },
)
_NOTES = {
    "truncate": "true leaves out what is oldest where the prompt does not fit, and tells; else it is refused",
    "shift": "true lets the answer go on past the context, and tells; else it ends there",
    "stream": "true by default",
    "format": "enforced: `json` or a JSON schema",
    "think": "true, false, or low, medium, high, max, as the template can be told",
    "keep_alive": "the model stays loaded; an answer to one who asks otherwise says so",
    "receipts": "Quire's: what happened to the request",
}
COMPAT = (
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/chat",
        fields=(
            Fields(
                shape=ChatRequest,
                notes=_NOTES
                | {"tools": "the model chooses; described in the prompt where the template has no place for them"},
            ),
            _OPTIONS,
        ),
        example={"model": "", "messages": _USER, "stream": False},
        surface="model messages format options keep_alive think tools stream truncate shift logprobs top_logprobs",
    ),
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/generate",
        fields=(
            Fields(
                shape=GenerateRequest,
                neutral=NEUTRAL,
                notes=_NOTES
                | {
                    "context": "put before the new turn as it is",
                    "suffix": "of a model with infill tokens; else 400",
                },
            ),
            _OPTIONS,
        ),
        example={"model": "", "prompt": "hi", "stream": False},
        surface="model prompt suffix images format options system template raw keep_alive think stream truncate shift logprobs context",
    ),
)
