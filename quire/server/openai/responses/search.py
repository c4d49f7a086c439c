"""Searches for tools that are done here (`tool_search`, execution server): the model calls a search, and goes on with what it found.

A search compares words: those of the query with those of a tool's name, its namespace, its description and its parameters, where a rare word
counts for more. What it finds is the same for the same conversation. The answer and the conversation that goes on ask for the same
result, each when it needs it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import msgspec

from quire.chat.tools.types import Tools
from quire.chat.types import Chunk, Generation
from quire.server.openai.responses.builtin import Entry, parameter_words
from quire.server.openai.responses.calls import SEARCH, result_of
from quire.server.openai.responses.request import Prepared
from quire.server.openai.responses.tools import introduced
from quire.server.served import Served
from quire.server.shared import conversation, fitting
from quire.server.shared.conversation import check_prompt

MOST = 8  # tools that one search finds
ROUNDS = 8  # searches after each other
_WORD = re.compile(r"[A-Za-z]+|[0-9]+|[^\W\d_]+")


def words(text: str) -> list[str]:
    """The words of a text, in lower case; a name falls into its parts, and a plural into its singular."""
    parts = _WORD.findall(re.sub(r"([a-z])([A-Z])", r"\1 \2", text))
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in map(str.lower, parts)]


def found(query: str, entries: list[Entry], most: int = MOST) -> list[Entry]:
    """The tools that a query means, the best first. Those that share no word with it are not found."""
    asked = set(words(query))
    texts = [
        Counter(
            words(
                f"{one.known.name} {one.known.name} {one.known.space or ''} {one.tool.description} {parameter_words(one.tool)}"
            )
        )
        for one in entries
    ]
    having = Counter(word for text in texts for word in asked & text.keys())
    worth = {word: log(1 + len(entries) / count) for word, count in having.items()}

    def score(text: Counter[str]) -> float:
        return sum(worth[word] * text[word] / (text[word] + 1) for word in asked & text.keys())

    best = sorted(((score(text), -i) for i, text in enumerate(texts)), reverse=True)
    return [entries[-i] for points, i in best[:most] if points > 0]


@dataclass(slots=True)
class _Said:
    """What the model said in one turn."""

    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)  # id, name, pieces of arguments

    def take(self, chunk: Chunk) -> None:
        self.reasoning.append(chunk.reasoning)
        self.text.append(chunk.text)
        for part in chunk.calls:
            if part.index == len(self.calls):
                self.calls.append([part.id or f"call{part.index:05d}", part.name or ""])
            self.calls[part.index].append(part.arguments)


class Searches:
    """The searches of one answer. `stream` is what a Feed runs in place of the completer's."""

    def __init__(self, served: Served, ready: Prepared):
        self._served = served
        self._ready = ready
        self._waiting = list(ready.tools.waiting)
        self._results: list[list[Entry]] = []  # of every search so far
        self._told = 0  # of these, how many the answer has asked for
        self.prompted = 0  # tokens of the prompts after the first
        self._noted = len(ready.said.notes)  # notes on the first prompt, which the answer begins with

    def find(self, arguments: Any) -> list[dict[str, Any]]:
        """The result of the next search that the answer tells, as it is told: namespaces with what was found in them."""
        self._told += 1
        made: list[dict[str, Any]] = []
        spaces: dict[str, dict[str, Any]] = {}
        for one in self._result(self._told - 1, arguments):
            space = one.known.space
            if space is None:
                made.append(one.told)
                continue
            if space not in spaces:
                about = self._ready.tools.spaces.get(space, "")
                spaces[space] = {"type": "namespace", "name": space, "description": about, "tools": []}
                made.append(spaces[space])
            spaces[space]["tools"].append(one.told)
        return made

    def told(self) -> dict[str, Any]:
        """Notes on the prompts after the first, and what was left out of them, for the end of the answer."""
        new = self._ready.said.notes[self._noted :]
        return self._ready.said.told() | {"notes": new} if new else {}

    def _result(self, n: int, arguments: Any) -> list[Entry]:
        if n == len(self._results):
            query = arguments.get("query") if isinstance(arguments, dict) else None
            found_now = found(query if isinstance(query, str) else json.dumps(arguments), self._waiting)
            self._waiting = [one for one in self._waiting if one not in found_now]
            self._results.append(found_now)
        return self._results[n]

    async def stream(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """The chunks of the whole answer: after a search the model goes on, until it asks for something else or nothing."""
        known, offset, spent, n = self._ready.tools.known, 0, 0, 0
        bound = min(ROUNDS, self._ready.asked.max_tool_calls or ROUNDS)
        while True:
            said, goes_on = _Said(), False
            async with aclosing(self._served.completer.stream(generation)) as chunks:
                async for chunk in chunks:
                    said.take(chunk)
                    spent += len(chunk.tokens)
                    if offset and chunk.calls:
                        chunk = replace(chunk, calls=[replace(part, index=part.index + offset) for part in chunk.calls])
                    if chunk.finish == "stop" and said.calls and n < bound:
                        goes_on = all(known[name].here for _, name, *_ in said.calls if name in known)
                        goes_on = goes_on and all(name in known for _, name, *_ in said.calls)
                    yield replace(chunk, finish=None, receipt=None) if goes_on else chunk
            if not goes_on:
                return
            offset += len(said.calls)
            generation = await self._next(generation, said, n, spent)
            n += len(said.calls)
            spent = 0

    async def _next(self, generation: Generation, said: _Said, n: int, spent: int) -> Generation:
        """The prompt that goes on with what was found."""
        served, ready = self._served, self._ready
        calls = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": "".join(pieces) or "{}"}}
            for id, name, *pieces in said.calls
        ]
        turn: dict[str, Any] = {"role": "assistant", "content": "".join(said.text), "tool_calls": calls}
        if thought := "".join(said.reasoning):
            turn["reasoning_content"] = thought
        turns = [*ready.said.turns, turn]
        for i, (id, name, *pieces) in enumerate(said.calls):
            entries = self._result(n + i, (ready.tools.known[name].fields("".join(pieces)) or {}).get("arguments", {}))
            told = {"type": "tool_search_output", "tools": [{"name": one.tool.name} for one in entries]}
            result = result_of(told, lambda kind, space, name: name)
            turns.append({"role": "tool", "content": result, "tool_call_id": id, "name": name})
        new = introduced([one.tool for result in self._results[n:] for one in result], ready.tools)
        whole = ready.said
        whole.turns, whole.canonical = turns, False
        whole.tools = ready.tools.choice = Tools((*whole.tools.tools, *new), "auto", parallel=whole.tools.parallel)
        sampling, fit = generation.sampling, ready.fit
        if sampling.max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=max(1, sampling.max_tokens - spent))
        if fit is not None and fit.answer is not None:
            fit = replace(fit, answer=sampling.max_tokens)
        prompt = await fitting.encode(served, whole, fit, "input")
        self.prompted += len(prompt)
        check_prompt(served, prompt, None, "input", "max_output_tokens")
        reading, constraint = await conversation.answering(served, prompt, whole.tools, ready.asked.constraint())
        return replace(generation, prompt=prompt, sampling=sampling, reading=reading, constraint=constraint)


def is_done_here(ready: Prepared) -> bool:
    """Whether the model may search for tools here."""
    return any(
        ready.tools.known[one.name].kind == SEARCH and ready.tools.known[one.name].here
        for one in ready.tools.choice.tools
    )
