"""The layers in front of the router: log and drain, the Host a server is called by, origins of web pages, API keys, size of bodies, known paths.

    Access -> HostCheck -> Cors -> KeyCheck -> BodyLimit -> KnownPaths -> router

Pure ASGI, so that streams and disconnects pass untouched. Default deny: only the paths in OPEN answer without the key, compared
exactly, and keys are compared in constant time, every one of them. The label of a route in metrics is the route's pattern, so that a client cannot
invent labels; the logged path is quoted, so that it cannot invent lines.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.observe.errors import QuireError, TooLarge, Unavailable
from quire.server import errors, ignored
from quire.server.callers import SCOPE, Caller
from quire.server.errors import Forbidden, TooSlow, Unauthorized
from quire.server.server import Server

log = logging.getLogger("quire.access")

PROBES = frozenset({"/live", "/health", "/ready", "/metrics", "/version"})
OPEN = frozenset({"/live", "/health", "/ready"})
ALLOWED = b"authorization, content-type, x-request-id, x-api-key, anthropic-version, anthropic-beta, x-quire-strict, x-quire-lenient"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
BODY_SECONDS = 20.0  # a body has this long to come whole, and
BODY_RATE = 16 << 10  # ... a second more for each so many bytes that have come
LINGER_SECONDS = 2.0  # a refused body is read and thrown away this long, so that its sender can read the refusal
LINGER_BYTES = 64 << 20
UPLOADS: set[str] = set()  # beginnings of paths whose bodies are files: bounded by who takes them
_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,128}")


class Access:
    """Request id, log, metrics, drain."""

    def __init__(self, app: ASGIApp, server: Server, log_requests: bool):
        self.app = app
        self.server = server
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
                if ignored.KEY in scope:
                    message["headers"].append(ignored.of(scope).header())
            await send(message)

        probe = scope["path"] in PROBES
        if not probe:
            self.server.enter()
        try:
            if self.server.draining and not probe:
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
                self.server.leave()
            self._note(scope, status, time.monotonic() - began, probe)

    def _note(self, scope: Scope, status: int, seconds: float, probe: bool) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE") else "other"
        self.server.metrics.http(route, method, status, seconds)
        if self.log_requests and not probe:
            log.info("%s %s %d %.1f ms", method, quote(scope["path"][:200]), status, seconds * 1e3)


def is_loopback(host: str) -> bool:
    """Whether binding to `host` reaches this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class HostCheck:
    """On a loopback bind, answers only to local names: a page that rebinds its DNS name here still sends its own."""

    def __init__(self, app: ASGIApp, names: Iterable[str]):
        self.app = app
        self.names = frozenset(n.lower() for n in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [v for k, v in scope["headers"] if k == b"host"]
            if len(hosts) != 1 or _hostname(hosts[0]) not in self.names:
                refusal = Forbidden(
                    "the Host header names another machine; this server is bound to loopback",
                    cure="call it by localhost, or start it with --allowed-host",
                )
                return await errors.response(refusal)(scope, receive, send)
        return await self.app(scope, receive, send)


class Cors:
    """Answers preflights and marks responses for the configured origins. Never with credentials."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]):
        self.app = app
        self.origins = frozenset(o.encode("latin-1", "replace") for o in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = next((v for k, v in scope["headers"] if k == b"origin"), None) if scope["type"] == "http" else None
        if origin is None:
            return await self.app(scope, receive, send)
        allowed = b"*" in self.origins or origin in self.origins
        grant = [(b"access-control-allow-origin", origin), (b"vary", b"Origin")] if allowed else [(b"vary", b"Origin")]
        if scope["method"] == "OPTIONS" and any(k == b"access-control-request-method" for k, _ in scope["headers"]):
            if allowed:
                grant += [
                    (b"access-control-allow-methods", b"GET, POST, DELETE"),
                    (b"access-control-allow-headers", ALLOWED),
                    (b"access-control-max-age", b"600"),
                ]
            await send({"type": "http.response.start", "status": 204 if allowed else 403, "headers": grant})
            return await send({"type": "http.response.body", "body": b""})

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *grant]
            await send(message)

        return await self.app(scope, receive, marked)


class KeyCheck:
    """Every path but the open ones needs `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send it.

    `keys` has the owners' names; what the request does is done for the owner of its key.
    """

    def __init__(self, app: ASGIApp, keys: Mapping[str, str]):
        self.app = app
        self.keys = {name: key.encode() for name, key in keys.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self.app(scope, receive, send)
        owner = self._owner(scope)
        if owner is None:
            # OpenAI's words for a wrong one: clients (litellm) tell it from a bad request by them.
            sent = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
            wrong = "Incorrect API key provided: this server needs an API key, and that is not it"
            refusal = Unauthorized(
                wrong if sent else "this server needs an API key",
                cure="send Authorization: Bearer KEY, or x-api-key: KEY",
            )
            return await errors.response(refusal)(scope, receive, send)
        if owner:
            scope[SCOPE] = Caller(owner)
        return await self.app(scope, receive, send)

    def _owner(self, scope: Scope) -> str | None:
        """Whose key the request has; None: nobody's."""
        scheme, _, token = _only(scope, b"authorization").partition(b" ")
        bearer = self._holder(token if scheme.lower() == b"bearer" else b"")
        own = self._holder(_only(scope, b"x-api-key"))
        return bearer if own is None else own

    def _holder(self, key: bytes) -> str | None:
        found: str | None = None
        for name, known in self.keys.items():  # all of them: how long it takes says nothing of which it is
            if hmac.compare_digest(key.strip(), known):
                found = name
        return found


def _only(scope: Scope, name: bytes) -> bytes:
    """The value of a header that was sent once; one sent twice says nothing."""
    given = [v for k, v in scope["headers"] if k == name]
    return given[0] if len(given) == 1 else b""


def _hostname(host: bytes) -> str:
    """The name in a Host header, without port, brackets, a final dot or upper case."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        name, _, port = text[1:].partition("]")
    else:
        name, _, port = text.partition(":")
        port = ":" + port
    return name.rstrip(".") if port in ("", ":") or port[1:].isdigit() else ""


class BodyLimit:
    """Pure ASGI: refuses bodies over `limit` bytes with 413, whether announced or found out while reading, and slow ones with 408."""

    def __init__(self, app: ASGIApp, limit: int, special: Mapping[str, int] | None = None):
        self.app = app
        self.limit = limit
        self.special = special or {}  # bounds of single paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = next((v for k, v in scope["headers"] if k == b"content-length"), b"0")
        limit = math.inf if scope["path"].startswith(tuple(UPLOADS)) else self.special.get(scope["path"], self.limit)
        if announced.isdigit() and int(announced) > limit:
            return await self._refuse(_large(limit), scope, receive, send)
        loop = asyncio.get_running_loop()
        seen, began, whole = 0, loop.time(), False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:  # what is waited for now is that the client leaves
                return await receive()
            try:
                async with asyncio.timeout_at(began + BODY_SECONDS + seen / BODY_RATE):
                    message = await receive()
            except TimeoutError:
                raise _Refused(
                    TooSlow(f"the body did not come whole: {seen} bytes in {loop.time() - began:.0f} s")
                ) from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise _Refused(_large(limit))
                whole = not message.get("more_body")
            return message

        try:
            await self.app(scope, counted, send)
        except _Refused as refused:
            await self._refuse(refused.error, scope, receive, send)

    async def _refuse(self, error: QuireError, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = errors.response(error, {"connection": "close"}).on(scope["path"])
        await send({"type": "http.response.start", "status": refusal.status_code, "headers": refusal.raw_headers})
        await send({"type": "http.response.body", "body": refusal.body, "more_body": True})
        # Closing now, with bytes unread, would reset the connection and lose the answer on its way.
        thrown = 0
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while thrown < LINGER_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        break
                    thrown += len(message.get("body", b""))
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})


def _large(limit: float) -> TooLarge:
    return TooLarge(f"the body is over {limit} bytes, the most this server reads here")


class _Refused(BaseException):
    """Passes through every handler up to BodyLimit."""

    def __init__(self, error: QuireError):
        self.error = error


class KnownPaths:
    """Finds paths without a variable by one look, not by a walk along eighty routes; what is not found walks."""

    def __init__(self, router: Router):
        """Every route is there already."""
        self.router = router
        self.walk = router.app
        plain = [route for route in router.routes if isinstance(route, Route) and "{" not in route.path]
        self.known = {(route.path, method): route for route in reversed(plain) for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.known.get((scope["path"], scope["method"])) if scope["type"] == "http" else None
        if route is None:
            return await self.walk(scope, receive, send)
        scope.update(router=self.router, route=route, endpoint=route.endpoint, path_params={})
        return await route.handle(scope, receive, send)
