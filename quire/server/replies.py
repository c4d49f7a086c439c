"""Responses of routes: an object as JSON, a stream of server-sent events, or a stream of JSON lines.

A stream is a pure ASGI response. Nothing of it is sent until the first chunk or a few quiet seconds: so a full queue or a refused request is
still an HTTP status, and only later trouble is an error event. Several events that are ready together leave in one write. JSON lines
have no comments, so a long wait is silent there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.observe.errors import QuireError
from quire.server import errors, ignored
from quire.server.errors import ClientGone
from quire.server.feed import KEEP_ALIVE_SECONDS, Feed, News

FIRST_SECONDS = 5.0
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"
BREAKS = {character.encode(): b"\\u%04x" % ord(character) for character in "\u0085\u2028\u2029"}


class Reply(Response):
    """An object as JSON, with notes on what of its request was ignored, if anything was."""

    media_type = "application/json"

    def __init__(self, value: object, status: int, headers: dict[str, str] | None):
        super().__init__(msgspec.json.encode(value), status, headers)
        self.value = value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if ignored.KEY in scope:
            self.body = msgspec.json.encode(ignored.noted(self.value, scope))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def reply(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """The object as a response."""
    return Reply(body, status, headers)


def on_one_line(value: object) -> bytes:
    """JSON in which what some clients take for the end of a line is escaped, which means the same.

    Python's `splitlines` does, and so httpx's `iter_lines`, through which Ollama's client reads.
    """
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for character, escape in BREAKS.items():
            encoded = encoded.replace(character, escape)
    return encoded


def line(value: object) -> bytes:
    """One line of JSON."""
    return on_one_line(value) + b"\n"


class Encoder(Protocol):
    """A dialect's half of a stream: objects for the opening, for each batch of news, and for the end."""

    def opening(self) -> Iterable[object]: ...
    def news(self, items: list[News]) -> Iterable[object]: ...
    def closing(self) -> Iterable[object]: ...


class _Noting:
    """An encoder of a stream whose first event has the notes."""

    def __init__(self, encoder: Encoder, tell: Callable[[object], object]):
        self.encoder = encoder
        self.tell: Callable[[object], object] | None = tell

    def opening(self) -> Iterable[object]:
        return self._told(self.encoder.opening())

    def news(self, items: list[News]) -> Iterable[object]:
        return self._told(self.encoder.news(items))

    def closing(self) -> Iterable[object]:
        return self._told(self.encoder.closing())

    def _told(self, values: Iterable[object]) -> Iterable[object]:
        for value in values:
            tell, self.tell = self.tell, None
            yield value if tell is None else tell(value)


def event(value: object) -> bytes:
    """One `data:` event."""
    return b"data: " + on_one_line(value) + b"\n\n"


def named_event(value: Mapping[str, Any]) -> bytes:
    """One event that is called by the type of its object."""
    return b"event: " + value["type"].encode() + b"\ndata: " + on_one_line(value) + b"\n\n"


class EventStream(Response):
    """Runs a feed and sends what the encoder makes of it, then `[DONE]`."""

    media_type = "text/event-stream"
    frame = staticmethod(event)
    waiting = b": waiting\n\n"  # a comment keeps proxies from closing the connection
    done = DONE
    notes_in = ""  # the object of the first event that has notes on the request, where that is not the event itself

    def __init__(self, feed: Feed, encoder: Encoder, headers: Mapping[str, str] | None = None):
        self.feed = feed
        self.encoder = encoder
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({**HEADERS, **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        started, encoder = False, self.encoder
        if ignored.KEY in scope:
            encoder = _Noting(encoder, lambda value: ignored.noted(value, scope, self.notes_in))
        try:
            async with self.feed as feed:
                await feed.first(FIRST_SECONDS)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                started = True
                await write(b"".join(map(self.frame, encoder.opening())))
                async for items in feed.batches(KEEP_ALIVE_SECONDS):
                    # An empty batch is silence.
                    data = b"".join(map(self.frame, encoder.news(items))) if items else self.silence()
                    if data:
                        await write(data)
            closing = b"".join(map(self.frame, encoder.closing()))
            await self.settle()
            await write(closing + self.done, more=False)
        except ClientGone:
            if not started:
                raise
            await write(b"", more=False)  # goes nowhere; says that the response was ended on purpose
        except Exception as error:
            if not started:
                raise
            if not isinstance(error, QuireError):
                errors.log.error("unexpected %s in a stream", type(error).__name__, exc_info=error)
                error = QuireError("the server failed on this request; its log has the cause")
            await write(self.trouble(scope["path"], error) + self.done, more=False)

    def silence(self) -> bytes:
        """What is sent when nothing came for long."""
        return self.waiting

    async def settle(self) -> None:
        """Between the last news and its telling: what must be done before a client hears of the end."""

    def trouble(self, path: str, error: QuireError) -> bytes:
        """The last words of a stream that did not end well."""
        return self.frame(errors.shaped(path, error)[1])


class LineStream(EventStream):
    """The same as lines of JSON, which end when the body does."""

    media_type = "application/x-ndjson"
    frame = staticmethod(line)
    waiting = b""
    done = b""
