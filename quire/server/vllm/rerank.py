"""POST /v1/rerank, in Cohere's and Jina's shape: how well documents answer a query, best first.

With a cross-encoder a score is the model's own; with an embedding model it is the cosine of the two embeddings. Documents keep
their index, and equal ones the order they came in.
"""

from __future__ import annotations

import secrets
from typing import Any

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
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "rank_fields": (None,),
}


class Document(msgspec.Struct):
    """A document that is an object; whatever else is in it is the client's."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """The fields of a rerank request that are honoured."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    truncate: bool | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""

    async def rerank(request: Request) -> Response:
        asked = parse(await read_json(request), RerankRequest, IGNORED, NEUTRAL)
        served = await server.resolve(request, asked.model)
        embedder = served.embedder()
        texts = [d if isinstance(d, str) else d.text for d in asked.documents]
        check_count(len(texts), "documents")
        if asked.top_n is not None and asked.top_n < 1:
            raise BadRequest(f"top_n is {asked.top_n}: it must be at least 1", param="top_n")
        work = embedder.score([(asked.query, text) for text in texts], truncate=bool(asked.truncate))
        made = await while_connected(served, request, work)
        count(served, made)
        order = sorted(range(len(texts)), key=lambda i: (-made[i].score, i))[: asked.top_n]
        results: list[dict[str, Any]] = []
        for i in order:
            result: dict[str, Any] = {"index": i, "relevance_score": made[i].score}
            if asked.return_documents is not False:
                result["document"] = {"text": texts[i]}
            results.append(result)
        body = {
            "id": f"rerank-{secrets.token_hex(12)}",
            "model": served.model.name,
            "results": results,
            "usage": usage(made),
            **cut(made),
        }
        return reply(body)

    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"):
        app.add_api_route(path, rerank, methods=["POST"], response_model=None)


COMPAT = (
    Endpoint(
        dialect="OpenAI, with vLLM's fields",
        method="POST",
        path="/v1/rerank",
        what="Also `/rerank`, `/v2/rerank`, `/reranking` and `/v1/reranking`. Of a model that scores pairs or embeds.",
        fields=(
            Fields(
                shape=RerankRequest,
                ignored=IGNORED,
                neutral=NEUTRAL,
                notes={"truncate": "Quire's: cut a text that is too long and say how much, instead of refusing it"},
            ),
        ),
        example={"query": "a", "documents": ["b"]},
        surface="query documents model top_n return_documents",
        task="embed",
    ),
)
