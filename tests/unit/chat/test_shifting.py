"""Answers that go on past the context: which tokens each part is computed from, and what a client sees of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from quire.chat.completer import Completer
from quire.chat.shifting import Shift
from quire.chat.types import Chunk, Generation
from quire.engine.types import Constraint, Event, Receipt, Request
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from tests.unit.chat.test_completer import INFO, TOKENIZER, ids

CONTEXT = 24


class CountingEngine:
    """Writes the letters a to z in turn, as many as a request wants, and ends it as an engine does."""

    def __init__(self, ends_after: int | None = None):
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.made = 0
        self.ends_after = ends_after
        self.info, self.alive = None, True

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        most = request.sampling.max_tokens or 0
        assert len(request.tokens) + most <= CONTEXT, "more than the context holds"
        for i in range(most):
            token = ids(chr(97 + self.made % 26))[0]
            self.made += 1
            aborted, ended = request.id in self.aborted, self.made == self.ends_after
            finish = "abort" if aborted else "stop" if ended else "length" if i == most - 1 else None
            receipt = Receipt(prompt_tokens=len(request.tokens), output_tokens=i + 1, steps=1, prefill_seconds=1.0)
            yield Event(id=request.id, tokens=[token], finish=finish, receipt=receipt if finish else None)
            if finish:
                return

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def answer(engine: CountingEngine, prompt: str, shift: Shift | None, **sampling: Any) -> list[Chunk]:
    import asyncio

    info = msgspec.structs.replace(INFO, context=CONTEXT)
    made = Completer(engine, TOKENIZER, None, info)  # type: ignore[arg-type]
    generation = Generation(id="g", prompt=ids(prompt), sampling=SamplingParams(seed=7, **sampling), shift=shift)

    async def work() -> list[Chunk]:
        return [chunk async for chunk in made.stream(generation)]

    return asyncio.run(work())


LETTERS = "".join(chr(97 + i % 26) for i in range(200))


@pytest.mark.parametrize("keep", [0, 5, 10])
@pytest.mark.parametrize("discard", [None, 3])
def test_each_part_goes_on_from_what_was_kept(keep: int, discard: int | None) -> None:
    engine = CountingEngine()
    chunks = answer(engine, "0123456789", Shift(CONTEXT, keep, discard), max_tokens=60)
    assert "".join(c.text for c in chunks) == LETTERS[:60]
    everything, at = "0123456789", 10
    for i, request in enumerate(engine.requests):
        assert TOKENIZER.decode(request.tokens) == everything
        at = 10 + sum(r.sampling.max_tokens or 0 for r in engine.requests[:i])
        everything += LETTERS[at - 10 : at - 10 + (request.sampling.max_tokens or 0)]
        assert len(everything) == CONTEXT or request is engine.requests[-1]
        gone = discard or (CONTEXT - keep) // 2
        everything = everything[:keep] + everything[keep + gone :]
    assert len(engine.requests) > 2 and len({r.id for r in engine.requests}) == len(engine.requests)
    assert len({r.sampling.seed for r in engine.requests}) == len(engine.requests)
    last = chunks[-1]
    assert [c.finish for c in chunks].count(None) == len(chunks) - 1 and last.finish == "length"
    receipt = last.receipt
    assert receipt is not None and (receipt.prompt_tokens, receipt.output_tokens) == (10, 60)
    parts = len(engine.requests)
    assert receipt.shifted_tokens == (parts - 1) * gone and receipt.prefill_seconds == parts


def test_an_answer_that_ends_by_itself_is_not_shifted() -> None:
    engine = CountingEngine(ends_after=5)
    chunks = answer(engine, "0123456789", Shift(CONTEXT), max_tokens=60)
    assert chunks[-1].finish == "stop" and len(engine.requests) == 1
    assert chunks[-1].receipt is not None and chunks[-1].receipt.shifted_tokens == 0


def test_a_stop_string_over_the_seam_ends_the_part_that_runs() -> None:
    engine = CountingEngine()
    chunks = answer(
        engine, "0123456789", Shift(CONTEXT), max_tokens=100, stop=("nop",)
    )  # the 14th letter ends part one
    assert "".join(c.text for c in chunks) == LETTERS[:13] and chunks[-1].finish == "stop"
    assert engine.aborted == [engine.requests[-1].id] and len(engine.requests) == 2


def test_an_answer_without_a_bound_fills_ten_contexts() -> None:
    chunks = answer(CountingEngine(), "0123456789", Shift(CONTEXT))
    assert sum(len(c.tokens) for c in chunks) == 10 * CONTEXT and chunks[-1].finish == "length"


def test_several_choices_shift_apart() -> None:
    engine = CountingEngine()
    chunks = answer(engine, "0123456789", Shift(CONTEXT), max_tokens=40, n=2)
    assert [sum(len(c.tokens) for c in chunks if c.index == i) for i in (0, 1)] == [40, 40]


@pytest.mark.parametrize(
    ("shift", "param"),
    [
        (Shift(CONTEXT, 19), "keep"),
        (Shift(CONTEXT, -1), "keep"),
        (Shift(CONTEXT, 0, 24), "discard"),
        (Shift(64, 0, 1), "discard"),
    ],
)
def test_what_would_leave_hardly_anything_out_is_refused(shift: Shift, param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        answer(CountingEngine(), "0123456789", shift, max_tokens=60)
    assert refused.value.param == param


def test_a_grammar_is_refused() -> None:
    import asyncio

    made = Completer(CountingEngine(), TOKENIZER, None, INFO)  # type: ignore[arg-type]
    generation = Generation("g", ids("hi"), SamplingParams(), constraint=Constraint.json_object(), shift=Shift(64))

    async def work() -> None:
        async for _ in made.stream(generation):
            pass

    with pytest.raises(BadRequest, match="grammar"):
        asyncio.run(work())
