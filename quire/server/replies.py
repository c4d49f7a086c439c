"""What a route answers with that does not stream: an object as JSON."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def reply(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The object as a response."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
