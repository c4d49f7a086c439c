"""An engine in this process, on one background thread. For `quire run`, the library, and tests.

Requests go in through a list under a condition; the thread sleeps on that condition when it has nothing to do. Events go
back to whichever asyncio loop asked: several loops, in several threads, may share one client.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from quire.config import EngineConfig, Environment
from quire.engine.engine import Engine
from quire.engine.transport.pending import Pending
from quire.engine.types import AdapterInfo, EngineInfo, Event, Request, Stats, Vocabulary
from quire.observe.errors import EngineDead, QuireError, Unavailable
from quire.observe.steps import KEPT, StepInfo

if TYPE_CHECKING:
    from concurrent.futures import Future  # at run time where it is used: `quire run` needs none

EXIT_SECONDS = 5.0  # for a step that runs when the interpreter ends

T = TypeVar("T")
Builder = Callable[..., tuple[Engine, EngineInfo]]


class InProcessClient:
    """An EngineClient whose engine lives on a thread of this process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        env: Environment | None = None,
        build: Builder | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        self._config = config
        self._env = env
        self._build = build
        self._progress = progress
        self._pending = Pending(config.max_seqs + config.max_waiting)  # until the engine says how many it takes
        self._wake = threading.Condition()
        # A request, or the id of one to abort, or something to do between two steps.
        self._inbox: list[Request | Vocabulary | str | Callable[[Engine], None]] = []
        self._adapters: dict[str, AdapterInfo] = {}
        self._errands: set[Future[Any]] = set()  # that somebody waits for
        self._thread: threading.Thread | None = None
        self._loaded = threading.Event()  # set when loading ended, well or badly
        self._stopping = False
        self._info: EngineInfo | None = None
        self._error: QuireError | None = None
        self._stats = Stats()

    @property
    def info(self) -> EngineInfo | None:
        return self._info

    @property
    def alive(self) -> bool:
        return self._info is not None and self._error is None and not self._stopping

    @property
    def limit(self) -> int:
        """Requests that may be pending at once."""
        return self._pending.limit

    def stats(self) -> Stats:
        return self._stats

    async def steps(self, most: int = KEPT) -> list[StepInfo]:
        return await self._errand(lambda engine: engine.steps(most))

    def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        return self._pending.events(request, self._submit, self.abort)

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        with self._wake:
            self._inbox.append(vocabulary)
            self._wake.notify()

    @property
    def adapters(self) -> list[AdapterInfo]:
        return list(self._adapters.values())

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        def load(engine: Engine) -> AdapterInfo:
            self._adapters[name] = made = engine.hooks.load(name, path)
            return made

        return await self._errand(load)

    async def unload_adapter(self, name: str) -> None:
        def unload(engine: Engine) -> None:
            engine.hooks.unload(name)
            self._adapters.pop(name, None)

        await self._errand(unload)

    async def _errand(self, task: Callable[[Engine], T]) -> T:
        """Do something on the engine's thread, between two steps. Who stops waiting after it has begun does not undo it."""
        import asyncio
        from concurrent.futures import Future

        done: Future[T] = Future()
        done.add_done_callback(self._errands.discard)

        def run(engine: Engine) -> None:
            if not done.set_running_or_notify_cancel():
                return  # nobody waits any more
            try:
                done.set_result(task(engine))
            except BaseException as error:
                done.set_exception(error)

        with self._wake:
            if not self.alive:
                raise Unavailable("the engine is not running")
            self._errands.add(done)
            self._inbox.append(run)
            self._wake.notify()
        return await asyncio.wrap_future(done)

    def abort(self, request_id: str) -> None:
        with self._wake:
            self._inbox.append(request_id)
            self._wake.notify()

    def begin(self) -> None:
        """Start loading, without waiting for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._life, name="quire-engine", daemon=True)
            self._thread.start()
            # A daemon thread that meets the end of the interpreter inside native code takes the process down with it.
            atexit.register(self._end)

    def wait(self) -> EngineInfo:
        """Load, and block this thread until that is done."""
        self.begin()
        self._loaded.wait()
        if self._error is not None:
            raise self._error
        if self._info is None:
            raise Unavailable("the engine was closed before it had loaded")
        return self._info

    async def start(self) -> EngineInfo:
        self.begin()
        import asyncio  # while the engine loads

        return await asyncio.get_running_loop().run_in_executor(None, self.wait)

    async def close(self, drain_seconds: float = 0.0) -> None:
        with self._wake:
            self._stopping = True
        if drain_seconds > 0:
            await self._pending.drained(drain_seconds)
        thread = self.stop()
        if thread is not None:
            import asyncio

            await asyncio.get_running_loop().run_in_executor(None, thread.join)

    def stop(self) -> threading.Thread | None:
        """Abort what runs and tell the thread to end, without waiting for it."""
        with self._wake:
            self._stopping = True
            self._inbox.extend(self._pending.ids())
            self._wake.notify()
        return self._thread

    def _end(self) -> None:
        thread = self.stop()
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_SECONDS)

    def _submit(self, request: Request) -> None:
        with self._wake:
            if self._error is not None:
                raise EngineDead(str(self._error))
            if self._stopping or self._info is None:
                raise Unavailable("the engine is closed" if self._stopping else "the engine has not been started")
            self._inbox.append(request)
            self._wake.notify()

    def _life(self) -> None:
        engine: Engine | None = None
        try:
            engine = self._load()
        except QuireError as e:
            self._error = e
        except Exception as e:  # a fault of ours: the caller gets it with its trace
            self._error = QuireError(f"the engine could not start: {type(e).__name__}: {e}")
            self._error.__cause__ = e
        self._loaded.set()
        if engine is None:
            return
        try:
            self._serve(engine)
        except Exception as e:
            reason = f"the engine failed: {type(e).__name__}: {e}"
            error = EngineDead(reason)
            error.__cause__ = e
            with self._wake:  # whoever comes now is refused
                self._error, left = error, list(self._errands)
            self._pending.fail(lambda: EngineDead(reason))
            for errand in left:
                if errand.set_running_or_notify_cancel():
                    errand.set_exception(EngineDead(reason))
        finally:
            engine.close()
            atexit.unregister(self._end)

    def _load(self) -> Engine:
        build = self._build
        if build is None:
            from quire.engine.construction.build import build_engine as build
        engine, self._info = build(self._config, self._env or Environment.read(), progress=self._went_on)
        self._pending.limit = self._info.max_seqs + self._config.max_waiting
        self._adapters = {own.name: own for own in self._info.adapters}
        self._stats = engine.stats()
        engine.settle()
        return engine

    def _went_on(self, done: int, total: int) -> None:
        """Weights were taken over. Who ends meanwhile does not wait for all the others."""
        if self._stopping:
            raise Unavailable("the engine was closed before it had loaded")
        if self._progress is not None:
            self._progress(done, total)

    def _serve(self, engine: Engine) -> None:
        """Step while there is work, sleep while there is none; stop when told and idle."""
        while True:
            with self._wake:
                while not self._inbox and not engine.busy:
                    if self._stopping:
                        return
                    self._wake.wait()
                inbox, self._inbox = self._inbox, []
            for item in inbox:
                if isinstance(item, str):
                    engine.abort(item)
                elif isinstance(item, Vocabulary):
                    engine.set_vocabulary(item)
                elif isinstance(item, Request):
                    engine.add(item)
                else:
                    item(engine)
            if engine.busy:
                events = engine.step()
                self._stats = engine.stats()
                if events:
                    self._pending.deliver(events)
