"""Responses that run in the background: a bounded number at a time, each with the log of its events.

A run does not depend on a connection: it ends by itself, by a cancel, or with the server. Its events are stored as they were sent, so
that a client may listen late or again; those of the last runs that ended stay for a while. Knows no requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.chat.types import Generation
from quire.observe.errors import Busy, QuireError
from quire.server.feed import KEEP_ALIVE_SECONDS, Feed, Stream
from quire.server.openai.responses.answer import Answer, Event
from quire.server.replies import HEADERS, named_event
from quire.server.served import Served
from quire.server.server import Server

log = logging.getLogger("quire.server")

TOGETHER = 32  # that run; the others are queued
MAX_QUEUED = 1024
MAX_ENDED = 64  # logs of runs that have ended
MAX_ENDED_BYTES = 64 << 20


class Run:
    """A response that runs in the background."""

    def __init__(self, answer: Answer, owner: str):
        self.answer = answer
        self.owner = owner
        self.frames: list[bytes] = []  # the n-th has sequence number n
        self.size = 0
        self.ending = False  # nothing can stop it any more: what it has become is being stored
        self.over = False
        self.task: asyncio.Task[None] | None = None
        self.entered = asyncio.Event()
        self._listeners: set[asyncio.Event] = set()

    def tell(self, events: Iterable[Event]) -> None:
        """Log events, and wake who listens."""
        for event in events:
            self.frames.append(named_event(event))
            self.size += len(self.frames[-1])
        for listener in self._listeners:
            listener.set()

    def remind(self, seen: int) -> bool:
        """Log that it still runs, as an event, so that every listener sees the same numbers, unless more than `seen` are there by now.
        False for a listener who has nothing to read then: the end is being stored, or he asked for later events."""
        if len(self.frames) == seen and not (self.ending or self.over):
            self.tell([self.answer.waiting()])
        return len(self.frames) > seen

    def listen(self) -> asyncio.Event:
        news = asyncio.Event()
        self._listeners.add(news)
        return news

    def leave(self, news: asyncio.Event) -> None:
        self._listeners.discard(news)


class Runs:
    """The responses that run in the background; one is found by its owner alone. `keep` stores what an answer has become."""

    def __init__(self, server: Server):
        self._server = server
        self._running: dict[str, Run] = {}
        self._ended: OrderedDict[str, Run] = OrderedDict()
        self._turn = asyncio.Semaphore(TOGETHER)

    def get(self, response: str, owner: str) -> Run | None:
        """A run that goes on, or one whose log is still here."""
        return self.running(response, owner) or _of(self._ended.get(response), owner)

    def running(self, response: str, owner: str) -> Run | None:
        """A run that goes on."""
        return _of(self._running.get(response), owner)

    def check_room(self) -> None:
        """Refuse when too many wait."""
        if len(self._running) >= MAX_QUEUED:
            raise Busy(f"{len(self._running)} responses run in the background or wait to: that is the most")

    def start(
        self,
        served: Served,
        answer: Answer,
        generation: Generation,
        arrived: float,
        keep: Callable[[], Awaitable[None]],
        stream: Stream | None = None,
    ) -> Run:
        """Start a response in the background."""
        run = Run(answer, served.caller.owner)
        run.tell(answer.created())
        self._running[answer.id] = run
        run.task = asyncio.create_task(self._go(run, served, generation, arrived, keep, stream))
        return run

    async def cancel(self, run: Run) -> None:
        """Stop it, and wait until it has stopped."""
        if run.task is not None:
            await run.entered.wait()  # a task that is cancelled before its first step never ends what it began
            if not run.ending:
                run.ending = True
                run.task.cancel()
            await self.settled(run)

    async def settled(self, run: Run) -> None:
        """Wait until it is over and stored. Who gives up waiting stops nothing."""
        if run.task is not None:
            await asyncio.wait({run.task})

    def forget(self, response: str, owner: str) -> None:
        """Drop the log of events of a response."""
        if _of(self._ended.get(response), owner) is not None:
            del self._ended[response]

    async def _go(
        self,
        run: Run,
        served: Served,
        generation: Generation,
        arrived: float,
        keep: Callable[[], Awaitable[None]],
        stream: Stream | None,
    ) -> None:
        answer = run.answer
        run.entered.set()
        self._server.enter()  # a shutdown waits for it as for a request
        try:
            try:
                async with self._turn:
                    run.tell(answer.begun())
                    async with Feed(served, [generation], _nobody, arrived, stream) as feed:
                        async for items in feed.batches():
                            run.tell(answer.news(items))
                last = answer.closing()
            except asyncio.CancelledError:
                last = answer.cancelled()
            except Exception as error:
                if not isinstance(error, QuireError):
                    log.error("unexpected %s in a background response", type(error).__name__, exc_info=error)
                    error = QuireError("the server failed on this request; its log has the cause")
                last = answer.failing(error)
            events, run.ending = list(last), True
            await keep()  # before it is told: who hears of the end finds it stored
            run.tell(events)
        except Exception as error:
            log.error("a background response cannot be stored: %s", type(error).__name__, exc_info=error)
        finally:
            self._end(run)
            self._server.leave()

    def _end(self, run: Run) -> None:
        run.over = True
        run.tell(())
        self._running.pop(run.answer.id, None)
        self._ended[run.answer.id] = run
        size = sum(one.size for one in self._ended.values())
        while len(self._ended) > MAX_ENDED or (size > MAX_ENDED_BYTES and len(self._ended) > 1):
            size -= self._ended.popitem(last=False)[1].size


def _of(run: Run | None, owner: str) -> Run | None:
    return run if run is not None and run.owner == owner else None


async def _nobody() -> Message:
    """The connection of a request that has none."""
    await asyncio.Event().wait()
    return {"type": "http.disconnect"}


class Listening(Response):
    """The events of a run from some number on, until it ends or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, run: Run, start: int = 0):
        self.run = run
        self.start = start
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(HEADERS)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        news = self.run.listen()
        left = asyncio.create_task(_left(receive, news))
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        at = self.start
        try:
            while not left.done():
                news.clear()
                data, at = b"".join(self.run.frames[at:]), max(at, len(self.run.frames))
                if data:
                    await write(data)
                elif self.run.over:
                    break
                elif not await _within(news, KEEP_ALIVE_SECONDS) and not self.run.remind(at):
                    await write(b": waiting\n\n")
            await write(b"", more=False)
        finally:
            self.run.leave(news)
            left.cancel()


async def _within(news: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await news.wait()
    except TimeoutError:
        return False
    return True


async def _left(receive: Receive, news: asyncio.Event) -> Any:
    while (await receive())["type"] != "http.disconnect":
        pass
    news.set()
