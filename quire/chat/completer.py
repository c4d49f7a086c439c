"""Text in, text out, over one engine: every server dialect, the library and the CLI use this one class.

It owns: prompts to ids (with bounds checked before work is done), one generation fanned out to n engine requests, their
events merged as they come, and stop strings. It does not know HTTP or where the engine runs. Leaving `stream` early, by
break, cancellation or aclose, lets every engine request go.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from quire.chat.choice import ChoiceStream
from quire.chat.templates import protect
from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.chat.tools.types import SIGNS
from quire.chat.types import Call, Choice, Chunk, Generation
from quire.engine.constraints.grammar import check as check_constraint
from quire.engine.transport.client import EngineClient
from quire.engine.types import Constraint, EngineInfo, Event, Request, Vocabulary
from quire.observe.errors import BadModelFile, BadRequest

if TYPE_CHECKING:
    from quire.chat.shifting import ShiftingClient
    from quire.chat.tools.check import Score
    from quire.chat.tools.types import Format, Reading, Tools

THREAD_FROM = 4 * 1024  # characters, some milliseconds; longer texts are tokenized in a thread, off the event loop
TAIL = 64  # tokens of a prompt's end that say whether it opened the reasoning


class Completer:
    """Completions and chat over one engine. `template` is None for a model without one: chat is then refused."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        info: EngineInfo,
        *,
        looked: bool = False,
        answer_format: Format | None = None,
    ):
        """`looked`: `answer_format` is what `find_format` found; otherwise it is looked for when it is first needed."""
        if info.vocab_size > tokenizer.vocab_size:
            raise BadModelFile(
                f"{info.model}: the model chooses among {info.vocab_size} tokens, but its tokenizer has "
                f"{tokenizer.vocab_size}"
            )
        if tokenizer.ordinary_size > info.vocab_size:  # added tokens may lie beyond: a request for one is refused
            raise BadModelFile(
                f"{info.model}: the tokenizer has {tokenizer.ordinary_size} tokens, but the model has {info.vocab_size} "
                "of them"
            )
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.info = info
        self._taught = False
        self._vocabulary: Vocabulary | None = None
        self._reading = threading.Lock()
        self._answer_format = answer_format
        self._looked = looked
        self._looking = threading.Lock()

    # Prompts

    async def encode_prompt(self, text: str) -> list[int]:
        """`tokenize_prompt`, in a thread when the text is long, so that other requests go on."""
        if len(text) < THREAD_FROM:
            return self.tokenize_prompt(text)
        return await asyncio.to_thread(self.tokenize_prompt, text)

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """`tokenize_chat`, in a thread when the conversation is long."""
        if len(messages) < 64 and not kwargs.get("tools") and _size([messages, kwargs]) < THREAD_FROM:
            return self.tokenize_chat(messages, **kwargs)
        return await asyncio.to_thread(lambda: self.tokenize_chat(messages, **kwargs))

    def tokenize_prompt(self, text: str) -> list[int]:
        """Ids of a completion prompt: special tokens in the text count, begin and end tokens as the model asks."""
        self._check_size(text)
        return self.tokenizer.encode(text, add_special=True, parse_special=True)

    def tokenize_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Ids of a conversation, as the model's own template writes it. The begin token comes once, and control tokens
        are those that the template writes: the same text in a message stays text."""
        self.generates()
        if self.template is None:
            raise BadRequest(
                "this model has no chat template: it continues text, and does not chat",
                param="messages",
                cure="use completions (POST /v1/completions, LLM.generate, quire run --raw)",
            )
        if (tools or _have_calls(messages)) and self.prompts_tools:
            from quire.chat.tools import general

            messages, tools = general.written(self.template, messages, tools), None
        conversation = self.template.conversation(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )
        prompt = protect.write(conversation, self.tokenizer)
        self._check_size(prompt.text)
        ids = prompt.ids()
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _check_size(self, text: str) -> None:
        """Refuse what cannot fit whatever its tokens are, before spending time on it."""
        if len(text) <= self.info.context:
            return
        longest = self.tokenizer.max_token_bytes
        if longest is not None and len(text) > self.info.context * longest:
            raise BadRequest(
                f"the prompt has {len(text)} characters, which is more than {self.info.context} tokens "
                f"(the context) of at most {longest} bytes can hold",
                param="prompt",
                code="context_length_exceeded",
            )

    # Answers

    @property
    def answer_format(self) -> Format | None:
        """The format in which this model writes reasoning and tool calls, found from its template on first use; None: all it
        writes is text."""
        if not self._looked:
            with self._looking:
                if not self._looked:
                    if self.info.task == "generate":
                        self._answer_format = find_format(self.template, self.tokenizer)
                    self._looked = True
        return self._answer_format

    @property
    def prompts_tools(self) -> bool:
        """Whether tools are described to this model in words: its chat template has no place for them."""
        if self.template is None or self.info.task != "generate":
            return False
        return self.answer_format is None or not self.answer_format.calls

    def _format_for(self, tools: Tools) -> Format | None:
        """The format of answers to a request with these tools."""
        if not tools.tools or tools.choice == "none" or not self.prompts_tools:
            return self.answer_format
        from quire.chat.tools.general import general

        return general(self.answer_format, self.tokenizer.controls)

    def score(self) -> Score | None:
        """The score of the format on what the template writes; takes a good part of a second, and is not needed to answer."""
        if self.answer_format is None or self.template is None:
            return None
        from quire.chat.tools.check import check

        return check(self.template, self.tokenizer, self.answer_format)

    async def answering(
        self, prompt: list[int], tools: Tools, answer: Constraint | None = None
    ) -> tuple[Reading | None, Constraint | None]:
        """The parser for the answer to a chat prompt, and its constraint: calls where they are demanded, `answer` elsewhere.

        Raises BadRequest where the tools cannot be honoured."""
        ready = self._looked or self.template is None or not _shows_more(self.template)
        form = self._format_for(tools) if ready else await asyncio.to_thread(self._format_for, tools)
        if tools.choice != "none":
            _check_tools(tools, form)
        if form is None:
            return None, answer
        tail = self.tokenizer.decode(prompt[-TAIL:], at_start=False)
        if form is self.answer_format:
            return form.reading(tail, tools), form.constraint(tail, tools, answer)
        # Every tool's schema is tried here, which takes its time.
        return form.reading(tail, tools), await asyncio.to_thread(form.constraint, tail, tools, answer)

    def _kept(self) -> frozenset[int]:
        """Special tokens that a reading must see."""
        if self.answer_format is None:
            return frozenset()
        ids = (self.tokenizer.token_id(mark) for mark in self.answer_format.markers)
        return frozenset(i for i in ids if i is not None)

    # Generation

    def generates(self) -> None:
        """Raise BadRequest where the engine makes no text."""
        if self.info.task != "generate":
            does = "embeds texts" if self.info.task == "embed" else "scores pairs of texts"
            raise BadRequest(
                f"{self.info.model} {does}: it cannot generate text", param="model", code="unsupported_task"
            )

    def check(self, generation: Generation) -> None:
        """Raise BadRequest for what cannot be honoured. `stream` checks too; this is for who must know before."""
        self.generates()
        generation.sampling.validate(self.info.vocab_size)
        if generation.constraint is not None:
            check_constraint(generation.constraint, generation.sampling, self.tokenizer.eos_ids)
        if generation.shift is not None:
            generation.shift.check(len(generation.prompt))
            if generation.constraint is not None:  # a new part would begin the grammar anew
                raise BadRequest("an answer that is held to a grammar cannot go on past the context", param="shift")
        prompt, context = generation.prompt, self.info.context
        if not prompt:
            raise BadRequest("the prompt is empty: at least one token is needed", param="prompt")
        if len(prompt) >= context:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens; the context is {context}, and one is needed for the answer",
                cure="shorten the prompt; it is never cut here",
                param="prompt",
                code="context_length_exceeded",
            )
        if min(prompt) < 0 or max(prompt) >= self.info.vocab_size:
            bad = next(t for t in prompt if not 0 <= t < self.info.vocab_size)
            raise BadRequest(f"the prompt has token {bad}: the vocabulary has {self.info.vocab_size}", param="prompt")

    async def stream(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """Chunks of all choices as they come; each choice ends with one chunk that has `finish` and the receipt."""
        self.check(generation)
        if generation.constraint is not None:
            await self._teach()
        requests = self._requests(generation)
        reading = generation.reading
        keep = self._kept() if reading is not None else frozenset[int]()
        choices = {r.id: ChoiceStream(r.index, self.tokenizer, generation.sampling, reading, keep) for r in requests}
        client = self._client_for(generation)
        async with aclosing(_merged(client, requests)) as events:
            async for event in events:
                choice = choices[event.id]
                before = choice.stopped
                chunks = choice.chunks(event)
                if choice.stopped and not before and event.finish is None:
                    client.abort(event.id)  # its last event brings the receipt
                for chunk in chunks:
                    yield chunk

    def _client_for(self, generation: Generation) -> EngineClient | ShiftingClient:
        if generation.shift is None:
            return self.client
        from quire.chat.shifting import ShiftingClient

        return ShiftingClient(self.client, generation.shift)

    async def complete(self, generation: Generation) -> list[Choice]:
        """Whole answers, in the order of their index."""
        parts: dict[int, list[Chunk]] = {i: [] for i in range(generation.sampling.n)}
        async with aclosing(self.stream(generation)) as chunks:
            async for chunk in chunks:
                parts[chunk.index].append(chunk)
        return [_gathered(index, chunks) for index, chunks in parts.items()]

    async def _teach(self) -> None:
        """Tell the engine the bytes of the tokens before the first constraint: it knows ids alone."""
        if not self._taught:
            self.client.set_vocabulary(await asyncio.to_thread(self._read_vocabulary))
            self._taught = True

    def _read_vocabulary(self) -> Vocabulary:
        with self._reading:  # several loops may ask at once; telling the engine again changes nothing
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self.tokenizer, self.info.vocab_size)
            return self._vocabulary

    def _requests(self, generation: Generation) -> list[Request]:
        sampling = generation.sampling
        seed = int.from_bytes(os.urandom(8), "little") >> 1 if sampling.seed is None else sampling.seed
        sampling = msgspec.structs.replace(sampling, seed=seed)
        once = msgspec.structs.replace(sampling, prompt_logprobs=None)  # the prompt's are the same for every choice
        first = f"{generation.id}-0"
        return [
            Request(
                id=f"{generation.id}-{i}",
                tokens=generation.prompt,
                sampling=sampling if i == 0 else once,
                eos_ids=self.tokenizer.eos_ids,
                index=i,
                priority=generation.priority,
                deadline=generation.deadline,
                itl=generation.itl,
                namespace=generation.namespace,
                follows=None if i == 0 else first,
                constraint=generation.constraint,
                adapter=generation.adapter,
            )
            for i in range(sampling.n)
        ]


def _check_tools(tools: Tools, form: Format | None) -> None:
    """Raise BadRequest where tools that the model may call cannot be honoured."""
    if tools.forced and not tools.tools:
        raise BadRequest("tool_choice demands a call, but there are no tools", param="tool_choice")
    if tools.choice == "named" and all(tool.name != tools.name for tool in tools.tools):
        raise BadRequest(f"tool_choice names {tools.name!r}, which is not among the tools", param="tool_choice")
    if tools.tools and (form is None or not form.calls):
        raise BadRequest(
            "this model has no chat template, so it cannot be given tools",
            param="tools",
            cure="use a model that chats (quire show MODEL tells)",
            code="unsupported_tools",
        )


def _size(value: object) -> int:
    """Characters of all texts in plain values: what is said may be in reasoning, in calls and in documents too."""
    if isinstance(value, str):
        return len(value)
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_size, inside))


def find_format(template: ChatTemplate | None, tokenizer: Tokenizer) -> Format | None:
    """The format that a template shows; None, and nothing imported, where it cannot show any."""
    if template is None or not _shows_more(template):
        return None
    from quire.chat.tools.detect import detect_format

    return detect_format(template, tokenizer)


def _have_calls(messages: Sequence[Any]) -> bool:
    """Whether a conversation has calls of tools, or results."""
    return any(isinstance(m, Mapping) and (m.get("role") == "tool" or m.get("tool_calls")) for m in messages)


def _shows_more(template: ChatTemplate) -> bool:
    """Whether looking for a format is worth its imports."""
    return any(word in template.whole_source for word in SIGNS)


def vocabulary_of(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The bytes of the first `size` tokens."""
    known = range(min(size, tokenizer.vocab_size))
    return Vocabulary(
        tokens=[tokenizer.token_bytes(i) for i in known],
        special=[i for i in known if tokenizer.is_special(i)],
        eos_ids=tokenizer.eos_ids,
    )


def _gathered(index: int, chunks: list[Chunk]) -> Choice:
    last = chunks[-1] if chunks else Chunk(index=index)
    return Choice(
        index=index,
        text="".join(c.text for c in chunks),
        tokens=[t for c in chunks for t in c.tokens],
        finish=last.finish or "abort",  # the engine let go without a last word
        reasoning="".join(c.reasoning for c in chunks),
        calls=gathered_calls(chunks),
        logprobs=[entry for c in chunks for entry in c.logprobs],
        prompt_logprobs=[entry for c in chunks for entry in c.prompt_logprobs],
        stop_reason=last.stop_reason,
        error=last.error,
        receipt=last.receipt,
    )


def gathered_calls(chunks: Iterable[Chunk]) -> list[Call]:
    """The whole calls of a choice."""
    made: dict[int, tuple[str, str, list[str]]] = {}
    for chunk in chunks:
        for part in chunk.calls:
            if part.index not in made:
                made[part.index] = (part.id or "", part.name or "", [])
            made[part.index][2].append(part.arguments)
    return [Call(id, name, "".join(parts)) for _, (id, name, parts) in sorted(made.items())]


async def _merged(client: EngineClient | ShiftingClient, requests: list[Request]) -> AsyncGenerator[Event, None]:
    """Events of several requests as they come. The first failure ends them all, and so does leaving."""
    if len(requests) == 1:  # no task, no queue: one token costs one step of the loop
        async with aclosing(client.generate(requests[0])) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

    async def pump(request: Request) -> None:
        try:
            async with aclosing(client.generate(request)) as events:
                async for event in events:
                    queue.put_nowait(event)
        except BaseException as error:
            queue.put_nowait(error)
            raise
        queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(request)) for request in requests]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
