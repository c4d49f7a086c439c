"""POST /v1/embeddings, in OpenAI's shape: text or tokens in, one or several, and an embedding of each out.

Numbers come as JSON, or as base64 of little-endian float32. A text that is too long is refused with both counts unless
`truncate` is true; then the answer says how much was cut. `prompt_name` is one of the model's own prompts.
"""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.embedder import Embedded, Input
from quire.observe.errors import BadRequest
from quire.server.feed import while_connected
from quire.server.replies import reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import Endpoint, Fields
from quire.server.shared.embedded import MAX_INPUTS, count, cut, usage

FORMATS = ("float", "base64")
IGNORED = {"user": "who asks does not change the answer", "metadata": "the client's own notes; they are not kept"}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (None, True),
    "priority": (None, 0),
    "normalize": (None,),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "little"),
}


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The fields that are honoured."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate: bool | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the route."""

    async def embeddings(request: Request) -> Response:
        asked = parse(await read_json(request), EmbeddingRequest, IGNORED, NEUTRAL)
        served = await server.resolve(request, asked.model)
        embedder = served.embedder()
        encoding = asked.encoding_format or "float"
        if encoding not in FORMATS:
            raise BadRequest(
                f"encoding_format is {encoding[:40]!r}: it must be {' or '.join(FORMATS)}", param="encoding_format"
            )
        work = embedder.embed(
            _inputs(asked.input),
            prompt=asked.prompt_name,
            truncate=bool(asked.truncate),
            most=_most(served, asked),
            ends=asked.truncation_side == "left",
            dimensions=asked.dimensions,
        )
        made = await while_connected(served, request, work)
        count(served, made)
        data = [{"object": "embedding", "index": i, "embedding": _written(one, encoding)} for i, one in enumerate(made)]
        body = {"object": "list", "data": data, "model": served.name, "usage": usage(made), **cut(made)}
        return reply(body)

    for path in ("/v1/embeddings", "/embeddings"):
        app.add_api_route(path, embeddings, methods=["POST"], response_model=None)


def _most(served: Served, asked: EmbeddingRequest) -> int | None:
    """The tokens that vLLM's `truncate_prompt_tokens` leaves of a text."""
    name, keep, context = "truncate_prompt_tokens", asked.truncate_prompt_tokens, served.info.context
    if asked.truncation_side not in (None, "left", "right"):
        raise BadRequest("truncation_side must be left or right", param="truncation_side")
    if keep is None:
        return None
    if keep < -1 or keep == 0:
        raise BadRequest(f"{name} is {keep}: it must be at least 1, or -1 for what the model takes", param=name)
    if keep > context:
        raise BadRequest(f"{name} is {keep}: the most this model takes is {context}", param=name)
    return context if keep == -1 else keep


def _inputs(given: str | list[str | int | list[int]]) -> list[Input]:
    """The inputs, whichever of the four forms they came in."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest("input is an empty list", param="input")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise BadRequest("input mixes text and tokens: send a list of one kind", param="input")
    if kinds == {int}:
        return [[item for item in given if isinstance(item, int)]]
    if len(given) > MAX_INPUTS:
        raise BadRequest(f"{len(given)} inputs: at most {MAX_INPUTS} in one request", param="input")
    return [item for item in given if not isinstance(item, int)]


def _written(one: Embedded, encoding: str) -> Any:
    if encoding == "float":
        return one.vector.tolist()
    return base64.b64encode(one.vector.astype("<f4").tobytes()).decode()


COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path="/v1/embeddings",
        what="Also `/embeddings`. Of a model that embeds or generates.",
        fields=(
            Fields(
                shape=EmbeddingRequest,
                ignored=IGNORED,
                neutral=NEUTRAL,
                notes={
                    "input": "a text, texts, token ids, or lists of them; up to 2048",
                    "encoding_format": "`float` or `base64` (little-endian float32)",
                    "dimensions": "the first numbers, made of length 1 again, where the model's files say that this means something; else 400",
                    "truncate": "Quire's: cut a text that is too long and say how much, instead of refusing it",
                    "truncate_prompt_tokens": "vLLM's: cut texts to so many tokens, -1: to what the model takes, and say how much",
                    "truncation_side": "vLLM's: `right`, the default: the beginning of a text is kept; `left`: its end",
                    "prompt_name": "Quire's: one of the model's own prompts",
                },
            ),
        ),
        example={"input": "hi"},
        surface="input model dimensions encoding_format user",
        task="embed",
    ),
)
