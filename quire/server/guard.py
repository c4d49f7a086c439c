"""Who may talk to this server: the Host it is called by, the origin of a web page, the API key. Default deny.

Pure ASGI, so that streams and disconnects pass untouched. Only the paths in OPEN answer without the key, compared
exactly: a path that merely resembles one of them is refused. Keys are compared in constant time, every one of them.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import errors, tenants
from quire.server.errors import Forbidden, Unauthorized

OPEN = frozenset({"/health", "/ready"})
ALLOWED = b"authorization, content-type, x-request-id, x-api-key, anthropic-version, anthropic-beta"
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


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
        with tenants.acting_for(owner):
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
