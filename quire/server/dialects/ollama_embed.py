"""POST /api/embed and /api/embeddings: refused by name. This server generates; its models make no embeddings."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.server.errors import Unimplemented
from quire.server.service import Service


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def embed(request: Request) -> Response:
        raise Unimplemented(
            f"{service.name} generates text: embeddings need an embedding model, and are not served here yet",
            cure="all-minilm:l6-v2 is one",
        )

    for path in ("/api/embed", "/api/embeddings"):
        app.add_api_route(path, embed, methods=["POST"], response_model=None)
