"""Errors as HTTP sees them: OpenAI's shape, one status each, and nothing of the machine inside.

`response(error)` is the only way an error leaves this process as a body. What is not a QuireError becomes a plain 500:
its text goes to the log, never to a client. A dialect with a shape of its own puts it in SHAPES, for the paths it owns:
every layer's refusals there take it. Knows HTTP and the catalogue; knows no dialect's requests.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import TypeAlias

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.observe.errors import BadRequest, Busy, EngineDead, QuireError, Unavailable

log = logging.getLogger("quire.server")

MAX_MESSAGE = 600
# Engine messages are written for people, but an exception's text may slip into one: addresses, files, tracebacks.
_PRIVATE = re.compile(r"0x[0-9a-fA-F]{6}|(?:^|[\s'\"(=:])/[\w.-]+/|[A-Za-z]:\\|Traceback|File \"")


class Unauthorized(QuireError):
    """No API key, or not the right one."""

    code = "invalid_api_key"
    status = 401


class Forbidden(QuireError):
    """The request came under a name this server does not answer to."""

    code = "forbidden_host"
    status = 403


class UnsupportedMedia(QuireError):
    """The body is not JSON by its own word."""

    code = "unsupported_media_type"
    status = 415


class TooSlow(QuireError):
    """The request's body comes so slowly that it is not waited for."""

    code = "request_timeout"
    status = 408


class Unimplemented(QuireError):
    """A part of somebody's API that is not here. The message names it."""

    code = "not_implemented"
    status = 501


RETRY = 5  # seconds, where nobody can say how long it takes


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def clean(message: str, instead: str = "the engine could not run the request; the server's log has the cause") -> str:
    """`message` if it says nothing about the machine, else a sentence that says where to look."""
    message = message[:MAX_MESSAGE]
    return instead if _PRIVATE.search(message) else message


def text(error: QuireError) -> str:
    """What a client is told: a refusal's own words, and of a failure only what says nothing about the machine."""
    return str(error)[:MAX_MESSAGE] if error.status < 500 else clean(str(error))


def body(error: QuireError) -> dict[str, object]:
    """The error object, in OpenAI's shape."""
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": text(error), "type": kind, "param": error.param, "code": error.code}}


def headers(error: QuireError) -> dict[str, str]:
    """Headers a client can act on."""
    if isinstance(error, Busy | Unavailable) and error.retry_after is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, Unavailable | EngineDead):
        return {"retry-after": str(RETRY)}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


Shape: TypeAlias = Callable[[QuireError], tuple[int, object]]  # an error's status and body
SHAPES: dict[str, Shape] = {}  # by the beginning of the path; "/" is that path alone


def shaped(path: str, error: QuireError) -> tuple[int, object]:
    """Status and body of an error on `path`."""
    named = (shape for prefix, shape in SHAPES.items() if prefix != "/" and path.startswith(prefix))
    shape = SHAPES.get(path) or next(named, None)
    return (error.status, body(error)) if shape is None else shape(error)


class ErrorResponse(Response):
    """An error that takes its shape from the path it is the answer to: the layers in front know no dialect."""

    media_type = "application/json"

    def __init__(self, error: QuireError, extra: dict[str, str]):
        super().__init__(msgspec.json.encode(body(error)), error.status, extra)
        self.error = error
        self.extra = extra

    def on(self, path: str) -> Response:
        """The answer to a request of that path."""
        status, value = shaped(path, self.error)
        return Response(msgspec.json.encode(value), status, self.extra, self.media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.on(scope["path"])(scope, receive, send)


def response(error: QuireError, extra: dict[str, str] | None = None) -> ErrorResponse:
    """The whole answer."""
    return ErrorResponse(error, headers(error) | (extra or {}))


async def on_quire_error(request: Request, error: Exception) -> Response:
    """Handler of every QuireError."""
    if not isinstance(error, QuireError):
        return await on_exception(request, error)
    if error.status >= 500 and not isinstance(error, Unavailable | Unimplemented):
        log.error("%s: %s", error.code, error)
    return response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of the router's own refusals: no such route, wrong method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        known = QuireError("there is no such route", cure="docs/server.md lists them", code="unknown_url")
    elif status == 405:
        known = QuireError("this route does not take that method", code="method_not_allowed")
    else:
        known = QuireError("the request could not be handled", code="http_error")
    known.status = status
    extra = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return response(known, extra)


async def on_exception(request: Request, error: Exception) -> Response:
    """Handler of what nobody expected. The log gets the traceback, the client gets a sentence."""
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    return response(QuireError("the server failed on this request; its log has the cause"))


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; the status is for the log."""
    return Response(status_code=499)


def engine_error(message: str | None, started: bool, param: str | None = None) -> QuireError:
    """What an error event means: a request that could not start was bad, one that had started failed."""
    if message and param:  # the engine found fault with a field, at once or on the way: it speaks of the client's own
        return BadRequest(message, param=param)
    text = clean(message or "the engine gave no reason")
    return QuireError(text, code="engine_error") if started else BadRequest(text, code="engine_refused")
