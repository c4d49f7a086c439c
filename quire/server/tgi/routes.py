"""POST /generate, /generate_stream and / in Text Generation Inference's shape, and GET /info.

Owns the routes, the two answers and the shape of every error at these paths. One event for each token: its text, its log
probability, and with the last one the whole text. The texts of a stream's tokens, those of special ones left out, are that text. What a
request may say is `parameters.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Chunk, TokenLogprob, TokenText
from quire.config import VERSION
from quire.observe.errors import QuireError
from quire.runner.params import MAX_N
from quire.server import errors
from quire.server.feed import Feed, News
from quire.server.reading import Reading
from quire.server.replies import EventStream, on_one_line, reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared import bodies
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.bodies import read_json
from quire.server.shared.compat import Absent, Endpoint, Fields
from quire.server.tgi import parameters
from quire.server.tgi.parameters import CompatRequest, GenerateRequest, Parameters

PATHS = ("/generate", "/info", "/")  # the first with what follows it, /generate_stream; the last alone
KINDS = {429: "overloaded", 500: "generation", 503: "overloaded"}


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    for path in PATHS:
        errors.SHAPES[path] = shape

    async def generate(request: Request) -> Response:
        arrived = time.monotonic()
        asked = bodies.parse(await read_json(request), GenerateRequest, (), {})
        return reply(await _whole(server, request, asked, arrived))

    async def generate_stream(request: Request) -> Response:
        arrived = time.monotonic()
        asked = bodies.parse(await read_json(request), GenerateRequest, (), {})
        return await _stream(server, request, asked, arrived)

    async def compat(request: Request) -> Response:
        arrived = time.monotonic()
        asked = bodies.parse(await read_json(request), CompatRequest, (), {})
        if asked.stream:
            return await _stream(server, request, asked, arrived)
        return reply([await _whole(server, request, asked, arrived)])

    async def info(request: Request) -> Response:
        model = server.models.first
        told = model.info
        others = [{"model_id": m.name, "stage": m.stage} for m in server.models]
        return reply(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation" if told.task == "generate" else "feature-extraction",
                "max_concurrent_requests": told.max_seqs,
                "max_best_of": MAX_N,
                "max_stop_sequences": parameters.MAX_STOPS,
                "max_input_tokens": told.context - 1,
                "max_total_tokens": told.context,
                "max_client_batch_size": 1,
                "router": "quire",
                "version": VERSION,
                **({"quire": {"models": others}} if len(others) > 1 else {}),
            }
        )

    app.add_api_route("/generate", generate, methods=["POST"], response_model=None)
    app.add_api_route("/generate_stream", generate_stream, methods=["POST"], response_model=None)
    app.add_api_route("/", compat, methods=["POST"], response_model=None)
    app.add_api_route("/info", info, methods=["GET"], response_model=None)


def shape(error: QuireError) -> tuple[int, object]:
    """An error as TGI's clients read it; what they call a validation error has the status 422."""
    kind = KINDS.get(error.status, "validation" if error.status < 500 else "generation")
    status = 422 if error.status == 400 else error.status
    return status, {"error": errors.text(error), "error_type": kind}


async def _begin(
    server: Server, request: Request, asked: GenerateRequest, arrived: float, stream: bool
) -> tuple[Feed, Parameters, _Answer]:
    wanted = parameters.read_parameters(asked.parameters, Reading(request.scope))
    served = await server.resolve(request, wanted.adapter_id or None, first=True)
    served.generates()
    parameters.check(wanted, stream)
    sampling = parameters.params(wanted, served.info.vocab_size, stream or bool(wanted.details))
    made, cut = await parameters.generation(served, asked.inputs, wanted, sampling)
    feed = Feed(served, [made], request.receive, arrived)
    return feed, wanted, _Answer(served, asked.inputs, wanted, made.prompt, cut)


async def _whole(server: Server, request: Request, asked: GenerateRequest, arrived: float) -> dict[str, Any]:
    feed, wanted, answer = await _begin(server, request, asked, arrived, stream=False)
    made: dict[int, _Sequence] = {}
    async with feed:
        async for items in feed.batches():
            for _, chunk in items:
                made.setdefault(chunk.index, _Sequence()).add(answer, chunk)
    # TGI's best is that of the highest mean.
    first, *others = sorted(made.values(), key=lambda one: -one.mean)
    body: dict[str, Any] = {"generated_text": answer.text_of(first)}
    if wanted.details:
        prefill = answer.prefill(made[0].scores)
        body["details"] = first.details(wanted, prefill)
        if others:
            body["details"]["best_of_sequences"] = [
                {"generated_text": answer.text_of(one), **one.details(wanted, prefill)} for one in others
            ]
    return body | answer.told


async def _stream(server: Server, request: Request, asked: GenerateRequest, arrived: float) -> Response:
    feed, _, answer = await _begin(server, request, asked, arrived, stream=True)
    return _Events(feed, _Stream(answer))


@dataclass(slots=True)
class _Sequence:
    """One answer as it comes together."""

    text: list[str] = field(default_factory=list)
    tokens: list[dict[str, Any]] = field(default_factory=list)
    tops: list[list[dict[str, Any]]] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt
    count: int = 0
    total: float = 0.0  # of log probabilities
    end: Chunk = field(default_factory=Chunk)

    def add(self, answer: _Answer, chunk: Chunk) -> int:
        """Take a chunk in; how many tokens it had."""
        self.text.append(chunk.text)
        self.count += len(chunk.tokens)
        self.total += sum(entry.logprob for entry in chunk.logprobs)
        self.scores += chunk.prompt_logprobs
        for at, entry in enumerate(chunk.logprobs):
            says = chunk.text if at == len(chunk.logprobs) - 1 else ""
            special = answer.is_special(entry.token.id) and not says
            self.tokens.append(_token(entry.token, entry.token.text if special else says, entry.logprob, special))
            self.tops.append([_token(t, t.text, p, answer.is_special(t.id)) for t, p in entry.top])
        if not chunk.logprobs and chunk.text and self.tokens:  # text that was held back: it belongs to what came last
            last = self.tokens[-1]
            last["text"] = chunk.text if last["special"] else last["text"] + chunk.text
            last["special"] = False
        if chunk.finish is not None:
            self.end = chunk
        return len(chunk.logprobs)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)

    @property
    def reason(self) -> str:
        """Why it ended, in TGI's words."""
        if self.end.finish == "length":
            return "length"
        return "stop_sequence" if isinstance(self.end.stop_reason, str) else "eos_token"

    def ending(self, asked: Parameters) -> dict[str, Any]:
        """The part of `details` that a stream has too."""
        seed = self.end.receipt.seed if self.end.receipt is not None and asked.samples else None
        return {"finish_reason": self.reason, "generated_tokens": self.count, "seed": seed}

    def details(self, asked: Parameters, prefill: list[dict[str, Any]]) -> dict[str, Any]:
        """`details` of a whole answer."""
        tops = {"top_tokens": self.tops} if asked.top_n_tokens else {}
        return {**self.ending(asked), "prefill": prefill, "tokens": self.tokens, **tops}


class _Answer:
    """What both kinds of answer know of their request."""

    def __init__(self, served: Served, inputs: str, asked: Parameters, prompt: list[int], cut: int):
        self.tokenizer = served.tokenizer
        self.is_special = self.tokenizer.is_special
        self.asked = asked
        self.prompt = prompt
        self.before = inputs if asked.return_full_text else ""
        self.told: dict[str, Any] = {"quire": {"cut_tokens": {"0": cut}}} if cut else {}

    def text_of(self, one: _Sequence) -> str:
        return self.before + "".join(one.text)

    def prefill(self, scores: list[TokenLogprob]) -> list[dict[str, Any]]:
        """The prompt's tokens, if asked for; nothing predicts the first."""
        if not self.asked.decoder_input_details:
            return []
        unscored: list[float | None] = [None] * (len(self.prompt) - len(scores))
        return [
            {"id": t, "text": self.tokenizer.token_text(t), "logprob": p if p is None else token_logprobs.finite(p)}
            for t, p in zip(self.prompt, unscored + [e.logprob for e in scores], strict=True)
        ]


class _Stream:
    """One event for each token. With stop sequences one token is held back, because their end brings text without a token."""

    def __init__(self, answer: _Answer):
        self.answer = answer
        self.one = _Sequence()
        self.sent = 0

    def opening(self) -> Iterable[object]:
        return ()

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.one.add(self.answer, chunk)
            if chunk.finish is not None:
                return  # `closing` has the rest
            hold = 1 if self.answer.asked.stop else 0
            while self.sent < len(self.one.tokens) - hold:
                yield self._event()

    def closing(self) -> Iterable[object]:
        while self.sent < len(self.one.tokens) - 1:
            yield self._event()
        last = self._event()
        last["generated_text"] = self.answer.text_of(self.one)
        if self.answer.asked.details:
            last["details"] = {**self.one.ending(self.answer.asked), "input_length": len(self.answer.prompt)}
        yield last | self.answer.told

    def _event(self) -> dict[str, Any]:
        at, self.sent = self.sent, self.sent + 1
        here = at < len(self.one.tokens)
        body: dict[str, Any] = {"index": self.sent, "token": self.one.tokens[at] if here else None}
        if self.answer.asked.top_n_tokens and here:
            body["top_tokens"] = self.one.tops[at]
        return body | {"generated_text": None, "details": None}


class _Events(EventStream):
    """TGI's events end when the body does."""

    frame = staticmethod(lambda value: b"data:" + on_one_line(value) + b"\n\n")
    done = b""


def _token(token: TokenText, text: str, logprob: float, special: bool) -> dict[str, Any]:
    return {"id": token.id, "text": text, "logprob": token_logprobs.finite(logprob), "special": special}


_PARAMETERS = Fields(
    shape=Parameters,
    inside="parameters",
    neutral=parameters.NEUTRAL,
    notes={
        "best_of": "the one of the highest mean log probability; needs sampling, and no stream",
        "temperature": "above 0; other than 1 it implies sampling",
        "top_k": "implies sampling",
        "top_p": "below 1 it implies sampling",
        "typical_p": "below 1 it implies sampling",
        "do_sample": "greedy by default",
        "max_new_tokens": "100 by default, or what the context leaves",
        "stop": "up to 16; the sequence stays in the text, as it does in TGI",
        "truncate": "keeps the last tokens; the answer says how many were cut (`quire.cut_tokens`)",
        "decoder_input_details": "with `details`, and no stream",
        "top_n_tokens": "0 to 20",
        "grammar": "enforced: `json`, `json_schema` or `regex`",
        "adapter_id": "an adapter that is loaded, or the name of a model; else 404",
    },
)
_SURFACE = (
    "parameters.best_of parameters.temperature parameters.repetition_penalty parameters.frequency_penalty parameters.top_k "
    "parameters.top_p parameters.typical_p parameters.do_sample parameters.max_new_tokens parameters.return_full_text parameters.stop "
    "parameters.truncate parameters.watermark parameters.details parameters.decoder_input_details parameters.seed "
    "parameters.top_n_tokens parameters.grammar parameters.adapter_id inputs parameters"
)
COMPAT = (
    *(
        Endpoint(
            dialect="TGI",
            method="POST",
            path=path,
            what=what,
            fields=(Fields(shape=body), _PARAMETERS),
            example={"inputs": "hi"},
            surface=_SURFACE,
        )
        for path, body, what in (
            ("/generate", GenerateRequest, ""),
            ("/generate_stream", GenerateRequest, "One server-sent event for each token."),
            ("/", CompatRequest, "The same as `/generate` in a list, or with `stream` as `/generate_stream`."),
        )
    ),
    Endpoint(
        dialect="TGI",
        method="GET",
        path="/info",
        what="The model and the bounds; where several are served, of the first, and the names of all.",
    ),
)
ABSENT = (
    Absent("TGI", "/chat_tokenize", "`/tokenize` with `messages` does it"),
    Absent("TGI", "/invocations", "not built"),
)
