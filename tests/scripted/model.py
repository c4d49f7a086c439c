"""A model whose answers are planned: an engine client that says what a script has, in tokens of a real tokenizer.

Everything above it (completer, chat template, tool format, dialects) is the real thing. An answer is written by the chat template itself,
as the assistant's next turn, so that calls and reasoning are in the model's own format whichever it is. Which turn of the script comes next
follows from the prompt alone: a request that is sent again is answered the same way.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.chat.completer import Completer
from quire.chat.loading import tokenizer_and_template
from quire.chat.templates.template import ChatTemplate
from quire.chat.tokenizers.tokenizer import Tokenizer
from quire.chat.tools.probe import TurnRenderer, called, common_prefix
from quire.engine.types import EngineInfo, Event, Receipt, Request, Stats, Vocabulary
from quire.observe.steps import KEPT, StepInfo
from quire.weights.checkpoint import open_checkpoint

PAGE = 16


class Turn(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One answer. `{found}` in its text and in arguments is what `find` finds last in the prompt (its first group)."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = []
    find: str = ""


class Rule(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The answers to conversations in which a pattern occurs: of these turns the first whose text has not been said since its last
    occurrence. (Counting the model's turns would not do: some clients send a text and a call of one answer back as two.)"""

    match: str
    turns: list[Turn]


class Script(msgspec.Struct, forbid_unknown_fields=True):
    """Rules in order: the first whose pattern occurs in the prompt, and which has a turn left, answers."""

    rules: list[Rule]

    def turn(self, prompt: str) -> Turn | None:
        """The answer to a prompt."""
        for rule in self.rules:
            last = None
            for last in re.finditer(rule.match, prompt):  # noqa: B007
                pass
            if last is None:
                continue
            for turn in rule.turns:
                if prompt.find(turn.text.partition("{found}")[0], last.end()) < 0 or not turn.text:
                    return _filled(turn, prompt)
        return None


def _filled(turn: Turn, prompt: str) -> Turn:
    if not turn.find:
        return turn
    matches = re.findall(turn.find, prompt)
    found = matches[-1] if matches else "(not found)"
    told = msgspec.to_builtins(turn)

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{found}", found)
        if isinstance(value, list | tuple):
            return [fill(one) for one in value]
        return {key: fill(one) for key, one in value.items()} if isinstance(value, dict) else value

    return msgspec.convert(fill(told), Turn)


class ScriptedClient:
    """An `EngineClient` without an engine. It remembers its prompts, so that receipts say which part of a prompt a prefix cache would have had."""

    def __init__(self, script: Script, tokenizer: Tokenizer, template: ChatTemplate | None, info: EngineInfo):
        self.script = script
        self.info: EngineInfo | None = info
        self.alive = True
        self.wait = 0.0  # seconds before the first token
        self.delay = 0.0  # seconds before each token
        self.on_request: Callable[[Request, int], None] = lambda request, cached: None
        self._tokenizer = tokenizer
        self._renderer = None if template is None else TurnRenderer(template, _ends(tokenizer))
        self._header = ""
        if self._renderer is not None:
            bare, asked = self._renderer.asked(None)
            self._header = asked[len(common_prefix(bare, asked)) :]
        self._prompts: list[list[int]] = []
        self._gone: set[str] = set()
        self._counts: dict[str, int] = {"steps": 0, "prompt_tokens": 0, "output_tokens": 0}

    def written(self, turn: Turn, opened: str) -> str:
        """The turn as the model would write it; `opened` is what the prompt has begun of it, such as the mark that begins reasoning."""
        text = self._written(turn)
        if opened and not text.startswith(opened):
            text = self._written(msgspec.structs.replace(turn, reasoning=turn.reasoning or "Well."))
        return text.removeprefix(opened)

    def _written(self, turn: Turn) -> str:
        if self._renderer is None:
            return turn.text
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [called(name, args, f"abcdefg{i:02d}") for i, (name, args) in enumerate(turn.calls)]
        return self._renderer.turn(message, None).text

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        prompt = self._tokenizer.decode(request.tokens, skip_special=False)
        cached = await asyncio.to_thread(self._cached, request.tokens)
        self.on_request(request, cached)
        turn = self.script.turn(prompt)
        if turn is None:
            yield Event(id=request.id, finish="error", error=f"the script has no answer to {prompt[-300:]!r}")
            return
        limit = request.sampling.max_tokens
        opened = prompt.rpartition(self._header)[2] if self._header else ""
        ids = self._tokenizer.encode(self.written(turn, opened), add_special=False, parse_special=True)
        ids.append(request.eos_ids[0])
        finish = "stop"
        if limit is not None and len(ids) > limit:
            ids, finish = ids[:limit], "length"
        began, sent = time.monotonic(), 0
        await asyncio.sleep(self.wait)
        for i, token in enumerate(ids):
            await asyncio.sleep(self.delay)
            if request.id in self._gone:
                finish = "abort"
                break
            sent += 1
            if i < len(ids) - 1:
                yield Event(id=request.id, tokens=[token])
        self._gone.discard(request.id)
        self._prompts.append([*request.tokens, *ids[:sent]])
        self._counts["steps"] += sent
        self._counts["prompt_tokens"] += len(request.tokens)
        self._counts["output_tokens"] += sent
        receipt = Receipt(
            prompt_tokens=len(request.tokens),
            output_tokens=sent,
            cached_tokens=cached,
            chunks=1,
            steps=sent,
            seed=request.sampling.seed or 0,
            enforced=request.constraint.kind if request.constraint else "",
            decode_seconds=time.monotonic() - began,
        )
        last = [] if finish == "abort" else ids[-1:]
        stop = last[0] if finish == "stop" else None
        yield Event(id=request.id, tokens=last, finish=finish, stop_id=stop, receipt=receipt)

    def _cached(self, tokens: list[int]) -> int:
        """The longest prefix of whole pages that an earlier prompt and its answer share with this one."""
        best = 0
        for earlier in self._prompts:
            low, high = 0, min(len(earlier), len(tokens) - 1)
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if earlier[low:middle] == tokens[low:middle] else (low, middle - 1)
            best = max(best, low)
        return best // PAGE * PAGE

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Nothing to learn: answers are planned."""

    def abort(self, request_id: str) -> None:
        self._gone.add(request_id)

    def stats(self) -> Stats:
        return Stats(pages_total=100, **self._counts)

    async def steps(self, most: int = KEPT) -> list[StepInfo]:
        return []

    async def start(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    async def close(self, drain_seconds: float = 0.0) -> None:
        self.alive = False


def _ends(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.eos_ids]


def scripted(
    script: Script, model: Path, *, name: str, template: Path | None = None, context: int = 131_072
) -> tuple[ScriptedClient, Completer]:
    """A scripted model with the tokenizer of a model's file and its chat template, or another one."""
    with open_checkpoint(str(model)) as checkpoint:
        tokenizer, own = tokenizer_and_template(checkpoint, None if template is None else str(template))
    info = EngineInfo(
        model=name,
        architecture="scripted",
        vocab_size=tokenizer.ordinary_size,
        context=context,
        max_seqs=8,
        max_batch_tokens=512,
        pages=100,
        page_size=PAGE,
        backend="scripted",
        weight_bytes=0,
        kv_bytes=0,
    )
    client = ScriptedClient(script, tokenizer, own, info)
    return client, Completer(client, tokenizer, own, info)
