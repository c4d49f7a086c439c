"""From a model's name to everything that answers: file, engine, tokenizer, template, completer; and checked requests.

The engine loads on its own thread while the tokenizer is built on the caller's. A prompt is checked here, before anything
runs: what is refused names the prompt and the place.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from quire.config import EngineConfig, Environment, parse_size
from quire.engine.build import build_engine
from quire.engine.inprocess import InProcessClient
from quire.engine.types import Constraint, EngineInfo
from quire.llm.outputs import Completion, Message, Output, Prompt
from quire.llm.progress import Bar
from quire.models import family_of
from quire.observe.errors import BadModelFile, BadRequest, NotFound
from quire.runner.params import SamplingParams
from quire.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from quire.chat.answers.types import Reading, Tools
    from quire.chat.completer import Completer
    from quire.chat.embedder import Embedder
    from quire.chat.tokenizer import Tokenizer
    from quire.chat.types import Generation


@dataclass(slots=True)
class Job:
    generation: Generation
    output: Output


class Loaded:
    """Engine, tokenizer, template and completer of one model."""

    def __init__(self, client: InProcessClient, info: EngineInfo, tokenizer: Tokenizer, completer: Completer):
        self.client = client
        self.info = info
        self.tokenizer = tokenizer
        self.completer = completer
        self._prefix = os.urandom(4).hex()
        self._count = itertools.count()

    def embedder(self) -> Embedder:
        """What embeds and scores. Raises BadRequest where the model was loaded to generate."""
        from quire.chat.embedder import Embedder

        return Embedder(self.client, self.tokenizer, self.info)

    async def job(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None = None, lora: str = ""
    ) -> Job:
        """A prompt, checked."""
        if isinstance(prompt, str):
            return self._job(prompt, await self.completer.encode_prompt(prompt), params, constraint, lora)
        return self._job(None, _ids(prompt, self.info.vocab_size), params, constraint, lora)

    async def talk(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        constraint: Constraint | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        choice: str | None = None,
        parallel: bool = True,
        lora: str = "",
    ) -> Job:
        """A conversation, rendered and checked."""
        asked = tools_of(tools, choice, parallel)
        given = {"tools": list(tools)} if tools and asked.choice != "none" else {}
        tokens = await self.completer.encode_chat(list(messages), **given)
        reading, constraint = await self.completer.answering(tokens, asked, constraint)
        return self._job(None, tokens, params, constraint, lora, reading)

    def _job(
        self,
        text: str | None,
        tokens: list[int],
        params: SamplingParams,
        constraint: Constraint | None,
        lora: str,
        reading: Reading | None = None,
    ) -> Job:
        from quire.chat.types import Generation

        name = f"{self._prefix}-{next(self._count)}"
        generation = Generation(
            id=name, prompt=tokens, sampling=params, constraint=constraint, reading=reading, adapter=lora
        )
        self.completer.check(generation)
        return Job(generation, Output(text, tokens, [Completion(index=i) for i in range(params.n)]))


def tools_of(tools: Sequence[Mapping[str, Any]], choice: str | None, parallel: bool) -> Tools:
    """Tools as OpenAI's API writes them. `choice` is none, auto, required, or the name of one."""
    from quire.chat.answers.types import Tool, Tools

    made: list[Tool] = []
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise BadRequest(f'tools[{i}] is not {{"type": "function", "function": {{"name": …}}}}', param="tools")
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadRequest(f"tools[{i}].function.parameters is not a schema", param="tools")
        schema = None if parameters is None else dict(parameters)
        made.append(Tool(name, str(function.get("description") or ""), schema, function.get("strict") is True))
    if choice in (None, "none", "auto", "required"):
        return Tools(made, choice or "auto", None, parallel)
    return Tools(made, "named", choice, parallel)


def load(model: str, config: EngineConfig, progress: bool) -> Loaded:
    """The engine loads on its thread while the tokenizer is built on this one."""
    env = Environment.read()
    checkpoint = open_checkpoint(_find(model, env, progress))
    family_of(checkpoint)  # a model that is not supported is told before anything else that may be wrong with it
    config = replace(config, path=checkpoint.path)
    client = InProcessClient(config, env=env, build=functools.partial(build_engine, checkpoint=checkpoint))
    client.begin()
    try:
        # Imported while the engine loads: these are the slow ones.
        from quire.chat.completer import Completer, look
        from quire.chat.words import words_of

        tokenizer, template = words_of(checkpoint)
        answers = look(template, tokenizer)  # it takes its time, and the engine still loads
        info = client.wait()
        completer = Completer(client, tokenizer, template, info, looked=True, answers=answers)
        return Loaded(client, info, tokenizer, completer)
    except BaseException as failure:
        client.stop()
        if isinstance(failure, NotFound | BadModelFile):
            len(checkpoint.tensors)  # where the weights are missing or pickled too, that is what there is to say
        raise


def _find(model: str, env: Environment, progress: bool) -> str:
    from quire.weights.store import Store

    store = Store(env, accepts=family_of)
    try:
        return str(store.resolve(model))
    except NotFound as missing:
        if missing.param != "model":
            raise
    return str(store.pull(model, Bar() if progress else None))


def to_bytes(size: int | str | None) -> int | None:
    if not isinstance(size, str):
        return size
    try:
        return parse_size(size)
    except ValueError as e:
        raise BadRequest(f"kv_memory: {e}", param="kv_memory") from None


def as_prompts(prompts: str | Sequence[Prompt] | Sequence[int]) -> list[Prompt]:
    """One text, several texts, several token lists, or one token list."""
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(p, int) for p in listed):
        return [cast("list[int]", listed)]
    for i, prompt in enumerate(listed):
        if not isinstance(prompt, str) and not isinstance(prompt, Sequence):
            raise BadRequest(
                f"prompt {i} is a {type(prompt).__name__}: give text or a list of token ids", param="prompts"
            )
    return cast("list[Prompt]", listed)


def _ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    ids = list(prompt)
    for i, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise BadRequest(
                f"{token!r} at place {i} of a prompt is not a token id under {vocab_size}", param="prompts"
            )
    if not ids:
        raise BadRequest("a prompt has no tokens", param="prompts")
    return ids


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    if not messages:
        raise BadRequest("there are no messages", param="messages")
    if isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))
