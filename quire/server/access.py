"""The outermost layer: every request gets an id, a log line, a count, and is refused while the server drains.

Pure ASGI. The route label is the route's pattern, so that a client cannot invent labels; the logged path is quoted, so
that it cannot invent lines.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.errors import QuireError, Unavailable
from quire.server import errors
from quire.server.service import Service

log = logging.getLogger("quire.access")

PROBES = frozenset({"/health", "/ready", "/metrics", "/version"})
_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class Access:
    """Request id, log, metrics, drain."""

    def __init__(self, app: ASGIApp, service: Service, log_requests: bool):
        self.app = app
        self.service = service
        self.log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began = time.monotonic()
        status = 500
        sent = False
        given = next((v for k, v in scope["headers"] if k == b"x-request-id"), b"")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8).encode()

        async def numbered(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, sent = message["status"], True
                names = (b"x-request-id", b"request-id")  # OpenAI's clients read the first, Anthropic's the second
                message["headers"] = [*message.get("headers", []), *((name, request_id) for name in names)]
            await send(message)

        probe = scope["path"] in PROBES
        if not probe:
            self.service.enter()
        try:
            if self.service.draining and not probe:
                refusal = Unavailable("the server is shutting down", cure="send the request elsewhere or later")
                await errors.response(refusal, {"connection": "close"})(scope, receive, numbered)
            else:
                await self.app(scope, receive, numbered)
        except Exception as error:
            errors.log.error("unexpected %s", type(error).__name__, exc_info=error)
            if sent:
                raise
            await errors.response(QuireError("the server failed on this request; its log has the cause"))(
                scope, receive, numbered
            )
        finally:
            if not probe:
                self.service.leave()
            self._note(scope, status, time.monotonic() - began, probe)

    def _note(self, scope: Scope, status: int, seconds: float, probe: bool) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE") else "other"
        self.service.metrics.http(route, method, status, seconds)
        if self.log_requests and not probe:
            log.info("%s %s %d %.1f ms", method, quote(scope["path"][:200]), status, seconds * 1e3)
