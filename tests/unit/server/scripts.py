"""Scripted answers with reasoning and calls, and random ones for property tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from hypothesis import strategies as st

from quire.chat.types import Call, CallPart, Chunk
from quire.engine.types import Receipt
from tests.unit.server.fakes import CALLER, FakeCompleter, client_for

RECEIPT = Receipt(prompt_tokens=20, output_tokens=9, cached_tokens=16, seed=7, prefill_seconds=0.25, decode_seconds=0.5)


def script(*chunks: Chunk, finish: str = "stop", stop_reason: str | None = None) -> list[Chunk]:
    """These chunks, a token each unless they have their own, and the end."""
    made = [c if c.tokens else Chunk(c.index, c.text, c.reasoning, c.calls, [65]) for c in chunks]
    return [*made, Chunk(tokens=[256], finish=finish, stop_reason=stop_reason, receipt=RECEIPT)]


def call(index: int, name: str, *fragments: str) -> list[Chunk]:
    """One call in pieces."""
    first = Chunk(calls=[CallPart(index, f"call_{index}x", name)])
    return [first, *(Chunk(calls=[CallPart(index, arguments=f)]) for f in fragments)]


THINKS_AND_CALLS = script(
    Chunk(reasoning="Let me "),
    Chunk(reasoning="see."),
    Chunk(),  # the end marker
    Chunk(text="I ask."),
    *call(0, "weather", '{"city": "Pa', 'ris"}'),
    *call(1, "time", "{}"),
)
CALLS = [Call("call_0x", "weather", '{"city": "Paris"}'), Call("call_1x", "time", "{}")]


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[Chunk], str, str, list[Call]]:
    """Chunks in an order that a parser could make, and the reasoning, text and calls that they amount to."""
    words = st.text('ab {}"\\\n<é😀', min_size=1, max_size=6)
    values = st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), words, st.none()), max_size=3)
    chunks: list[Chunk] = []
    calls: list[Call] = []
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["reasoning", "text", "both", "call", "nothing"]))
        thought = draw(words) if kind in ("reasoning", "both") else ""
        said = draw(words) if kind in ("text", "both") else ""
        if kind != "call":
            chunks.append(Chunk(reasoning=thought, text=said, tokens=[1]))
            continue
        name, arguments = draw(st.sampled_from(["f", "g.h"])), json.dumps(draw(values))
        index, id = len(calls), f"call_{len(calls)}"
        calls.append(Call(id, name, arguments))
        cuts = sorted(draw(st.sets(st.integers(0, len(arguments)), max_size=4)))
        pieces = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, len(arguments)], strict=True)]
        parts = [CallPart(index, id, name, pieces[0]), *(CallPart(index, arguments=p) for p in pieces[1:])]
        while parts:  # several parts may come at once
            take = draw(st.integers(1, len(parts)))
            chunks.append(Chunk(calls=parts[:take], tokens=[2]))
            parts = parts[take:]
    finish = draw(st.sampled_from(["stop", "length"]))
    made = [*chunks, Chunk(tokens=[256], finish=finish, receipt=RECEIPT)]
    return made, "".join(c.reasoning for c in chunks), "".join(c.text for c in chunks), calls


FUNCTION: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "time"}}


class Bench:
    """One server for many examples: a script, a request, and what came, without a loop around the test."""

    def __init__(self, runner: asyncio.Runner, completer: FakeCompleter, http: httpx.AsyncClient):
        self._runner = runner
        self._completer = completer
        self._http = http

    def post(self, chunks: list[Chunk], path: str, body: dict[str, Any]) -> httpx.Response:
        """Answer `body` with these chunks."""
        self._completer.script = chunks
        r = self._runner.run(self._http.post(path, json=body))
        assert r.status_code == 200, r.text
        return r


@contextmanager
def bench() -> Iterator[Bench]:
    """A bench, for as long as it is needed."""
    completer = FakeCompleter(context=400)
    completer.answer_format = CALLER
    with asyncio.Runner() as runner:
        client = client_for(completer)
        http = runner.run(client.__aenter__())
        try:
            yield Bench(runner, completer, http)
        finally:
            runner.run(client.__aexit__(None, None, None))
