"""Everything that happens to one HTTP request while it is answered: chunks of every choice, errors, a client that left, a server that stops.

    completer.stream(prompt 0) --\\
    completer.stream(prompt 1) ---+--> items --> whoever answers (a JSON body or an event stream)
    receive(): http.disconnect --/
    drain timeout, keep-alive --/

Leaving the `async with` block, for whatever reason, aborts what still runs. Measures first-token and inter-token times
on the way. `while_connected` is the same for work that answers as a whole, such as embeddings. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from quire.chat.types import Chunk, Generation
from quire.observe.errors import Busy, EngineDead, QuireError, Unavailable
from quire.server.errors import ClientGone, engine_error
from quire.server.served import WATCHED, Served

if TYPE_CHECKING:
    from quire.server.explained import Watch

KEEP_ALIVE_SECONDS = 10.0

T = TypeVar("T")
News: TypeAlias = tuple[int, Chunk]  # which prompt, what
Stream: TypeAlias = Callable[[Generation], AsyncGenerator[Chunk, None]]


class Feed:
    """Runs the generations and hands out their chunks in batches: all that have arrived since the last call."""

    def __init__(
        self,
        served: Served,
        generations: list[Generation],
        receive: Receive,
        arrived: float,
        stream: Stream | None = None,
    ):
        served.model.ready()  # its engine may have died since the request was resolved
        self.served = served
        self._stream = stream or served.completer.stream  # another one may run several generations for one answer
        self._watched = stream is None  # what explains a prompt knows one
        self.generations = [served.placed(g) for g in generations]
        self.arrived = arrived  # time.monotonic() when the request came
        self._receive = receive
        self._items: list[News] = []
        self._failure: BaseException | None = None
        self._running = len(generations)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._finished: set[tuple[int, int]] = set()
        self._last = time.monotonic()  # when news was last handed out
        self._quiet = False  # nothing came for long
        self._reminder: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Feed:
        self.served.model.running.add(self)
        metrics = self.served.metrics
        for i, generation in enumerate(self.generations):
            if metrics is not None:
                metrics.asked(generation.sampling.n, generation.sampling.max_tokens)
            self._tasks.append(asyncio.create_task(self._produce(i, generation)))
        self._tasks.append(asyncio.create_task(self._watch()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.served.model.running.discard(self)
        if self._reminder is not None:
            self._reminder.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._count_end(error)

    def fail(self, error: BaseException) -> None:
        """End the answer with `error`, after the news that already arrived."""
        if self._failure is None:
            self._failure = error
        self._news.set()

    async def first(self, seconds: float) -> None:
        """Wait for the first news. Raises what would have been an error status, while it still can be one."""
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return
        if self._failure is not None and not self._items:
            raise self._failure

    async def batches(self, keep_alive: float | None = None) -> AsyncIterator[list[News]]:
        """Batches until every choice has finished. With `keep_alive`, an empty batch after that many quiet seconds."""
        if keep_alive is not None:
            self._remind(keep_alive)
        while True:
            await self._news.wait()
            self._news.clear()
            items, self._items = self._items, []
            if items:
                self._last = time.monotonic()
                yield items
            elif self._quiet:
                yield []
            self._quiet = False
            if self._failure is not None and not self._items:
                raise self._failure
            if self._running == 0 and not self._items:
                return

    def _remind(self, seconds: float) -> None:
        """Say so when nothing came for that long. One timer for the whole answer: setting one for every batch would cost as much as
        sending it."""
        now = time.monotonic()
        left = self._last + seconds - now
        if left <= 0:
            self._quiet, self._last, left = True, now, seconds
            self._news.set()
        self._reminder = asyncio.get_running_loop().call_later(left, self._remind, seconds)

    async def _produce(self, prompt: int, generation: Generation) -> None:
        metrics = self.served.metrics
        last: dict[int, float] = {}  # choice -> when its newest token came
        open_choices, longest = generation.sampling.n, 0
        watch = _watch(self.served, generation) if self._watched else None
        try:
            async with aclosing(self._stream(generation)) as chunks:
                async for chunk in chunks:
                    now = time.monotonic()
                    if chunk.finish == "error":
                        raise engine_error(chunk.error, started=bool(last), param=chunk.param)
                    if chunk.finish == "abort":
                        raise Unavailable("the request was aborted before its answer was whole")
                    if chunk.tokens:
                        before = last.get(chunk.index)
                        last[chunk.index] = now
                        if metrics is not None and before is None:
                            metrics.first_token(now - self.arrived)
                        elif metrics is not None and before is not None:
                            metrics.next_token(now - before)
                    if watch is not None:
                        await watch.take(chunk)
                    if chunk.finish is not None:
                        open_choices -= 1
                        self._finish(prompt, chunk, now)
                        longest = max(longest, 0 if chunk.receipt is None else chunk.receipt.output_tokens)
                        if metrics is not None and not open_choices:
                            metrics.longest(longest)
                    self._items.append((prompt, chunk))
                    self._news.set()
            if open_choices > 0:
                raise EngineDead("the engine ended the request without finishing it")
        except Exception as error:
            self.fail(error)
        finally:
            if watch is not None:
                watch.close()
        self._running -= 1
        self._news.set()

    def _finish(self, prompt: int, chunk: Chunk, now: float) -> None:
        self._finished.add((prompt, chunk.index))
        metrics, receipt = self.served.metrics, chunk.receipt
        if metrics is None:
            return
        if receipt is None:
            metrics.ended("stop" if chunk.finish == "stop" else "error")
            return
        metrics.finished(
            chunk.finish or "stop",
            prompt=receipt.prompt_tokens,
            output=receipt.output_tokens,
            e2e=now - self.arrived,
            queue=receipt.queue_seconds,
            prefill=receipt.prefill_seconds,
            decode=receipt.decode_seconds,
            cached=receipt.cached_tokens,
            loaded=receipt.loaded_tokens,
        )

    def _count_end(self, error: BaseException | None) -> None:
        metrics = self.served.metrics
        if metrics is None or error is None:
            return
        gone = isinstance(error, ClientGone | asyncio.CancelledError)
        if gone:
            metrics.disconnected()
        if isinstance(error, QuireError):
            metrics.refused(error.code)
        if isinstance(error, Busy):
            return  # it never ran
        total = sum(g.sampling.n for g in self.generations)
        for _ in range(total - len(self._finished)):
            metrics.ended("abort" if gone or isinstance(error, Unavailable) else "error")

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.fail(ClientGone())
                return


def _watch(served: Served, generation: Generation) -> Watch | None:
    """What follows a request to tell why its prompt was not cached; None for a short prompt that was left as it came."""
    if len(generation.prompt) < WATCHED and (generation.origin is None or not generation.origin.changes):
        return None
    from quire.server.explained import Watch

    return Watch(served, generation)


class _Work:
    """What a shutdown sees of it."""

    def __init__(self, task: asyncio.Task[Any]):
        self._task = task
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.failure = error
        self._task.cancel()


async def while_connected(served: Served, request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientGone, or what the server stops with; both cancel it."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_left(request))
    own = _Work(task)
    served.model.running.add(own)
    metrics = served.metrics
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if own.failure is not None:
            raise own.failure
        if not task.done():
            raise ClientGone
        return task.result()
    except BaseException as error:
        if metrics is not None and isinstance(error, ClientGone | asyncio.CancelledError):
            metrics.disconnected()
        if metrics is not None and isinstance(error, QuireError):
            metrics.refused(error.code)
        raise
    finally:
        served.model.running.discard(own)
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
