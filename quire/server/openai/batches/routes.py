"""/v1/batches, in OpenAI's shape: create, look at, list, cancel. The queue itself is `queue.py`.

`completion_window` is 24h for OpenAI; here it is any number of seconds, minutes, hours or days up to a week.
"""

from __future__ import annotations

import re

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest
from quire.server.callers import caller_of
from quire.server.openai import metadata
from quire.server.openai.batches.file_routes import expiry
from quire.server.openai.batches.queue import ENDPOINTS
from quire.server.openai.batches.storage import Storage, needed, storage_of
from quire.server.openai.pages import no_such_after, page, window
from quire.server.replies import reply
from quire.server.server import Server
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import Endpoint, Fields

PATH = "/v1/batches"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST = 7 * 86_400  # seconds
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])", re.ASCII)


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """`output_expires_after`."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True):
    """The fields of a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    storage_of(app, server)

    def storage() -> Storage:
        return needed(app, server, "batches")

    async def create(request: Request) -> Response:
        asked = parse(await read_json(request), BatchRequest, (), {})
        at = storage()
        if asked.endpoint not in ENDPOINTS:
            raise BadRequest(f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        metadata.check(asked.metadata)
        keep, at = asked.output_expires_after, storage()
        batch = await at.journal.create(
            endpoint=asked.endpoint,
            input_file=asked.input_file_id,
            window=asked.completion_window,
            seconds=_seconds(asked.completion_window),
            model=server.models.first.name,
            metadata=asked.metadata,
            keep_seconds=None if keep is None else expiry(keep.anchor, keep.seconds, "output_expires_after"),
            owner=caller_of(request.scope).owner,
        )
        at.queue.start()
        return reply(batch.body())

    async def listed(request: Request) -> Response:
        asked = window(request)
        found = await storage().journal.listed(asked.limit, asked.after, caller_of(request.scope).owner)
        if found is None:
            raise no_such_after()
        return reply(page([batch.body() for batch in found[0]], found[1]))

    async def one(request: Request) -> Response:
        return reply((await storage().journal.get(request.path_params["batch"], caller_of(request.scope).owner)).body())

    async def cancel(request: Request) -> Response:
        at = storage()
        batch = await at.journal.cancel(request.path_params["batch"], caller_of(request.scope).owner)
        at.queue.start()
        return reply(batch.body())

    app.add_api_route(PATH, create, methods=["POST"], response_model=None)
    app.add_api_route(PATH, listed, methods=["GET"], response_model=None)
    app.add_api_route(PATH + "/{batch}", one, methods=["GET"], response_model=None)
    app.add_api_route(PATH + "/{batch}/cancel", cancel, methods=["POST"], response_model=None)


def _seconds(window: str) -> int:
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * UNITS[match[2]] if match else 0
    if not 1 <= seconds <= LONGEST:
        raise BadRequest("completion_window must be a time up to 7d, for instance 24h", param="completion_window")
    return seconds


COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=PATH,
        what="See batches.md, also for `/v1/batches/{batch}` and `/v1/batches/{batch}/cancel`.",
        fields=(
            Fields(
                shape=BatchRequest,
                notes={
                    "input_file_id": "a file whose purpose is batch",
                    "endpoint": ", ".join(f"`{path}`" for path in ENDPOINTS),
                    "completion_window": "`24h`, or another time from a second to a week",
                    "metadata": "kept and told back",
                    "output_expires_after": "of the output and error files",
                },
            ),
        ),
        example={"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
        surface="input_file_id endpoint completion_window metadata output_expires_after",
        task="any",
    ),
)
