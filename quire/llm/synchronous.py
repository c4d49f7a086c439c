"""LLM: the library for scripts and notebooks. AsyncLLM's coroutines, on a loop thread of their own.

So it works where a loop already runs, and from several threads. Ctrl-C while waiting aborts what was asked.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from quire.config import DEFAULT_MODEL
from quire.engine.types import Constraint, EngineInfo, Stats
from quire.llm.asynchronous import AsyncLLM, AsyncTextStream, Options
from quire.llm.outputs import Message, Output, Params, Prompt
from quire.runner.params import SamplingParams

if TYPE_CHECKING:
    from concurrent.futures import Future

    from quire.chat.tokenizer import Tokenizer
    from quire.layouts import Floats
    from quire.llm.loop import LoopThread


class LLM:
    """A model for scripts and notebooks. The model is loaded when this returns; see Options.

    >>> with LLM("smollm2:135m") as llm:
    ...     print(llm.chat([{"role": "user", "content": "What is a quire?"}])[0].text)
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Unpack[Options]):
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
        """What was decided at load."""
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

    def generate(
        self,
        prompts: str | Sequence[Prompt] | Sequence[int],
        params: Params = None,
        *,
        constraint: Constraint | None = None,
        lora: str | Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continue each prompt; see AsyncLLM.generate. Ctrl-C aborts all of them."""
        self._async._have()
        return self._loop.run(
            self._async.generate(prompts, params, constraint=constraint, lora=lora, progress=progress)
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        constraint: Constraint | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        parallel_tool_calls: bool = True,
        lora: str | Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer a conversation, or several; see AsyncLLM.chat."""
        self._async._have()
        return self._loop.run(
            self._async.chat(
                messages,
                params,
                constraint=constraint,
                tools=tools,
                tool_choice=tool_choice,
                parallel_tool_calls=parallel_tool_calls,
                lora=lora,
                progress=progress,
            )
        )

    def embed(
        self,
        inputs: str | Sequence[Prompt] | Sequence[int],
        *,
        prompt: str | None = None,
        truncate: bool = False,
        dimensions: int | None = None,
    ) -> Floats:
        """One row of numbers for each text; see AsyncLLM.embed."""
        self._async._have()
        return self._loop.run(self._async.embed(inputs, prompt=prompt, truncate=truncate, dimensions=dimensions))

    def score(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[float]:
        """How well each document answers the query; see AsyncLLM.score."""
        self._async._have()
        return self._loop.run(self._async.score(query, documents, truncate=truncate))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        lora: str | None = None,
    ) -> TextStream:
        """The continuation of one prompt, as it comes."""
        self._async._have()
        return TextStream(self._async.stream(prompt, params, constraint=constraint, lora=lora), self._loop)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        parallel_tool_calls: bool = True,
        reasoning: bool = False,
        lora: str | None = None,
    ) -> TextStream:
        """The answer to one conversation, as it comes; see AsyncLLM.stream_chat."""
        self._async._have()
        source = self._async.stream_chat(
            messages,
            params,
            constraint=constraint,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            reasoning=reasoning,
            lora=lora,
        )
        return TextStream(source, self._loop)


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
        """What there is so far."""
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
