"""A process client's side of adapters: errands to the engine that are answered, and what is loaded there.

Messages reach the engine in order. So an engine that was started again gets its adapters before any request that names one,
without anybody waiting; what cannot be loaded again is told, and is gone. The books follow the engine's answers, not those who
asked: who stops waiting has not undone what the engine did.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable

from quire.engine.transport import wire
from quire.engine.types import AdapterInfo, EngineInfo
from quire.observe.errors import EngineDead, QuireError, Unavailable

Done = Callable[[AdapterInfo | None], None]


def _nothing(made: AdapterInfo | None) -> None:
    pass


class RemoteAdapters:
    """The adapters of one engine process. Used from one asyncio loop."""

    def __init__(self, send: Callable[[wire.ToEngine], None], on_line: Callable[[str], None]):
        self._send = send
        self._on_line = on_line
        self._tickets = itertools.count()
        self._errands: dict[int, tuple[asyncio.Future[AdapterInfo | None], Done]] = {}
        self._again: set[asyncio.Task[None]] = set()
        self.loaded: dict[str, AdapterInfo] = {}

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Read it there, and let requests name it."""

        def done(made: AdapterInfo | None) -> None:
            if made is not None:
                self.loaded[name] = made

        made = await self._ask(lambda ticket: wire.Load(ticket, name, os.path.abspath(path)), done)
        if made is None:
            raise QuireError("the engine loaded an adapter and did not say which")
        return made

    async def unload(self, name: str) -> None:
        """Let no more requests name an adapter."""

        def done(_: AdapterInfo | None) -> None:
            self.loaded.pop(name, None)

        await self._ask(lambda ticket: wire.Unload(ticket, name), done)

    def unchanged(self, loras: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """The adapters, of those an engine was started with, that are loaded now: what the next engine is to be started with."""
        return tuple((name, path) for name, path in loras if name in self.loaded and self.loaded[name].path == path)

    def started(self, info: EngineInfo) -> None:
        """An engine is ready. It has what it was started with; what was loaded into the one before it is loaded again."""
        has = {own.name: own for own in info.adapters}
        for name, made in self.loaded.items():
            if name not in has:
                asked = self._ask(lambda ticket, name=name, made=made: wire.Load(ticket, name, made.path))
                task = asyncio.create_task(self._back(name, asked))
                self._again.add(task)
                task.add_done_callback(self._again.discard)
        self.loaded |= has

    def answered(self, answer: wire.Answer) -> None:
        """Take in the engine's answer to a request to load or unload."""
        waiting, done = self._errands.pop(answer.ticket, (None, _nothing))
        if answer.error is None:
            done(answer.adapter)
        if waiting is None or waiting.done():
            return
        if answer.error is None:
            waiting.set_result(answer.adapter)
        else:
            waiting.set_exception(answer.error.error())

    def failed(self, error: Callable[[], QuireError]) -> None:
        """The engine is gone, and its answers with it."""
        errands, self._errands = self._errands, {}
        for waiting, _ in errands.values():
            if not waiting.done():
                waiting.set_exception(error())

    async def _back(self, name: str, asked: asyncio.Future[AdapterInfo | None]) -> None:
        try:
            await asked
        except (EngineDead, Unavailable):
            pass  # no fault of the adapter: the engine after this one is asked again
        except QuireError as e:
            self.loaded.pop(name, None)
            self._on_line(f"the adapter {name} could not be loaded again: {e}")

    def _ask(
        self, message: Callable[[int], wire.ToEngine], done: Done = _nothing
    ) -> asyncio.Future[AdapterInfo | None]:
        """Send it now; the answer comes, and is first told to `done`."""
        ticket = next(self._tickets)
        answer: asyncio.Future[AdapterInfo | None] = asyncio.get_running_loop().create_future()
        self._send(message(ticket))
        self._errands[ticket] = answer, done
        return answer
