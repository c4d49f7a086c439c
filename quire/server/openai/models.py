"""GET /v1/models and /v1/models/{id}: the models that are served, and their adapters, which name their model as the parent.

In OpenAI's shape, with vLLM's `max_model_len`, and under `quire.tasks` what requests may ask for. Further names of a model are listed too: they have it as their root.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.server.replies import reply
from quire.server.served import Model
from quire.server.server import Server
from quire.server.shared.compat import Absent, Endpoint


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""

    async def models(request: Request) -> Response:
        data = [_card(m, name, name in m.names) for m in server.models for name in (*m.names, *m.adapters)]
        return reply({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        found, adapter = server.models.choose(request.path_params["model_id"])
        return reply(_card(found, adapter or found.name, not adapter))

    for path in ("/v1/models", "/models"):
        app.add_api_route(path, models, methods=["GET"], response_model=None)
    # A model's name may hold slashes.
    app.add_api_route("/v1/models/{model_id:path}", model, methods=["GET"], response_model=None)


def _card(model: Model, name: str, itself: bool) -> dict[str, Any]:
    info = None if model.completer is None else model.completer.info
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "quire",
        "root": model.name,
        "parent": None if itself else model.name,  # an adapter has the model that it adds to
        # Null until it is loaded.
        "max_model_len": None if info is None else info.context,
        "quire": {"tasks": None if info is None else info.tasks},
    }


COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="GET",
        path="/v1/models",
        what="Also `/models`. The served models, with vLLM's `max_model_len`; `quire.tasks` is what each does: `generate`, `embed`, `score`.",
    ),
    Endpoint(dialect="OpenAI", method="GET", path="/v1/models/{model_id:path}"),
)
_NO_MEDIA = "the models served take and make text"
ABSENT = (
    Absent("OpenAI", "/v1/audio/…", _NO_MEDIA),
    Absent("OpenAI", "/v1/images/…", _NO_MEDIA),
    Absent("OpenAI", "/v1/realtime", _NO_MEDIA),
    Absent("OpenAI", "/v1/moderations", "no model for it"),
)
