"""A request to this server from inside it: the same routes and error shapes, without a socket.

The layers in front (host, key, body size, log) are for requests from outside and are left out; the router and the handlers of errors
are the very ones that HTTP uses. Cancelling the call is a client that goes away.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.types import Message, Scope

from quire.server.callers import SCOPE, Caller


class Call:
    """POST into an application."""

    def __init__(self, app: FastAPI):
        self._inside = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        self._inside.exception_handlers = app.exception_handlers
        self._inside.router = app.router
        self._inside.state = app.state

    async def __call__(self, path: str, body: bytes, caller: Caller) -> tuple[int, bytes]:
        """Status and body of the answer."""
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": None,
            "server": None,
            SCOPE: caller,
        }
        given = False
        status = 500
        parts: list[bytes] = []

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # the client stays until it is cancelled
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        try:
            await self._inside(scope, receive, send)
        except Exception:  # told to the log and answered with a 500 by the handler of what nobody expected
            if not parts:
                raise
        return status, b"".join(parts)
