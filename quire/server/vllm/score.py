"""POST /v1/score, in vLLM's shape: a score for each pair of texts, in their order. rerank.py says what a score is."""

from __future__ import annotations

import secrets
import time

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest
from quire.server.feed import while_connected
from quire.server.replies import reply
from quire.server.server import Server
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import Endpoint, Fields
from quire.server.shared.embedded import check_count, count, cut, usage

IGNORED = {"user": "who asks does not change the answer"}
NEUTRAL: dict[str, tuple[object, ...]] = {
    "truncate_prompt_tokens": (None,),
    "priority": (None, 0),
}


class ScoreRequest(msgspec.Struct, kw_only=True):
    """The fields of a score request that are honoured: one text against several, or as many as there are."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    truncate: bool | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the route, under both its names."""

    async def score(request: Request) -> Response:
        asked = parse(await read_json(request), ScoreRequest, IGNORED, NEUTRAL)
        served = await server.resolve(request, asked.model)
        embedder = served.embedder()
        work = embedder.score(_pairs(asked), truncate=bool(asked.truncate), param="text_2")
        made = await while_connected(served, request, work)
        count(served, made)
        body = {
            "id": f"score-{secrets.token_hex(12)}",
            "object": "list",
            "created": int(time.time()),
            "model": served.model.name,
            "data": [{"index": i, "object": "score", "score": one.score} for i, one in enumerate(made)],
            "usage": usage(made),
            **cut(made),
        }
        return reply(body)

    for path in ("/score", "/v1/score"):
        app.add_api_route(path, score, methods=["POST"], response_model=None)


def _pairs(asked: ScoreRequest) -> list[tuple[str, str]]:
    first = [asked.text_1] if isinstance(asked.text_1, str) else asked.text_1
    second = [asked.text_2] if isinstance(asked.text_2, str) else asked.text_2
    check_count(len(first), "text_1")
    check_count(len(second), "text_2")
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise BadRequest(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: send one, or as many as text_2 has",
            param="text_1",
        )
    return list(zip(first, second, strict=True))


COMPAT = (
    Endpoint(
        dialect="OpenAI, with vLLM's fields",
        method="POST",
        path="/v1/score",
        what="Also `/score`. Of a model that scores pairs or embeds.",
        fields=(
            Fields(
                shape=ScoreRequest,
                ignored=IGNORED,
                neutral=NEUTRAL,
                notes={"truncate": "Quire's: cut a text that is too long and say how much, instead of refusing it"},
            ),
        ),
        example={"text_1": "a", "text_2": "b"},
        surface="text_1 text_2 model",
        task="embed",
    ),
)
