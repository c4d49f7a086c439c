"""Reading a request's body: bounded before anything is built from it, and every field of it accounted for.

`read_json` takes the whole body as bytes (the layers in front have bounded them), and refuses an object that has a key twice. `decode` turns bytes
into a msgspec struct, with errors that name the field. `parse` does so for a request, whose fields are of four kinds:

    honoured   a field of the route's struct
    IGNORED    cannot change the tokens: accepted with any value
    NEUTRAL    would change the answer: accepted only with a value that asks for nothing, else 400 naming the field
    (others)   unknown: ignored and told in the answer, or a 400 that names it where the server or the request is strict

A body comes with its `Reading`, which says what becomes of an unknown field of it and of the objects in it.

IGNORED and NEUTRAL are the fields that OpenAI, vLLM or llama.cpp know and Quire does not act on; a dialect may have tables of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire.observe.errors import BadRequest
from quire.server.errors import ClientGone, UnsupportedMedia
from quire.server.reading import STRICT, Reading

MAX_DEPTH = 32  # of nested JSON in fields whose shape is open
MAX_NODES = 10_000
KEYS_THREAD = 16 << 10  # bytes of a body from which its keys are looked at in a thread, off the event loop
KEYS_MOST = 1 << 20  # ... and beyond which they are not: of keys that come twice the last counts there

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
B = TypeVar("B", bound=bytes)
_TOP = msgspec.json.Decoder(dict[str, msgspec.Raw])
_WHERE = re.compile(r"^(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:missing required|contains unknown) field `([^`]{1,64})")


class Body(bytes):
    """A body, and how it is read."""

    reading: Reading


async def read_json(request: Request) -> Body:
    """The whole body. A body that does not say it is JSON is refused: a web page cannot send one that does unasked."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise UnsupportedMedia("the body must be JSON", cure="send the header content-type: application/json")
    return await checked_keys(await read_body(request))


async def checked_keys(body: B) -> B:
    """The body, unless an object in it has a key twice: which value was meant is not ours to guess. What is no JSON passes; `decode` says why."""
    if len(body) <= KEYS_MOST:
        await asyncio.to_thread(_look, body) if len(body) > KEYS_THREAD else _look(body)
    return body


def _look(body: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        _KEYS.decode(body.decode())


def _distinct(pairs: list[tuple[str, object]]) -> None:
    """Called with each object; nothing of it is kept."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRequest(f"the key {key[:64]!r} comes twice in one object", param=key[:64], code="duplicate_key")
        seen.add(key)


_KEYS = json.JSONDecoder(object_pairs_hook=_distinct)


async def read_body(request: Request) -> Body:
    """The whole body, whatever it says it is."""
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            body = Body(b"".join(parts))
            body.reading = Reading(request.scope)
            return body


def top_level(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """The names in a JSON object, values undecoded."""
    return _decode(_TOP, body)


def decode(body: bytes | msgspec.Raw, shape: type[T], where: str = "", reading: Reading = STRICT) -> T:
    """`body` as a struct; BadRequest names the field that does not fit. `where` is its place in the whole body, for what is told of it."""
    try:
        return _decode(_decoder(shape), body)
    except UnknownField:
        from quire.server.shared import lenient

        if lenient.level(reading.scope) == "strict":
            raise
        return _decode(_decoder(shape), lenient.pruned(reading.unknown, body, shape, where))


class UnknownField(BadRequest):
    """A struct that forbids unknown fields met one."""


@cache
def _decoder(shape: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(shape)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        match = _WHERE.match(str(error))
        what, where = (match[1], match[2] or "") if match else (str(error), "")
        said = f"{where}: {what}" if where else what
        if named := _FIELD.search(what):
            where = f"{where}.{named[1]}" if where else named[1]
        kind = UnknownField if "contains unknown field" in what else BadRequest
        raise kind(said.replace("`", "").strip(), param=where or None) from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError:
        raise BadRequest("the body is not valid UTF-8", code="invalid_json") from None


def bounded(name: str, value: Any) -> None:
    """Refuse open-shaped JSON that is deeper or larger than any honest one."""
    level: list[Any] = [value]
    nodes = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        nodes += len(below)
        if nodes > MAX_NODES:
            raise BadRequest(f"{name} has over {MAX_NODES} values", param=name)
        if not below:
            return
        level = below
    raise BadRequest(f"{name} is nested over {MAX_DEPTH} levels", param=name)


# Fields that are known and not acted on

SLOTS = ("cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse")  # of llama.cpp's slots, which are not here
IGNORED = frozenset(
    {
        *SLOTS,
        "user",
        "safety_identifier",
        "metadata",
        "prompt_cache_key",  # prefixes are shared without being told
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # a hint for speed
        "parallel_tool_calls",  # tools themselves are refused
        "include_reasoning",
        "session_id",
    }
)

# llama.cpp's further samplers and reports, which its clients send on every route, mostly to say nothing.
LLAMA_CPP: dict[str, tuple[object, ...]] = {
    "repeat_last_n": (None, -1),
    "dynatemp_range": (None, 0, 0.0),
    "dynatemp_exponent": (None, 1, 1.0),
    "mirostat": (None, 0),
    "mirostat_tau": (None, 5, 5.0),
    "mirostat_eta": (None, 0.1),
    "dry_multiplier": (None, 0, 0.0),
    "dry_base": (None, 1.75),
    "dry_allowed_length": (None, 2),
    "dry_penalty_last_n": (None, -1, 0),
    "dry_sequence_breakers": (None,),
    "xtc_probability": (None, 0, 0.0),
    "xtc_threshold": (None, 0.1),
    "top_n_sigma": (None, -1, -1.0),
    "samplers": (None,),
    "n_indent": (None, 0),
    "t_max_predict_ms": (None, 0, -1),
    "t_max_prompt_ms": (None, 0, -1),
    "post_sampling_probs": (None, False),
    "return_progress": (None, False),
    "response_fields": (None, []),
}
NEUTRAL: dict[str, tuple[object, ...]] = {
    **LLAMA_CPP,
    "store": (None, False),
    "service_tier": (None, "auto", "default"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "moderation": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "spaces_between_special_tokens": (None, True),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "chat_template": (None,),  # a template from a client is a program
    "guided_decoding_backend": (None,),
    "logits_processors": (None, []),
    "return_tokens_as_token_ids": (None, False),
    "kv_transfer_params": (None,),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "prompt_embeds": (None,),
    "thinking_token_budget": (None,),
    "vllm_xargs": (None, {}),
    "logprob_token_ids": (None,),
    "extra_body": (None, {}),
}


INSTEAD = {"functions": "send tools", "function_call": "send tool_choice"}  # what such a field became


def parse(
    body: bytes | msgspec.Raw,
    shape: type[S],
    ignored: Collection[str] = IGNORED,
    neutral: Mapping[str, tuple[object, ...]] = NEUTRAL,
    where: str = "",
    reading: Reading | None = None,
) -> S:
    """The request, or the object `where` of it, as `shape`, every field of it accounted for. A whole body brings its own `reading`."""
    if reading is None:
        reading = body.reading if isinstance(body, Body) else STRICT
    honoured = _honoured(shape)
    given = top_level(body)
    for name, raw in given.items():
        if name in honoured or name in ignored:
            continue
        if name not in neutral:
            reading.unknown(name, honoured, where)
        else:
            check(name, decode(raw, object), neutral[name], where, reading)
    return decode(body, shape, where, reading)


def check(name: str, value: object, neutral: tuple[object, ...], where: str, reading: Reading) -> None:
    """Refuse a value that asks for something, or tell that it is ignored."""
    if any(type(value) is type(n) and value == n for n in neutral):
        return
    asks_nothing = " or ".join(msgspec.json.encode(n).decode() for n in neutral)
    refusal = BadRequest(
        f"{name} is not supported: the only accepted value is {asks_nothing}",
        cure=INSTEAD.get(name, ""),
        param=name,
        code="unsupported_parameter",
    )
    reading.excuse(refusal, where)


@cache
def _honoured(shape: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(f.encode_name for f in msgspec.structs.fields(shape))
