"""/v1/files, in OpenAI's shape: upload, list, look at, download, delete.

Owns the form's fields and the purposes; bytes and rows are files.py's. A file that a running batch reads is not deleted.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from quire.observe.errors import BadRequest
from quire.server.callers import caller_of
from quire.server.openai.batches.files import new_id
from quire.server.openai.batches.storage import Storage, needed, storage_of
from quire.server.openai.pages import no_such_after, page, window
from quire.server.replies import reply
from quire.server.server import Server
from quire.server.shared.compat import Endpoint

PATH = "/v1/files"
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
EXPIRY = (3600, 2_592_000)  # seconds, from and to


class Conflict(BadRequest):
    """Somebody still needs it."""

    code = "file_in_use"
    status = 409


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    storage_of(app, server)

    def storage() -> Storage:
        return needed(app, server, "files")

    async def upload(request: Request) -> Response:
        from quire.server.openai.batches.upload import receive

        files = storage().files
        await files.check_room()
        name = new_id()
        part = files.path(f"{name}.part")
        came = await receive(request, part, server.config.max_file)
        try:
            purpose, seconds = _fields(came.fields)
            part.replace(files.path(name))
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return reply(
            (await files.add(name, came.filename, purpose, came.size, seconds, caller_of(request.scope).owner)).body()
        )

    async def listed(request: Request) -> Response:
        asked = window(request, default=10_000, most=10_000)
        purpose = request.query_params.get("purpose")
        found = await storage().files.listed(
            asked.limit, asked.after, asked.newest_first, purpose, caller_of(request.scope).owner
        )
        if found is None:
            raise no_such_after()
        return reply(page([file.body() for file in found[0]], found[1]))

    async def one(request: Request) -> Response:
        return reply((await storage().files.get(request.path_params["file"], caller_of(request.scope).owner)).body())

    async def content(request: Request) -> Response:
        files = storage().files
        file = await files.get(request.path_params["file"], caller_of(request.scope).owner)
        kind = "application/jsonl" if file.purpose.startswith("batch") else "application/octet-stream"
        return FileResponse(files.path(file.id), media_type=kind, filename=file.name)

    async def delete(request: Request) -> Response:
        at = storage()
        file = await at.files.get(request.path_params["file"], caller_of(request.scope).owner)
        if file.id in await at.journal.used_files():
            raise Conflict("a batch still reads this file", cure="cancel the batch first, or wait for its end")
        await at.files.remove(file.id)
        return reply({"id": file.id, "object": "file", "deleted": True})

    app.add_api_route(PATH, upload, methods=["POST"], response_model=None)
    app.add_api_route(PATH, listed, methods=["GET"], response_model=None)
    app.add_api_route(PATH + "/{file}", one, methods=["GET"], response_model=None)
    app.add_api_route(PATH + "/{file}", delete, methods=["DELETE"], response_model=None)
    app.add_api_route(PATH + "/{file}/content", content, methods=["GET"], response_model=None)


def _fields(given: dict[str, str]) -> tuple[str, int | None]:
    """Purpose, and after how many seconds the file goes."""
    unknown = next((name for name in given if name not in ("purpose", *_EXPIRES)), None)
    if unknown is not None:
        raise BadRequest(f"Unrecognized form field: {unknown}", param=unknown, code="unknown_parameter")
    purpose = given.get("purpose", "")
    if purpose not in PURPOSES:
        raise BadRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
    anchor, seconds = (given.get(name) for name in _EXPIRES)
    if anchor is None and seconds is None:
        return purpose, None
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 9:
        raise BadRequest("expires_after.seconds must be a number", param="expires_after.seconds")
    return purpose, expiry(anchor, int(seconds), "expires_after")


_EXPIRES = ("expires_after[anchor]", "expires_after[seconds]")


def expiry(anchor: Any, seconds: int, name: str) -> int:
    """The seconds after which a file is deleted, checked."""
    if anchor != "created_at":
        raise BadRequest(f"{name}.anchor must be created_at", param=f"{name}.anchor")
    if not EXPIRY[0] <= seconds <= EXPIRY[1]:
        raise BadRequest(f"{name}.seconds must be from {EXPIRY[0]} to {EXPIRY[1]}", param=f"{name}.seconds")
    return seconds


COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=PATH,
        what="A form with `file`, `purpose` and `expires_after`. See batches.md, also for `/v1/files/{file}` and `/v1/files/{file}/content`.",
    ),
)
