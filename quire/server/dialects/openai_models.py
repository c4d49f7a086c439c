"""GET /v1/models and /v1/models/{id}: the model that is served, and its adapters, which name it as their parent.

In OpenAI's shape, with vLLM's `max_model_len`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.server.replies import reply
from quire.server.service import Service


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    def card(name: str) -> dict[str, Any]:
        context = service.completer.info.context if service.completer is not None else None
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "root": service.name,
            "parent": None if name == service.name else service.name,  # an adapter has the model that it adds to
            "max_model_len": context,  # null until it is loaded
        }

    async def models(request: Request) -> Response:
        data = [card(name) for name in (service.name, *service.adapters)]
        return reply({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        service.check_model(request.path_params["model_id"])
        return reply(card(service.answering))

    app.add_api_route("/v1/models", models, methods=["GET"], response_model=None)
    # A model's name may hold slashes.
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"], response_model=None)
