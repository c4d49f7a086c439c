"""llama.cpp's own routes: POST /completion (and /completions), POST /infill, GET /props.

Its fields, defaults (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, no bound on the answer but the context) and answers, with `timings` that
were measured. `model` names one of several; without it the first answers. There are no slots, so `id_slot` is always -1. /infill is for models with infill tokens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.shifting import FULL_CONTEXTS, Shift
from quire.chat.types import Chunk, Generation, TokenLogprob
from quire.config import VERSION
from quire.engine.constraints.grammar import GBNF, JSON_SCHEMA
from quire.engine.types import Constraint, Receipt
from quire.observe.errors import BadRequest, QuireError
from quire.runner.params import MAX_LOGPROBS, SamplingParams
from quire.server import errors
from quire.server.feed import Feed, News
from quire.server.replies import EventStream, reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared import bodies
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.bodies import read_json
from quire.server.shared.compat import WHY, Absent, Endpoint, Fields
from quire.server.shared.conversation import Dropped, check_prompt, encode_text
from quire.server.shared.fitting import HEADER, Fit, shifted_note, without_middle
from quire.server.shared.infill import gap
from quire.server.shared.sampling import sampling

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
IGNORED = {
    **{name: WHY[name] for name in bodies.SLOTS if name not in ("n_keep", "n_discard")},
    "timings_per_token": "the last event has the times of all",
    "min_keep": "the filters always keep one token",
    "user": "who asks does not change the answer",
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    **bodies.LLAMA_CPP,
    "lora": (None, []),
    "n": (None, 1),
    "n_cmpl": (None, 1),
    "multimodal_data": (None, []),
}
OURS = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}


class Common(msgspec.Struct, kw_only=True):
    """The fields of both routes."""

    model: str | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.Raw(b"null")
    return_tokens: bool | None = None
    context_shift: bool | None = None  # an option of llama.cpp's server
    n_keep: int | None = None
    n_discard: int | None = None
    stream: bool | None = None


class CompletionRequest(Common, kw_only=True):
    """The fields of /completion that are honoured."""

    prompt: str | list[int]


class InfillRequest(Common, kw_only=True):
    """The fields of /infill that are honoured."""

    input_prefix: str
    input_suffix: str


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    for path in ("/completion", "/infill", "/props"):
        errors.SHAPES[path] = shape

    async def completion(request: Request) -> Response:
        arrived = time.monotonic()
        asked = bodies.parse(await read_json(request), CompletionRequest, IGNORED, NEUTRAL)
        served = await _begin(server, request, asked)
        prompt = asked.prompt
        ids = prompt if isinstance(prompt, list) else await encode_text(served, prompt, "prompt")
        return await _answer(served, request, asked, ids, asked.prompt, "prompt", arrived)

    async def fill(request: Request) -> Response:
        arrived = time.monotonic()
        asked = bodies.parse(await read_json(request), InfillRequest, IGNORED, INFILL)
        served = await _begin(server, request, asked)
        ids, ends = await gap(served, asked.input_prefix, asked.input_suffix, ("input_prefix", "input_suffix"))
        return await _answer(served, request, asked, ids, "", "input_prefix", arrived, ends)

    async def props(request: Request) -> Response:
        served = await server.resolve(request, request.query_params.get("model"), first=True)
        completer, info = served.completer, served.info
        others = [{"id": m.name, "stage": m.stage} for m in server.models]
        settings = {**DEFAULTS, "n_predict": -1, "seed": -1}
        return reply(
            {
                "default_generation_settings": {"id": -1, "n_ctx": info.context, "params": settings},
                "total_slots": info.max_seqs,
                "model_alias": served.model.name,
                "chat_template": str(getattr(completer.template, "source", "") or ""),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"quire {VERSION}",
                **({"quire": {"models": others}} if len(others) > 1 else {}),
            }
        )

    for path in ("/completion", "/completions"):
        app.add_api_route(path, completion, methods=["POST"], response_model=None)
    app.add_api_route("/infill", fill, methods=["POST"], response_model=None)
    app.add_api_route("/props", props, methods=["GET"], response_model=None)


INFILL = {**NEUTRAL, "input_extra": (None, []), "prompt": (None, "")}


def shape(error: QuireError) -> tuple[int, object]:
    """An error as llama.cpp's clients read it."""
    kind = (
        "invalid_request_error"
        if error.status < 500
        else "unavailable_error"
        if error.status == 503
        else "server_error"
    )
    return error.status, {"error": {"code": error.status, "message": errors.text(error), "type": kind}}


async def _begin(server: Server, request: Request, asked: Common) -> Served:
    """What answers, the first model where none is named, and the rules between fields."""
    served = await server.resolve(request, asked.model, first=True)
    served.generates()
    if asked.n_predict is not None and asked.max_tokens is not None and asked.n_predict != asked.max_tokens:
        raise BadRequest("n_predict and max_tokens differ: send one", param="n_predict")
    if asked.n_probs is not None and not 0 <= asked.n_probs <= MAX_LOGPROBS:
        raise BadRequest(f"n_probs is {asked.n_probs}: it must be in [0, {MAX_LOGPROBS}]", param="n_probs")
    return served


def _params(asked: Common, vocab_size: int, limit: int, ends: tuple[int, ...]) -> SamplingParams:
    given: dict[str, Any] = {
        "temperature": None if asked.temperature is None else max(0.0, asked.temperature),  # below 0 it is greedy there
        "top_k": None if asked.top_k is None else max(0, asked.top_k),
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "typical_p": asked.typical_p,
        "repetition_penalty": asked.repeat_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "seed": None if asked.seed == -1 else asked.seed,
        "stop": (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ()),
        "ignore_eos": asked.ignore_eos,
        "logit_bias": _bias(asked.logit_bias),
        "logprobs": asked.n_probs or None,
        "max_tokens": limit,
        "stop_token_ids": () if asked.ignore_eos else ends,
    }
    return sampling(given, vocab_size, defaults=DEFAULTS, names=OURS)


def _bias(given: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None) -> dict[int, float] | None:
    """Biases by token id; false forbids a token. Texts would be several tokens, and are not taken."""
    if given is None:
        return None
    made: dict[int, float] = {}
    for key, value in given.items() if isinstance(given, dict) else given:
        if not str(key).isdigit() or value is True:
            raise BadRequest("logit_bias takes token ids, with a number or false", param="logit_bias")
        made[int(key)] = -100.0 if value is False else float(value)
    return made


def _constraint(asked: Common) -> Constraint | None:
    schema = bytes(asked.json_schema)
    if asked.grammar and schema != b"null":
        raise BadRequest("grammar and json_schema both say what the answer must be: send one", param="json_schema")
    if asked.grammar:
        return Constraint(kind=GBNF, text=asked.grammar, param="grammar")
    if schema == b"null":
        return None
    return Constraint(kind=JSON_SCHEMA, text=schema.decode(errors="replace"), param="json_schema")


async def _answer(
    served: Served,
    request: Request,
    asked: Common,
    ids: list[int],
    prompt: str | list[int],
    param: str,
    arrived: float,
    ends: tuple[int, ...] = (),
) -> Response:
    limit = asked.n_predict if asked.n_predict is not None else asked.max_tokens
    shift, dropped = _shift(served, asked, ids), None
    if shift is not None:
        ids, dropped = without_middle(
            ids, Fit("context_shift", _answer_room(served, limit)), served.info.context, param, shift.keep
        )
        limit = FULL_CONTEXTS * served.info.context if limit in (None, -1) else limit
    bound = None if shift is not None else limit
    check_prompt(served, ids, bound if bound is not None and bound > 0 else None, param, "n_predict")
    if limit is not None and limit < 1 and limit != -1:
        raise BadRequest(f"n_predict is {limit}: it must be at least 1, or -1 for no bound", param="n_predict")
    room = served.info.context - len(ids)
    sampling = _params(asked, served.info.vocab_size, room if limit in (None, -1) else limit or room, ends)
    made = Generation(secrets.token_hex(12), ids, sampling, constraint=_constraint(asked), shift=shift)
    feed = Feed(served, [made], request.receive, arrived)
    told = _Told(served.name, asked, ids, prompt, dropped)
    headers = None if dropped is None else {HEADER: dropped.header}
    if asked.stream:
        return _Events(feed, told, headers)
    async with feed:
        async for items in feed.batches():
            for _, chunk in items:
                told.take(chunk)
    return reply(told.last("".join(told.texts), told.entries), headers=headers)


def _shift(served: Served, asked: Common, ids: list[int]) -> Shift | None:
    """How the answer goes on past the context, where that is asked: llama.cpp keeps `n_keep` tokens and the begin token."""
    if not asked.context_shift:
        return None
    if asked.grammar or bytes(asked.json_schema) != b"null":
        raise BadRequest(
            "context_shift: an answer that is held to a grammar cannot go on past the context",
            cure="leave one of the two out",
            param="context_shift",
        )
    keep, begin = asked.n_keep or 0, served.tokenizer.bos_id
    keep = len(ids) if keep < 0 else min(keep, len(ids))
    if keep < len(ids) and ids[:1] == [begin] and served.tokenizer.add_bos:
        keep += 1
    made = Shift(served.info.context, keep, asked.n_discard or None, ("n_keep", "n_discard"))
    made.check(0)
    return made


def _answer_room(served: Served, limit: int | None) -> int | None:
    """Tokens of the answer that a prompt must leave room for from the beginning."""
    return None if limit is None or limit < 1 else min(limit, served.info.context // 2)


class _Told:
    """The events of one answer: an object for each piece of text, and a last one with the reason, the counts and the times."""

    def __init__(
        self, model: str, asked: Common, ids: list[int], prompt: str | list[int], dropped: Dropped | None = None
    ):
        self.dropped = dropped
        self.model = model
        self.asked = asked
        self.ids = ids
        self.prompt = prompt
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.entries: list[TokenLogprob] = []
        self.end = Chunk()

    def take(self, chunk: Chunk) -> None:
        """Account for a chunk."""
        self.texts.append(chunk.text)
        self.tokens += chunk.tokens
        self.entries += chunk.logprobs
        if chunk.finish is not None:
            self.end = chunk

    def opening(self) -> Iterable[object]:
        return ()

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.take(chunk)
            if chunk.text or chunk.logprobs:
                yield {
                    "index": 0,
                    "content": chunk.text,
                    "tokens": chunk.tokens if self.asked.return_tokens else [],
                    "stop": False,
                    "id_slot": -1,
                    "tokens_predicted": len(self.tokens),
                    "tokens_evaluated": len(self.ids),
                    **_probabilities(chunk.logprobs),
                }

    def closing(self) -> Iterable[object]:
        yield self.last("", [])

    def last(self, text: str, entries: list[TokenLogprob]) -> dict[str, Any]:
        """The object that ends an answer, with the text where there were no others."""
        receipt = self.end.receipt or Receipt()
        word = self.end.stop_reason if isinstance(self.end.stop_reason, str) else ""
        kind = "limit" if self.end.finish == "length" else "word" if word else "eos"
        return {
            "index": 0,
            "content": text,
            "tokens": self.tokens if self.asked.return_tokens and not self.asked.stream else [],
            "id_slot": -1,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": len(self.ids),
            "generation_settings": {"seed": receipt.seed},
            "prompt": self.prompt,
            "has_new_line": any("\n" in piece for piece in self.texts),
            "truncated": self.dropped is not None or receipt.shifted_tokens > 0,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": receipt.cached_tokens,
            "timings": timings(receipt, len(self.ids), len(self.tokens)),
            **self._told(receipt),
            **_probabilities(entries),
        }

    def _told(self, receipt: Receipt) -> dict[str, Any]:
        """Quire's own field: what was left out."""
        made: dict[str, Any] = {} if self.dropped is None else {"dropped": self.dropped.body()}
        notes = [] if self.dropped is None else [self.dropped.note]
        if receipt.shifted_tokens:
            notes.append(shifted_note("context_shift", receipt.shifted_tokens))
        return {"quire": made | {"notes": notes}} if notes else {}


def timings(receipt: Receipt, prompt: int, predicted: int) -> dict[str, Any]:
    """The engine's own times, in llama.cpp's words. The first token is the prompt's."""
    computed, later = max(0, prompt - receipt.cached_tokens), max(0, predicted - 1)
    first, rest = receipt.prefill_seconds, receipt.decode_seconds
    return {
        "cache_n": receipt.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": 1e3 * first,
        "prompt_per_token_ms": 1e3 * first / max(1, computed),
        "prompt_per_second": computed / first if first > 0 else 0.0,
        "predicted_n": predicted,
        "predicted_ms": 1e3 * rest,
        "predicted_per_token_ms": 1e3 * rest / max(1, later),
        "predicted_per_second": later / rest if rest > 0 else 0.0,
    }


def _probabilities(entries: list[TokenLogprob]) -> dict[str, Any]:
    if not entries:
        return {}

    def one(token: Any, logprob: float) -> dict[str, Any]:
        return {
            "id": token.id,
            "token": token.text,
            "bytes": list(token.bytes),
            "logprob": token_logprobs.finite(logprob),
        }

    return {
        "completion_probabilities": [
            one(e.token, e.logprob) | {"top_logprobs": [one(t, p) for t, p in e.top]} for e in entries
        ]
    }


class _Events(EventStream):
    """llama.cpp's events end when the body does."""

    done = b""


_NOTES = {
    "n_predict": "-1, the default: as many as the context leaves",
    "max_tokens": "another name of `n_predict`",
    "temperature": "0.8 by default",
    "top_k": "40 by default; 0 and below: no limit",
    "top_p": "0.95 by default",
    "min_p": "0.05 by default",
    "repeat_penalty": "over the whole text",
    "seed": "-1: any; the answer tells it",
    "logit_bias": "token ids with a number or false; not texts",
    "n_probs": "0 to 20",
    "grammar": "enforced: GBNF",
    "json_schema": "enforced",
    "context_shift": "an option of llama.cpp's server: true cuts a prompt that is too long and lets the answer go on past the context, and tells",
    "n_keep": "with `context_shift`: tokens of the prompt that stay; -1: all. Else nothing is cut",
    "n_discard": "with `context_shift`: tokens after these that are left out each time; 0: half. Else nothing is cut",
}
_SURFACE = (
    "n_predict cache_prompt id_slot n_keep n_probs samplers grammar json_schema dry_multiplier xtc_probability mirostat typical_p "
    "timings_per_token return_progress t_max_predict_ms temperature top_k top_p min_p repeat_penalty stop stream seed logit_bias"
)
COMPAT = (
    Endpoint(
        dialect="llama.cpp",
        method="POST",
        path="/completion",
        what="Also `/completions`. `/v1/completions` is OpenAI's.",
        fields=(Fields(shape=CompletionRequest, ignored=IGNORED, neutral=NEUTRAL, notes=_NOTES),),
        example={"prompt": "hi"},
        surface=_SURFACE + " prompt",
    ),
    Endpoint(
        dialect="llama.cpp",
        method="POST",
        path="/infill",
        what="Of a model with infill tokens.",
        fields=(Fields(shape=InfillRequest, ignored=IGNORED, neutral=INFILL, notes=_NOTES),),
        example={"input_prefix": "a", "input_suffix": "b"},
        surface=_SURFACE + " input_prefix input_suffix input_extra",
        task="infill",
    ),
    Endpoint(
        dialect="llama.cpp",
        method="GET",
        path="/props",
        what="The template, the context and the defaults, of `?model=NAME` or the first; where several are served, the names of all.",
    ),
)
ABSENT = (
    Absent("llama.cpp", "/embedding", "`/v1/embeddings` does it"),
    Absent("llama.cpp", "/slots", "there are no slots: sequences share one pool"),
    Absent("llama.cpp", "/lora-adapters", "not built"),
    Absent("llama.cpp", "/models/load", "models are loaded when the server starts"),
)
