"""What the prefix cache tells of itself: GET /v1/cache/breaks.

Lists what made prompts be computed again, for `quire doctor cache` and for people. A caller sees its own namespace alone: that of its key, and of the
`cache_salt` it names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.server.explained import body
from quire.server.replies import reply
from quire.server.server import Server
from quire.server.shared.compat import Endpoint

PATH = "/v1/cache/breaks"
COMPAT = (
    Endpoint(
        dialect="Quire",
        method="GET",
        path=PATH,
        what="What broke the prefix cache; `?model=`, and `?cache_salt=` for prompts that had one. See prefix-cache.md.",
        task="any",
    ),
)


def register(app: FastAPI, server: Server) -> None:
    """Add the route."""

    async def breaks(request: Request) -> Response:
        query = request.query_params
        served = await server.resolve(request, query.get("model"), first=True)
        finder = served.model.finder
        namespace = served.caller.namespace(query.get("cache_salt", ""))
        data: list[dict[str, Any]] = []
        agents: list[dict[str, Any]] = []
        if finder is not None:
            agents = [dataclasses.asdict(each) for each in finder.traffic(namespace)]
            data = [
                {"agent": each.agent, **body(each.last), "lost_tokens": each.lost_tokens, "seen": int(each.seen)}
                for each in finder.places(namespace)
            ]
        return reply({"object": "list", "model": served.model.name, "agents": agents, "data": data})

    app.add_api_route(PATH, breaks, methods=["GET"], response_model=None)
