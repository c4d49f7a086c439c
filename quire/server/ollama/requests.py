"""Shared by Ollama's routes: how a body is read, `options`, `keep_alive`, and errors as `{"error": text}`. How models are named is `names.py`.

A field is honoured, without effect on the tokens, refused by name, or unknown, which is told, as on every other route. Where an option is not sent, Ollama's default holds (DEFAULTS), but for its repeat penalty. Knows nothing of answers.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.chat.shifting import Shift
from quire.engine.constraints.grammar import JSON_OBJECT, JSON_SCHEMA
from quire.engine.types import Constraint
from quire.observe.errors import BadRequest, QuireError
from quire.runner.params import SamplingParams
from quire.server import errors
from quire.server.reading import Reading
from quire.server.served import Served
from quire.server.shared import bodies, conversation
from quire.server.shared.bodies import checked_keys, read_body, read_json
from quire.server.shared.sampling import sampling

T = TypeVar("T", bound=msgspec.Struct)

PREFIX = "/api/"
# Ollama's own, told by /api/show. Its repeat penalty of 1.1 over 64 tokens is not among them: here one is over everything.
DEFAULTS: dict[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}

# They cannot change the tokens here: the server decided them when it started, or they belong to an option that is refused.
IGNORED_OPTIONS = frozenset(
    {
        "numa",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "low_vram",
        "use_mmap",
        "use_mlock",
        "num_thread",
        "mirostat_tau",
        "mirostat_eta",
    }
)
NEUTRAL_OPTIONS: dict[str, tuple[object, ...]] = {
    "mirostat": (None, 0),
    "tfs_z": (None, 1, 1.0),
    "penalize_newline": (None, True),
    "f16_kv": (None, True),
    "logits_all": (None, False),
    "vocab_only": (None, False),
    "embedding_only": (None, False),
    "draft_num_predict": (None, 0),
}
LEVELS = ("low", "medium", "high", "max")  # of `think`
OURS = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}  # SamplingParams' names -> Ollama's

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"[+-]?(?:\d+(?:\.\d+)?(?:ns|us|µs|ms|s|m|h))+")
_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
# What a program sends that was not told to say what it sends: curl's default, and no word at all.
_UNSAID = frozenset({"", "text/plain", "application/x-www-form-urlencoded"})


class Options(msgspec.Struct, kw_only=True):
    """The `options` that are honoured. Whole numbers may come as 40.0, as some clients write them."""

    num_ctx: float | int | None = None
    num_predict: float | int | None = None
    num_keep: float | int | None = None
    temperature: float | None = None
    top_k: float | int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: float | int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: float | int | None = None
    stop: str | list[str] | None = None


def read_options(raw: msgspec.Raw, reading: Reading) -> Options:
    """`options`, every one accounted for."""
    if bytes(raw) == b"null":
        return Options()
    try:
        return bodies.parse(raw, Options, IGNORED_OPTIONS, NEUTRAL_OPTIONS, "options", reading)
    except BadRequest as error:
        raise _within_options(error) from None


def _within_options(error: BadRequest) -> BadRequest:
    where = f"options.{error.param}" if error.param else "options"
    message = error.message.removeprefix("Unrecognized request argument supplied: ")
    if message != error.message:
        message = f"there is no option {message}"
    return BadRequest(f"options: {message}", cure=error.cure, param=where, code=error.code)


def params(served: Served, options: Options, room: int, logprobs: int | None) -> SamplingParams:
    """SamplingParams with Ollama's defaults, at most `room` tokens of answer."""
    asked = whole("num_predict", options.num_predict)
    if asked is not None and asked < 1 and asked not in (-1, -2):  # both mean: as many as there is room for
        raise BadRequest(
            f"options: num_predict is {asked}: it must be at least 1, or -1 for no limit", param="options.num_predict"
        )
    seed = whole("seed", options.seed)
    top_k = whole("top_k", options.top_k)
    stop = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
    _check_window(options, served.reading)
    given: dict[str, Any] = {
        "temperature": options.temperature,
        "top_k": None if top_k is None else max(0, top_k),
        "top_p": options.top_p,
        "min_p": options.min_p,
        "typical_p": options.typical_p,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "seed": None if seed == -1 else seed,  # any
        "logprobs": logprobs,
        "stop": stop,
        "max_tokens": room if asked is None or asked < 0 else min(asked, room),
    }
    return sampling(given, served.info.vocab_size, defaults=DEFAULTS, names=OURS, within="options")


def _check_window(options: Options, reading: Reading) -> None:
    """Penalties here look at everything; a window of some last tokens is fine only where there is no penalty."""
    last = whole("repeat_last_n", options.repeat_last_n)
    penalised = options.repeat_penalty not in (None, 1.0) or options.presence_penalty or options.frequency_penalty
    if last not in (None, -1) and penalised:
        refusal = BadRequest(
            f"options: repeat_last_n is {last}: penalties look at the whole text here",
            cure="leave it out, or send -1",
            param="options.repeat_last_n",
            code="unsupported_parameter",
        )
        reading.excuse(refusal)


def context_of(served: Served, options: Options) -> int:
    """Tokens that prompt and answer may have together: what is served, or less where the client says so."""
    most, asked = served.info.context, whole("num_ctx", options.num_ctx)
    if asked is None:
        return most
    if asked > most:
        refusal = BadRequest(
            f"options: num_ctx is {asked}: {served.model.name} is served with a context of {most}",
            cure=f"send at most {most}, or start the server with a longer --context",
            param="options.num_ctx",
            code="context_length_exceeded",
        )
        served.reading.excuse(refusal)
        return most
    if asked < 2:
        raise BadRequest(f"options: num_ctx is {asked}: it must be at least 2", param="options.num_ctx")
    return asked


def shift(options: Options, prompt: int, context: int) -> Shift:
    """How an answer goes on past the context: `num_keep` tokens of the prompt stay, -1: all of it. Where it is not sent, all that is at
    most half of the context."""
    asked = whole("num_keep", options.num_keep)
    if asked is None:
        asked = -1 if prompt <= context // 2 else 0
    if asked < -1:
        raise BadRequest(f"options: num_keep is {asked}: it must be at least -1", param="options.num_keep")
    made = Shift(context, prompt if asked == -1 else min(asked, prompt), names=("options.num_keep", ""))
    made.check(prompt)
    return made


def whole(name: str, value: float | int | None) -> int | None:
    """An option that is a whole number."""
    if value is None or isinstance(value, int):
        return value
    if not value.is_integer():
        raise BadRequest(f"options: {name} is {value}: it must be a whole number", param=f"options.{name}")
    return int(value)


def constraint(value: object) -> Constraint | None:
    """`format`: "json", or a JSON schema that the answer must meet."""
    if value in (None, ""):
        return None
    if value == "json":
        return Constraint(kind=JSON_OBJECT, param="format")
    if not isinstance(value, dict):
        raise BadRequest('format must be "json" or a JSON schema', param="format")
    return Constraint(kind=JSON_SCHEMA, text=msgspec.json.encode(value).decode(), param="format")


def thinking(served: Served, value: bool | str | None) -> dict[str, Any]:
    """`think`, as keywords for the template: yes, no, or how much. No word leaves it to the model."""
    if value in (None, ""):
        return {}
    if value in (False, "false"):
        return conversation.thinking(served, False, None, "think")
    if value in (True, "true"):
        return conversation.thinking(served, True, None, "think")
    if value not in LEVELS:
        raise BadRequest(f"think must be true, false or one of {', '.join(LEVELS)}", param="think")
    return conversation.thinking(served, None, str(value), "think")


def seconds(value: float | str | None) -> float | None:
    """`keep_alive`: seconds, or a duration such as 5m or -1s."""
    if value is None or isinstance(value, int | float):
        return value
    text = value.strip()
    if re.fullmatch(r"[+-]?\d{1,12}(?:\.\d{1,9})?", text):
        return float(text)
    if len(text) > 64 or not _DURATION.fullmatch(text):
        raise BadRequest(
            f"keep_alive is {text[:64]!r}: it must be seconds or a duration such as 5m", param="keep_alive"
        )
    total = sum(float(number) * _UNITS[unit] for number, unit in _PIECE.findall(text))
    return -total if text.startswith("-") else total


# Bodies


async def read(request: Request) -> bytes:
    """The whole body. Ollama's clients need not say that it is JSON, so neither must they here; but a web page must, which it
    cannot do unasked. A browser tells that it is one by these headers, whatever the page wants."""
    said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    from_page = "origin" in request.headers or "sec-fetch-site" in request.headers
    if said in _UNSAID and not from_page:
        return await checked_keys(await read_body(request))
    return await read_json(request)


def parse(
    body: bytes,
    shape: type[T],
    ignored: frozenset[str] = frozenset(),
    neutral: dict[str, tuple[object, ...]] | None = None,
) -> T:
    """The request as `shape`, every field of it accounted for."""
    return bodies.parse(body, shape, ignored, neutral or {})


def now() -> str:
    """The time as Ollama writes it."""
    return stamp(time.time())


def stamp(when: float) -> str:
    """Seconds since the epoch as RFC 3339."""
    return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(value: float) -> int:
    """Seconds as Ollama counts them."""
    return round(value * 1e9)


def shape(error: QuireError) -> tuple[int, object]:
    """An error as Ollama's clients read it. A full queue is 503 there."""
    told: Any = errors.body(error)["error"]
    return (503 if error.status == 429 else error.status), {"error": told["message"]}


errors.SHAPES[PREFIX] = shape
