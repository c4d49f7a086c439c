"""What the library takes and gives: prompts and messages in, outputs with their receipts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from quire.engine.types import Receipt
from quire.observe.errors import BadRequest, QuireError
from quire.runner.params import SamplingParams

if TYPE_CHECKING:
    from quire.chat.types import Call, Chunk, TokenLogprob

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = Mapping[str, Any]  # at least "role" and "content"
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None

DEFAULT_PARAMS = SamplingParams(temperature=0.0, max_tokens=512)


class Thought(str):
    """A piece of a stream that is reasoning, not text."""

    __slots__ = ()


@dataclass(slots=True)
class Completion:
    """One continuation of a prompt."""

    index: int = 0
    text: str = ""
    reasoning: str = ""  # what a chat model thought before it answered, where it says so
    calls: list[Call] = field(default_factory=list)  # tools it calls
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # when SamplingParams.logprobs asked for them
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    receipt: Receipt = field(default_factory=Receipt)

    def _take(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.reasoning += chunk.reasoning
        for part in chunk.calls:
            from quire.chat.types import Call  # not at the top: most answers have none

            if part.index == len(self.calls):
                self.calls.append(Call(part.id or "", part.name or "", part.arguments))
            else:
                had = self.calls[part.index]
                self.calls[part.index] = Call(had.id, had.name, had.arguments + part.arguments)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        if chunk.finish is not None:
            self.finish_reason = chunk.finish
            self.stop_reason = chunk.stop_reason
            self.receipt = chunk.receipt or self.receipt


@dataclass(slots=True)
class Output:
    """What a prompt became."""

    prompt: str | None  # None when it was given as tokens
    prompt_tokens: list[int]
    outputs: list[Completion]  # SamplingParams.n of them
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first continuation's text."""
        return self.outputs[0].text

    @property
    def reasoning(self) -> str:
        """The first continuation's reasoning."""
        return self.outputs[0].reasoning

    @property
    def calls(self) -> list[Call]:
        """The first continuation's calls."""
        return self.outputs[0].calls

    @property
    def receipt(self) -> Receipt:
        """What happened to the first continuation: tokens, cached tokens, times, seed."""
        return self.outputs[0].receipt

    def _take(self, chunk: Chunk) -> None:
        if chunk.finish == "error":
            text = chunk.error or "the engine failed without saying why"
            raise QuireError(text) if chunk.param is None else BadRequest(text, param=chunk.param)
        self.outputs[chunk.index]._take(chunk)
        self.prompt_logprobs += chunk.prompt_logprobs
