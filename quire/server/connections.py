"""Connections: uvicorn's HTTP/1.1 protocol with bounds on what a client may cost before a handler sees its request.

  * a request's head has HEAD_SECONDS to come whole, or the connection is closed with a 408
  * a chunked body costs work for each chunk, however small. Of one connection PIECES chunks are parsed at a time; what came
    beyond them waits in a queue that all connections share, and the event loop serves everybody else between two turns
  * a body in more than MAX_PIECES chunks, and one for each PIECE bytes, is refused

Knows no route. h11 parses, because it bounds the size of a head.
"""

from __future__ import annotations

import asyncio
from collections import deque

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADERS = 64 * 1024  # bytes of a request's head
HEAD_SECONDS = 20.0  # from a connection's first byte, or the first of its next request, to the end of the head
PIECES = 64  # chunks parsed in one turn: about a millisecond
MAX_PIECES = 100_000
PIECE = 256  # bytes of a body that allow one chunk more
TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
TOO_SMALL = "The body comes in too many too small chunks: send it in larger ones, or with a content-length."


class _Parser(h11.Connection):
    """h11's parser, which stops after PIECES chunks of a body until `more` allows as many again."""

    cut = False  # it has stopped, and what it holds is not all parsed
    paused = False  # a whole request is waiting for the answer to the one before it
    crumbs = False  # the body was refused for its chunks
    _turn = 0
    _pieces = 0
    _bytes = 0

    def more(self) -> None:
        """Allow the chunks of another turn."""
        self.cut, self._turn = False, 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self._turn >= PIECES:
            self.cut = True
            return h11.PAUSED  # uvicorn stops reading the socket
        event = super().next_event()
        self.paused = event is h11.PAUSED
        if isinstance(event, h11.Data):
            self._turn += 1
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > MAX_PIECES + self._bytes // PIECE:
                self.crumbs = True
                raise h11.RemoteProtocolError(TOO_SMALL)
        elif isinstance(event, h11.Request):
            self._pieces = self._bytes = 0
        return event


class _Flow(FlowControl):
    """Reads no more of a connection while what was read is not parsed."""

    def __init__(self, transport: asyncio.Transport, parser: _Parser):
        super().__init__(transport)
        self._parser = parser

    def resume_reading(self) -> None:
        if not self._parser.cut:
            super().resume_reading()


class _Queue:
    """Connections with chunks that are not parsed yet. One of them has a turn in each round of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[_Protocol] = deque()

    def add(self, connection: _Protocol) -> None:
        """Let a connection wait for its turn."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            connection.loop.call_soon(self._next)

    def _next(self) -> None:
        connection = self._waiting[0]
        try:
            connection.go_on()  # which may add it again
        finally:
            self._waiting.popleft()
            if self._waiting:
                connection.loop.call_soon(self._next)


class _Protocol(H11Protocol):
    """One connection."""

    conn: _Parser
    queue: _Queue
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.conn = _Parser(h11.SERVER, MAX_HEADERS)
        super().connection_made(transport)
        self.flow = _Flow(transport, self.conn)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        if self.conn.cut:  # it waits for its turn
            return
        self.conn.more()
        super().handle_events()
        if self.conn.cut:
            self.queue.add(self)

    def go_on(self) -> None:
        """Parse what waited, or the next part of it."""
        self.conn.more()
        if self.transport.is_closing():
            return
        self.handle_events()
        if not self.conn.cut and not self.conn.paused and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(TOO_SMALL if self.conn.crumbs else msg)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()  # the head is here
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._close)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.write(TOO_LATE)
            self.transport.close()


def protocol() -> type[H11Protocol]:
    """The protocol of one server: its connections share a queue."""
    return type("Protocol", (_Protocol,), {"queue": _Queue()})
