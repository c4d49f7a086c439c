"""Errors as HTTP sees them: OpenAI's shape, one status each, and nothing of the machine inside.

`response(error)` is the only way an error leaves this process as a body. What is not a QuireError becomes a plain 500:
its text goes to the log, never to a client. Knows HTTP and the catalogue; knows no dialect's requests.
"""

from __future__ import annotations

import logging
import math
import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def clean(message: str, instead: str = "the engine could not run the request; the server's log has the cause") -> str:
    """`message` if it is fit for strangers, else a sentence that says where to look."""
    message = message[:MAX_MESSAGE]
    return instead if _PRIVATE.search(message) else message


def body(error: QuireError) -> dict[str, object]:
    """The error object, in OpenAI's shape."""
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    text = str(error)[:MAX_MESSAGE] if error.status < 500 else clean(str(error))
    return {"error": {"message": text, "type": kind, "param": error.param, "code": error.code}}


def headers(error: QuireError) -> dict[str, str]:
    """Headers a client can act on."""
    if isinstance(error, Busy):
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, Unavailable | EngineDead):
        return {"retry-after": "5"}
    if isinstance(error, Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


def response(error: QuireError, extra: dict[str, str] | None = None) -> Response:
    """The whole answer."""
    return Response(
        msgspec.json.encode(body(error)),
        status_code=error.status,
        media_type="application/json",
        headers=headers(error) | (extra or {}),
    )


async def on_quire_error(request: Request, error: Exception) -> Response:
    """Handler of every QuireError."""
    if not isinstance(error, QuireError):
        return await on_exception(request, error)
    if error.status >= 500 and not isinstance(error, Unavailable):
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
    if message and param and not started:  # the engine found fault with a field: its words are about the client's own
        return BadRequest(message, param=param)
    text = clean(message or "the engine gave no reason")
    return QuireError(text, code="engine_error") if started else BadRequest(text, code="engine_refused")
