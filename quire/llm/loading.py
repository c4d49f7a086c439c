"""From a model's name to everything that answers: file, engine, tokenizer, template, completer; and requests for it.

The engine loads on its own thread while the tokenizer is built on the caller's. What callers give is checked by `checks.py`, before
anything runs.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine
from quire.engine.transport.inprocess import InProcessClient
from quire.engine.types import Constraint, EngineInfo
from quire.llm.checks import must_constrain, token_ids, tools_of
from quire.llm.outputs import Completion, Message, Output, Prompt
from quire.llm.progress import Bar
from quire.models import family_of
from quire.observe.errors import BadModelFile, NotFound
from quire.runner.params import SamplingParams
from quire.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from quire.chat.completer import Completer
    from quire.chat.embedder import Embedder
    from quire.chat.tokenizers.tokenizer import Tokenizer
    from quire.chat.tools.types import Reading
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
        """What embeds and scores; it refuses what the model does not do."""
        from quire.chat.embedder import Embedder

        return Embedder(self.client, self.tokenizer, self.info)

    async def job(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None = None, lora: str = ""
    ) -> Job:
        """A prompt, checked."""
        must_constrain(constraint)
        if isinstance(prompt, str):
            return self._job(prompt, await self.completer.encode_prompt(prompt), params, constraint, lora)
        return self._job(None, token_ids(prompt, self.info.vocab_size), params, constraint, lora)

    async def chat(
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
        must_constrain(constraint)
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
        from quire.chat.completer import Completer, find_format
        from quire.chat.loading import tokenizer_and_template

        tokenizer, template = tokenizer_and_template(checkpoint)
        answer_format = find_format(template, tokenizer)  # it takes its time, and the engine still loads
        info = client.wait()
        completer = Completer(client, tokenizer, template, info, looked=True, answer_format=answer_format)
        return Loaded(client, info, tokenizer, completer)
    except BaseException as failure:
        client.stop()
        if isinstance(failure, NotFound | BadModelFile):
            len(checkpoint.tensors)  # where the weights are missing or pickled too, that is what there is to say
        raise


def _find(model: str, env: Environment, progress: bool) -> str:
    from quire.weights.store.store import Store

    store = Store(env, accepts=family_of)
    try:
        return str(store.resolve(model))
    except NotFound as missing:
        if missing.param != "model":
            raise
    return str(store.pull(model, Bar() if progress else None))
