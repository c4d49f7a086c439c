"""GET /v1/models and /v1/models/{id}: the model that is served, in OpenAI's shape with vLLM's `max_model_len`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.server.service import Service


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    def card() -> dict[str, Any]:
        context = service.completer.info.context if service.completer is not None else None
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "root": service.name,
            "parent": None,
            "max_model_len": context,  # null until it is loaded
        }

    async def models(request: Request) -> Response:
        return Response(msgspec.json.encode({"object": "list", "data": [card()]}), media_type="application/json")

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["model_id"])
        return Response(msgspec.json.encode(card()), media_type="application/json")

    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    # A model's name may hold slashes.
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"], response_model=None)
