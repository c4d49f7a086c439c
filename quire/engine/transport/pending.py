"""Requests a client has handed to its engine and still waits for: one mailbox each, counted against a bound.

Shared by the clients; knows neither threads nor sockets. `deliver` may be called from any thread: events reach the
asyncio loop that waits for them in one wakeup per batch. A mailbox leaves the table when its last event is delivered,
its reader goes away, or the engine dies; events for anybody else are dropped, because their reader has left.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING

from quire.engine.types import Event, Request
from quire.observe.errors import BadRequest, Busy, QuireError

if TYPE_CHECKING:
    import asyncio  # at run time where it is used: an engine begins to load sooner without it

RATE_WINDOW = 64  # finished requests that the retry estimate looks back on


class Mailbox:
    """Events of one request on their way to the loop that reads them."""

    __slots__ = ("_error", "_events", "_waiter", "id", "loop")

    def __init__(self, request_id: str, loop: asyncio.AbstractEventLoop):
        self.id = request_id
        self.loop = loop
        self._events: deque[Event] = deque()
        self._error: QuireError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, events: Iterable[Event], error: QuireError | None = None) -> None:
        """Put an item into the mailbox. Called on the reader's loop only."""
        self._events.extend(events)
        self._error = self._error or error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Event:
        """The next event; an error raises once what came before it has been read."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()


class Pending:
    """The table of mailboxes, the bound on their number, and what recent throughput says about waiting."""

    def __init__(self, limit: int):
        self.limit = limit
        self._boxes: dict[str, Mailbox] = {}
        self._lock = threading.Lock()
        self._finished: deque[float] = deque(maxlen=RATE_WINDOW)
        self._idle: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def __len__(self) -> int:
        return len(self._boxes)

    def ids(self) -> list[str]:
        """Requests without a last event."""
        with self._lock:
            return list(self._boxes)

    async def events(
        self, request: Request, submit: Callable[[Request], None], abort: Callable[[str], None]
    ) -> AsyncGenerator[Event, None]:
        """Submit, yield until the last event, and abort when the reader leaves before that."""
        box = self._open(request.id)
        try:
            submit(request)
            while True:
                event = await box.take()
                if event.busy:
                    raise Busy(event.error or "there is too much work", retry_after=event.retry_after, code=event.busy)
                yield event
                if event.finish is not None:
                    return
        finally:
            with self._lock:
                open_still = self._boxes.get(request.id) is box
                if open_still:
                    del self._boxes[request.id]
            if open_still:
                self._wake_if_idle()
                abort(request.id)

    def deliver(self, events: Iterable[Event]) -> None:
        """Hand events to their readers, in order, with one wakeup per loop."""
        loops: dict[asyncio.AbstractEventLoop, dict[Mailbox, list[Event]]] = {}
        with self._lock:
            for event in events:
                box = self._boxes.get(event.id)
                if box is None:
                    continue
                loops.setdefault(box.loop, {}).setdefault(box, []).append(event)
                if event.finish is not None:
                    del self._boxes[event.id]
                    self._finished.append(time.monotonic())
        for loop, mail in loops.items():
            _on(loop, _put, mail)
        self._wake_if_idle()

    def fail(self, error: Callable[[], QuireError]) -> None:
        """Let every request raise; each gets an exception of its own."""
        with self._lock:
            boxes = list(self._boxes.values())
            self._boxes.clear()
        for box in boxes:
            _on(box.loop, box.put, (), error())
        self._wake_if_idle()

    async def drained(self, seconds: float) -> bool:
        """Wait until nothing is pending, at most that long."""
        if not self._boxes:
            return True
        import asyncio

        loop = asyncio.get_running_loop()
        done = loop.create_future()
        with self._lock:
            self._idle.append((loop, done))
        self._wake_if_idle()
        try:
            await asyncio.wait_for(done, seconds)
        except TimeoutError:
            return False
        return True

    def retry_after(self) -> float:
        """Seconds until a place is likely free, from how fast requests finished lately; between 1 and 60."""
        if len(self._finished) < 2:
            return 1.0
        span = time.monotonic() - self._finished[0]
        # A tenth of the queue has to go before it is worth coming back; one request at the least.
        wanted = max(1, self.limit // 10)
        return min(60.0, max(1.0, wanted * span / len(self._finished)))

    def _open(self, request_id: str) -> Mailbox:
        import asyncio

        box = Mailbox(request_id, asyncio.get_running_loop())
        with self._lock:
            if len(self._boxes) >= self.limit:
                full = len(self._boxes)
            elif request_id in self._boxes:
                raise BadRequest(f"a request with id {request_id!r} is already running", param="request_id")
            else:
                self._boxes[request_id] = box
                return box
        raise Busy(f"{full} requests are running or waiting: the queue is full", retry_after=self.retry_after())

    def _wake_if_idle(self) -> None:
        with self._lock:
            if self._boxes or not self._idle:
                return
            idle, self._idle = self._idle, []
        for loop, future in idle:
            _on(loop, _resolve, future)


def _put(mail: dict[Mailbox, list[Event]]) -> None:
    for box, events in mail.items():
        box.put(events)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _on(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    """Run on that loop: now when we are on it, else in its next turn. A closed loop has no readers left."""
    import asyncio

    try:
        here = asyncio.get_running_loop()
    except RuntimeError:
        here = None
    if here is loop:
        call(*args)
        return
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        if not loop.is_closed():
            raise
