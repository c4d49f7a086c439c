"""Texts to vectors and scores, over one engine: the server, the library and the CLI use this one class.

It owns: texts to ids (with the prompt that the model wants before them, cut only when asked), pairs to ids, engine requests and
their vectors, shorter embeddings where the model allows them. It does not know HTTP or where the engine runs.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from quire.engine.texts import too_long
from quire.engine.transport.client import EngineClient
from quire.engine.types import EngineInfo, Receipt, Request
from quire.layouts import Floats
from quire.observe.errors import BadModelFile, BadRequest, QuireError, Unavailable

if TYPE_CHECKING:
    from quire.chat.tokenizers.tokenizer import Tokenizer

THREAD_FROM = 16 * 1024  # characters; more are tokenized in a thread, off the event loop
Input: TypeAlias = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector or score of a text, or of a pair of texts."""

    vector: Floats  # of a pair: one number
    tokens: int  # computed
    cut: int  # left out, because the text was too long and cutting was asked for
    receipt: Receipt

    @property
    def score(self) -> float:
        return float(self.vector[0])


@dataclass(frozen=True, slots=True)
class _Ids:
    ids: list[int]
    cut: int = 0
    second: int = 0  # where the second text begins


class Embedder:
    """Embeddings and scores over one engine."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        info: EngineInfo,
        priority: int = 0,
        *,
        namespace: str = "",
        adapter: str = "",
    ):
        """`namespace`: whose cached prefixes may be found, by an engine that has any; `adapter`: the one that computes."""
        if tokenizer.ordinary_size > info.vocab_size:
            raise BadModelFile(
                f"{info.model}: the tokenizer has {tokenizer.ordinary_size} tokens, but the model has {info.vocab_size} "
                "of them"
            )
        self.client = client
        self.tokenizer = tokenizer
        self.info = info
        self.priority = priority  # of everything that is asked; lower runs first
        self.namespace = namespace
        self.adapter = adapter
        self._names = (f"{os.urandom(6).hex()}-{i}" for i in itertools.count())

    def embeds(self) -> None:
        """Raise BadRequest where there are no embeddings."""
        info = self.info
        if info.dimensions:
            return
        if info.task == "score":
            raise BadRequest(
                f"{info.model} scores pairs of texts: it has no embeddings", param="model", code="unsupported_task"
            )
        raise BadRequest(
            f"{info.model} was loaded to generate text, and its files ask for embeddings that are not supported",
            cure="`quire serve --task embed` says which; or use an embedding model",
            param="model",
            code="unsupported_task",
        )

    def scores(self) -> None:
        """Raise BadRequest where pairs of texts have no scores."""
        if self.info.task == "generate":
            raise BadRequest(
                f"{self.info.model} was loaded to generate text, not to score",
                cure="use a reranker, or load it with task=embed (`quire serve --task embed`) to compare embeddings",
                param="model",
                code="unsupported_task",
            )

    async def embed(
        self,
        inputs: Sequence[Input],
        *,
        prompt: str | None = None,
        truncate: bool = False,
        most: int | None = None,
        ends: bool = False,
        dimensions: int | None = None,
        param: str = "input",
    ) -> list[Embedded]:
        """The embedding of each text, or list of token ids. All are checked before the first one runs. `most` cuts them to so many
        tokens; `ends` keeps the end of what is cut, in place of its beginning.

        prompt: the name of what goes before each text, of info.prompts; dimensions: keep so many numbers, of length 1 again.
        """
        self.embeds()
        self._check_dimensions(dimensions)
        before = self._before(prompt)

        def encode() -> list[_Ids]:
            many = len(inputs) > 1
            return [
                self._ids(x, before, truncate or most is not None, f"{param}[{i}]" if many else param, most, ends)
                for i, x in enumerate(inputs)
            ]

        size = sum(len(x) for x in inputs if isinstance(x, str))
        encoded = encode() if size < THREAD_FROM else await asyncio.to_thread(encode)
        made = await self._run(encoded)
        return made if dimensions is None else [_shortened(one, dimensions) for one in made]

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate: bool = False, param: str = "documents"
    ) -> list[Embedded]:
        """The score of the second text of each pair as an answer to the first: a cross-encoder's, or the cosine of embeddings."""
        self.scores()
        if self.info.task == "embed":
            return await self._cosines(pairs, truncate, param)

        def encode() -> list[_Ids]:
            many = len(pairs) > 1
            return [self._pair(a, b, truncate, f"{param}[{i}]" if many else param) for i, (a, b) in enumerate(pairs)]

        size = sum(len(a) + len(b) for a, b in pairs)
        return await self._run(encode() if size < THREAD_FROM else await asyncio.to_thread(encode))

    async def _cosines(self, pairs: Sequence[tuple[str, str]], truncate: bool, param: str) -> list[Embedded]:
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each once
        made = dict(zip(texts, await self.embed(texts, truncate=truncate, param=param), strict=True))
        counted: set[str] = set()

        def price(text: str) -> int:
            new = text not in counted
            counted.add(text)
            return made[text].tokens if new else 0

        scores: list[Embedded] = []
        for a, b in pairs:
            u, v = (made[text].vector.astype(np.float64) for text in (a, b))
            cosine = u @ v / max(float(np.sqrt((u @ u) * (v @ v))), 1e-12)
            value = np.array([cosine], np.float32)
            scores.append(Embedded(value, price(a) + price(b), made[a].cut + made[b].cut, made[b].receipt))
        return scores

    # Texts to ids.

    def _before(self, prompt: str | None) -> str:
        prompts = self.info.prompts
        if prompt is not None and prompt not in prompts:
            named = ", ".join(sorted(name for name in prompts if name)) or "none"
            raise BadRequest(
                f"the model has no prompt called {prompt[:60]!r}", cure=f"it has: {named}", param="prompt_name"
            )
        return prompts.get(prompt or "", "")

    def _ids(
        self, given: Input, before: str, truncate: bool, param: str, most: int | None = None, ends: bool = False
    ) -> _Ids:
        context = self.info.context if most is None else min(most, self.info.context)
        if not isinstance(given, str):
            ids = list(given)
            bad = next((t for t in ids if not 0 <= t < self.info.vocab_size), None)
            if bad is not None:
                raise BadRequest(f"{param} holds token {bad}: the vocabulary has {self.info.vocab_size}", param=param)
            if not ids:
                raise BadRequest(f"{param} is empty", param=param)
            if len(ids) > context and not truncate:
                raise too_long(len(ids), context, param)
            return _Ids(_kept(ids, context, ends), max(0, len(ids) - context))
        start, body, end = self._around(before + given)
        room = context - len(start) - len(end)
        if not start + body + end:
            raise BadRequest(f"{param} has no tokens", param=param)
        if len(body) > room and not truncate:
            raise too_long(len(start) + len(body) + len(end), context, param)
        if room < 1 and body:
            raise BadRequest(
                f"{param}: {context} tokens leave none for the text: this model puts {len(start) + len(end)} around it",
                param="truncate_prompt_tokens",
            )
        return _Ids(start + _kept(body, room, ends) + end, max(0, len(body) - room))

    def _pair(self, first: str, second: str, truncate: bool, param: str) -> _Ids:
        if self.info.pair:
            return self._asked(first, second, truncate, param)
        start, a, end = self._around(first)
        _, b, _ = self._around(second)
        between = end * self.info.separators
        fixed = len(start) + len(between) + len(end)
        over = fixed + len(a) + len(b) - self.info.context
        if over > 0 and not truncate:
            raise too_long(fixed + len(a) + len(b), self.info.context, param)
        room = max(0, self.info.context - fixed)
        if over > 0:  # the longer one gives first, as in the models' own tokenizers
            keep = min(len(a), max(room - len(b), (room + 1) // 2 if len(a) > len(b) else room // 2))
            a, b = a[:keep], b[: room - keep]
        head = [*start, *a, *between]
        return _Ids([*head, *b, *end], max(0, over), len(head))

    def _asked(self, first: str, second: str, truncate: bool, param: str) -> _Ids:
        """A pair inside the prompt of a decoder that judges. The texts are words there, whatever they look like: a document
        cannot end the question. What is too long is cut from the end of the second."""
        t, (before, asks, shows, after) = self.tokenizer, self.info.pair
        start = t.encode(before, add_special=False, parse_special=True)
        end = t.encode(after, add_special=False, parse_special=True)
        body = t.encode(asks + first + shows + second, add_special=False, parse_special=False)
        room = self.info.context - len(start) - len(end)
        if len(body) > room:
            question = t.encode(asks + first + shows, add_special=False, parse_special=False)
            if not truncate or len(question) > room:  # a question that is not whole has no answer
                raise too_long(len(start) + len(body) + len(end), self.info.context, param)
        return _Ids([*start, *body[:room], *end], max(0, len(body) - room))

    def _around(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """The begin tokens that the model wants, the text's own, the end tokens."""
        t = self.tokenizer
        body = t.encode(text, add_special=False, parse_special=True)
        start = [t.bos_id] if t.add_bos and t.bos_id is not None else []
        return start, body, [t.eos_id] if t.add_eos and t.eos_id is not None else []

    # Ids to vectors.

    async def _run(self, encoded: Sequence[_Ids]) -> list[Embedded]:
        """Everything at once, as far as keeps the engine full; the first failure lets the others go."""
        slots = asyncio.Semaphore(max(1, 2 * self.info.max_seqs))
        made: list[Embedded | None] = [None] * len(encoded)

        async def one(i: int, text: _Ids) -> None:
            async with slots:
                made[i] = await self._one(text)

        try:
            async with asyncio.TaskGroup() as group:
                for i, text in enumerate(encoded):
                    group.create_task(one(i, text))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [m for m in made if m is not None]

    async def _one(self, text: _Ids) -> Embedded:
        request = Request(
            id=next(self._names),
            tokens=text.ids,
            second=text.second,
            priority=self.priority,
            namespace=self.namespace,
            adapter=self.adapter,
            vector=True,
        )
        async with aclosing(self.client.generate(request)) as events:
            async for event in events:
                if event.finish == "error":
                    raise QuireError(event.error or "the engine gave no reason", code="engine_error")
                if event.finish == "abort":
                    raise Unavailable("the request was aborted before its answer was whole")
                if event.finish is not None:
                    vector = np.frombuffer(event.vector, "<f4").astype(np.float32)
                    return Embedded(vector, len(text.ids), text.cut, event.receipt or Receipt())
        raise Unavailable("the engine ended the request without finishing it")

    def _check_dimensions(self, dimensions: int | None) -> None:
        whole, cuts = self.info.dimensions, self.info.cuts
        if dimensions is None or dimensions == whole:
            return
        if cuts is None:
            raise BadRequest(
                f"dimensions is {dimensions}: this model's embeddings have {whole} numbers, and its files do not say that "
                "fewer of them mean anything",
                cure=f"leave it out, or ask for {whole}",
                param="dimensions",
            )
        if not 1 <= dimensions < whole or (cuts and dimensions not in cuts):
            some = ", ".join(map(str, cuts)) if cuts else f"1 to {whole}"
            raise BadRequest(f"dimensions is {dimensions}: this model takes {some}", param="dimensions")


def _kept(ids: list[int], most: int, ends: bool) -> list[int]:
    """At most so many of them: the first, or the last."""
    return ids[max(0, len(ids) - most) :] if ends else ids[:most]


def _shortened(one: Embedded, dimensions: int) -> Embedded:
    if dimensions == one.vector.size:
        return one
    part = one.vector[:dimensions].astype(np.float64)
    unit = (part / max(float(np.sqrt(part @ part)), 1e-12)).astype(np.float32)
    return Embedded(unit, one.tokens, one.cut, one.receipt)
