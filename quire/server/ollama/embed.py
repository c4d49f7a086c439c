"""POST /api/embed and /api/embeddings, as Ollama has them, of a model that embeds or generates.

/api/embed cuts a text that is too long unless `truncate` is false, because that is Ollama's default; the answer then says how many tokens
of which text were left out, under `quire.cut_tokens`. /api/embeddings is the older route: one text, never cut. Times are measured, in nanoseconds.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest
from quire.server.feed import while_connected
from quire.server.ollama import requests
from quire.server.ollama.names import Names
from quire.server.reading import Reading
from quire.server.replies import reply
from quire.server.served import Served
from quire.server.shared.compat import Endpoint, Fields
from quire.server.shared.embedded import MAX_INPUTS, count, cut


class Common(msgspec.Struct, kw_only=True):
    """The fields of both routes."""

    model: str | None = None
    options: msgspec.Raw = msgspec.Raw(b"null")
    keep_alive: float | str | None = None


class EmbedRequest(Common, kw_only=True):
    """The fields of /api/embed that are honoured."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class EmbeddingsRequest(Common, kw_only=True):
    """The fields of /api/embeddings that are honoured."""

    prompt: str | None = None


def register(app: FastAPI, names: Names) -> None:
    """Add the routes."""

    async def embed(request: Request) -> Response:
        arrived = time.monotonic()
        asked = requests.parse(await requests.read(request), EmbedRequest)
        served, waited = await _begin(names, request, asked)
        texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
        if len(texts) > MAX_INPUTS:
            raise BadRequest(f"{len(texts)} inputs: at most {MAX_INPUTS} in one request", param="input")
        body: dict[str, Any] = {"model": asked.model, "embeddings": []}
        made = []
        if texts:  # an empty one only loads the model
            work = served.embedder().embed(
                texts, truncate=asked.truncate is not False, dimensions=asked.dimensions, param="input"
            )
            made = await while_connected(served, request, work)
            count(served, made)
            body["embeddings"] = [one.vector.tolist() for one in made]
        body["total_duration"] = requests.nanoseconds(time.monotonic() - arrived)
        body["load_duration"] = requests.nanoseconds(waited)
        body["prompt_eval_count"] = sum(one.tokens for one in made)
        return reply(body | cut(made))

    async def embeddings(request: Request) -> Response:
        asked = requests.parse(await requests.read(request), EmbeddingsRequest)
        served, _ = await _begin(names, request, asked)
        if not asked.prompt:
            return reply({"embedding": []})
        made = await while_connected(served, request, served.embedder().embed([asked.prompt], param="prompt"))
        count(served, made)
        return reply({"embedding": made[0].vector.tolist()})

    app.add_api_route("/api/embed", embed, methods=["POST"], response_model=None)
    app.add_api_route("/api/embeddings", embeddings, methods=["POST"], response_model=None)


async def _begin(names: Names, request: Request, asked: Common) -> tuple[Served, float]:
    """What both routes check before anything is computed; how long they waited for a model that was still loading."""
    names.choose(asked.model)
    options = requests.read_options(asked.options, Reading(request.scope))
    requests.seconds(asked.keep_alive)
    began = time.monotonic()
    served, _ = await names.resolve(request, asked.model)
    context = served.info.context
    if options.num_ctx is not None and options.num_ctx < context:
        refusal = BadRequest(
            f"options: num_ctx is {options.num_ctx:g}: texts are taken up to the model's own {context} tokens",
            cure="leave it out",
            param="options.num_ctx",
            code="unsupported_parameter",
        )
        served.reading.excuse(refusal)
    served.embedder().embeds()
    return served, time.monotonic() - began


_OPTIONS = Fields(
    shape=requests.Options,
    inside="options",
    ignored=dict.fromkeys(requests.IGNORED_OPTIONS, "the server's to decide; it cannot change the numbers"),
    neutral=requests.NEUTRAL_OPTIONS,
    refused={"num_ctx": (1, "less than the model's own; as much or more is fine")},
    notes=dict.fromkeys(
        (f.name for f in msgspec.structs.fields(requests.Options)), "nothing is sampled, so it changes nothing"
    ),
)
_KEEP = {"keep_alive": "the model stays loaded for as long as its server runs"}
COMPAT = (
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/embed",
        what="Of a model that embeds or generates.",
        fields=(
            Fields(
                shape=EmbedRequest,
                notes=_KEEP
                | {
                    "input": "a text or texts; up to 2048",
                    "truncate": "true by default; what was cut is told under `quire.cut_tokens`",
                    "dimensions": "the first numbers, made of length 1 again, where the model's files say that this means something; else 400",
                },
            ),
            _OPTIONS,
        ),
        example={"model": "", "input": "hi"},
        surface="model input truncate dimensions keep_alive options",
        task="embed",
    ),
    Endpoint(
        dialect="Ollama",
        method="POST",
        path="/api/embeddings",
        what="The older route, of a model that embeds or generates. A text that is too long is refused.",
        fields=(Fields(shape=EmbeddingsRequest, notes=_KEEP), _OPTIONS),
        example={"model": "", "prompt": "hi"},
        surface="model prompt keep_alive options",
        task="embed",
    ),
)
