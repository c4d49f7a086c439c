"""The way of the rows of spans to an engine process: once each, in parts of bounded size, ahead of the requests that name them.

Rows are large, and the n sequences of one request have the same ones. So a request goes over the socket without them; they are known there
by the span's digest, its length and their size. The client counts the requests that need them, and says when none is left.

    client: SentRows      Rows part, Rows part, Add, Add ...  Forget      engine: HeldRows

The socket keeps the order. When the engine dies all requests do, and both sides begin with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from quire.engine.transport import wire
from quire.engine.types import Request
from quire.observe.errors import Busy, TooLarge
from quire.runner.spans import Span

PART = 8 << 20  # bytes of a message
MAX_HELD = 1 << 30  # bytes of rows in an engine process, of all requests together
MAX_ROWS = 256 << 20  # ... and of one span


def name_of(span: Span) -> bytes:
    """The name by which messages refer to the rows of a span."""
    return b"%d %d " % (span.length, len(span.rows)) + span.digest


def _without(request: Request) -> Request:
    """The request, its spans with names in place of rows."""
    return _replaced(request, [name_of(span) for span in request.spans])


def _replaced(request: Request, rows: Iterable[Any]) -> Request:
    spans = tuple(msgspec.structs.replace(s, rows=own) for s, own in zip(request.spans, rows, strict=True))
    return msgspec.structs.replace(request, spans=spans)


class SentRows:
    """The client's side. Used from its loop alone."""

    def __init__(self, send: Callable[[wire.ToEngine], None]):
        self._send = send
        self._users: dict[bytes, int] = {}
        self._sizes: dict[bytes, int] = {}
        self._of: dict[str, set[bytes]] = {}  # request id -> names

    def submit(self, request: Request) -> Request:
        """Send what the engine does not have of its rows. The request as it is to be sent, after which `left` must follow."""
        parts = {name_of(span): span.rows for span in request.spans}
        new = {name: rows for name, rows in parts.items() if name not in self._users}
        largest = max(map(len, new.values()), default=0)
        if largest > MAX_ROWS:
            raise TooLarge(f"a span has {largest} bytes of rows: at most {MAX_ROWS}", param="spans")
        held = sum(self._sizes.values())
        if held + sum(map(len, new.values())) > MAX_HELD:
            raise Busy(
                f"the spans of requests that run have {held} bytes of rows: there is no room for more", retry_after=1.0
            )
        self._of[request.id] = set(parts)
        for name, rows in parts.items():
            self._users[name] = self._users.get(name, 0) + 1
            self._sizes[name] = len(rows)
        for name, rows in new.items():
            for at in range(0, len(rows), PART):
                self._send(wire.Rows(name=name, at=at, total=len(rows), data=rows[at : at + PART]))
        return _without(request)

    def left(self, request_id: str) -> None:
        """A request has ended, however it did: rows that no other needs may go. Unknown ids are no news."""
        gone: list[bytes] = []
        for name in self._of.pop(request_id, ()):
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._sizes[name]
                gone.append(name)
        if gone:
            self._send(wire.Forget(names=gone))

    def lost(self) -> None:
        """The engine is gone, and its rows with it."""
        self._users.clear()
        self._sizes.clear()
        self._of.clear()


class HeldRows:
    """The engine's side."""

    def __init__(self) -> None:
        self._rows: dict[bytes, bytearray] = {}
        self._whole: dict[bytes, bytes] = {}

    def take(self, part: wire.Rows) -> None:
        """A part of some rows. Parts of one name come in order; what does not fit is not kept, and requests then miss it."""
        own = self._rows.setdefault(part.name, bytearray())
        others = sum(map(len, self._rows.values())) + sum(map(len, self._whole.values()))
        if part.at != len(own) or len(own) + len(part.data) > part.total or others + len(part.data) > MAX_HELD:
            del self._rows[part.name]
            return
        own += part.data
        if len(own) == part.total:
            self._whole[part.name] = bytes(self._rows.pop(part.name))

    def forget(self, names: Iterable[bytes]) -> None:
        """Nobody who comes will need these. Requests that run keep their own reference."""
        for name in names:
            self._rows.pop(name, None)
            self._whole.pop(name, None)

    def filled(self, request: Request) -> Request:
        """The request with its rows in place. A span whose rows are not here is left without, which the engine refuses."""
        return _replaced(request, [self._whole.get(span.rows, b"") for span in request.spans])
