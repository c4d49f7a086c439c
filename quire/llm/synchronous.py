"""LLM: the library for scripts and notebooks. AsyncLLM's coroutines, on a loop thread of their own.

So it works where a loop already runs, and from several threads. Ctrl-C while waiting aborts what was asked. A method that AsyncLLM has
is declared there once: here it waits.
"""

from __future__ import annotations

import functools
import inspect
import os
import queue
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack

from quire.config import DEFAULT_MODEL
from quire.engine.types import EngineInfo, Stats
from quire.llm.asynchronous import AsyncLLM, AsyncTextStream, Options
from quire.llm.outputs import Output

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.llm.loop import LoopThread

P = ParamSpec("P")
T = TypeVar("T")


def _waits(
    method: Callable[Concatenate[AsyncLLM, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[LLM, P], T]:
    """A coroutine of AsyncLLM as a method of LLM that waits for it."""

    @functools.wraps(method)
    def call(self: LLM, *args: P.args, **named: P.kwargs) -> T:
        self._async._have()
        return self._loop.run(method(self._async, *args, **named))

    return call


def _streams(
    method: Callable[Concatenate[AsyncLLM, P], AsyncTextStream],
) -> Callable[Concatenate[LLM, P], TextStream]:
    """A stream of AsyncLLM as one that is waited for piece by piece."""

    @functools.wraps(method)
    def call(self: LLM, *args: P.args, **named: P.kwargs) -> TextStream:
        self._async._have()
        return TextStream(method(self._async, *args, **named), self._loop)

    # Else `help` would tell what the wrapped one returns.
    vars(call)["__signature__"] = inspect.signature(method).replace(return_annotation="TextStream")
    return call


class LLM:
    """A model for scripts and notebooks. The model is loaded when this returns; see Options.

    >>> with LLM("smollm2:135m") as llm:
    ...     print(llm.chat([{"role": "user", "content": "What is a quire?"}])[0].text)
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[Options]):
        self._async = AsyncLLM(model, **options)
        self._async._load()
        from quire.llm.loop import LoopThread  # asyncio: the engine loads sooner without it

        self._loop = LoopThread()
        weakref.finalize(self, self._loop.stop)

    def close(self) -> None:
        """Abort what runs and free the model. Calling it again is harmless."""
        if not self._async._closed:
            self._loop.run(self._async.close())
            self._loop.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """The decisions taken at load."""
        return self._async.info

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template; without one it can only continue text."""
        return self._async.chats

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._async.tokenizer

    def stats(self) -> Stats:
        """A snapshot of the engine."""
        return self._async.stats()

    # What AsyncLLM has as coroutines, with its parameters and its words. Ctrl-C while one waits aborts what it asked for.
    generate = _waits(AsyncLLM.generate)
    chat = _waits(AsyncLLM.chat)
    embed = _waits(AsyncLLM.embed)
    score = _waits(AsyncLLM.score)
    stream = _streams(AsyncLLM.stream)
    stream_chat = _streams(AsyncLLM.stream_chat)


class TextStream:
    """Text as it comes: `for piece in stream`. `output` is whole once the iteration has ended."""

    def __init__(self, source: AsyncTextStream, loop: LoopThread):
        self._ended = False
        self._future: Future[None] | None = None
        self._source = source
        self._queue: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._future = loop.start(_pump(source, self._queue))  # which must not hold us: see __del__

    @property
    def output(self) -> Output | None:
        """The output so far."""
        return self._source.output

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        try:
            item = self._queue.get()
        except BaseException:  # Ctrl-C while waiting
            self.close()
            raise
        if isinstance(item, str):
            return item
        self._ended = True
        if item is None:
            raise StopIteration
        raise item

    def close(self) -> None:
        """Stop; the request is aborted within one step."""
        self._ended = True
        if self._future is not None:
            self._future.cancel()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


async def _pump(source: AsyncTextStream, out: queue.SimpleQueue[str | BaseException | None]) -> None:
    end: BaseException | None = None
    try:
        async for piece in source:
            out.put(piece)
    except Exception as e:
        end = e
    finally:
        await source.aclose()
        out.put(end)
