"""Answers of /v1/chat/completions: one body, or chunks that say the same in pieces.

Deltas of a choice, put together by the rules of OpenAI's clients, are the message of the whole answer: both are made of the
same `Partial`. Reasoning goes by two names, because clients know one or the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from quire.chat.types import CallPart, Chunk
from quire.server.feed import Feed, News
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.answers import Envelope, Pace, Partial, Usage, collect, merged, receipt_body, timings
from quire.server.shared.sampling import Sampling


class AnswerFields(Sampling, kw_only=True):
    """What a chat request says about the form of its answer."""

    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    timings_per_token: bool | None = None
    service_tier: str | None = None
    prediction: msgspec.Raw = msgspec.Raw()

    @property
    def tells_reasoning(self) -> bool:
        """Whether the reasoning is part of the answer."""
        return self.include_reasoning is not False

    def head(self) -> dict[str, Any]:
        """Fields that the answer has because the request has them."""
        return {} if self.service_tier is None else {"service_tier": "default"}

    def details(self, partials: Iterable[Partial]) -> dict[str, int]:
        """`usage.completion_tokens_details`. A prediction is not used, and so nothing of it was accepted."""
        found = {"reasoning_tokens": sum(p.thoughts.tokens for p in partials)}
        if bytes(self.prediction) not in (b"", b"null"):
            found |= {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
        return found


def finish_reason(said: Partial) -> str | None:
    """Why a choice ended, in OpenAI's words."""
    return "tool_calls" if said.called else said.finish


def _message(said: Partial, asked: AnswerFields) -> dict[str, Any]:
    text, calls = "".join(said.text), said.calls.all()
    body: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    thought = "".join(said.reasoning)
    if thought and asked.tells_reasoning:
        body |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        body["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ]
    return body


async def whole(feed: Feed, asked: AnswerFields, head: Envelope, prompt: list[int]) -> bytes:
    """The answer as one body."""
    choices, prompt_logprobs = await collect(feed)
    usage = Usage([len(prompt)])
    body: list[dict[str, Any]] = []
    for (_, index), choice in sorted(choices.items()):
        usage.finish(index, choice.receipt, len(choice.tokens))
        item: dict[str, Any] = {
            "index": index,
            "message": _message(choice, asked),
            "logprobs": {"content": token_logprobs.chat(choice.logprobs), "refusal": None} if asked.logprobs else None,
            "finish_reason": finish_reason(choice),
            "stop_reason": choice.stop_reason,
        }
        if asked.return_token_ids:
            item["token_ids"] = choice.tokens
        body.append(item)
    usage.details = asked.details(choices.values())
    more: dict[str, Any] = {"usage": usage.body(), **asked.head()}
    if asked.prompt_logprobs is not None:
        more["prompt_logprobs"] = token_logprobs.prompt(prompt_logprobs.get(0, []), len(prompt))
    if asked.return_token_ids:
        more["prompt_token_ids"] = prompt
    if asked.timings_per_token:
        more["timings"] = timings(choices[0, 0].receipt)
    if asked.receipts:
        more["quire"] = {"receipts": [receipt_body(i, c.receipt) for (_, i), c in sorted(choices.items())]}
    return msgspec.json.encode(head.wrap(body, **more))


class Stream:
    """Chunks of a chat answer: a role for each choice, then news, then a finish reason, then usage if asked for."""

    def __init__(self, asked: AnswerFields, head: Envelope, prompt: list[int], n: int):
        self.asked = asked
        self.head = head
        self.prompt = prompt
        self.usage = Usage([len(prompt)])
        self.said = [Partial() for _ in range(n)]
        self.paces = [Pace() for _ in range(n)]
        # With include_usage every chunk but the last has `usage: null`.
        self.more: dict[str, Any] = ({"usage": None} if asked.wants_usage else {}) | asked.head()

    def opening(self) -> Iterable[object]:
        more = self.more | ({"prompt_token_ids": self.prompt} if self.asked.return_token_ids else {})
        for index in range(len(self.said)):
            yield self.head.wrap([_choice(index, {"role": "assistant", "content": ""})], **more)

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.said[chunk.index].add(chunk)
            more = dict(self.more)
            if chunk.prompt_logprobs:
                more["prompt_logprobs"] = token_logprobs.prompt(chunk.prompt_logprobs, len(self.prompt))
            delta = self._delta(chunk)
            says = delta or chunk.finish or more.keys() - self.more.keys()
            if self.asked.timings_per_token:
                more["timings"] = self.paces[chunk.index].add(chunk)
            if says or (chunk.logprobs and self.asked.logprobs) or (chunk.tokens and self.asked.return_token_ids):
                yield self._chunk(chunk, delta, more)

    def _delta(self, chunk: Chunk) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if chunk.reasoning and self.asked.tells_reasoning:
            delta |= {"reasoning_content": chunk.reasoning, "reasoning": chunk.reasoning}
        if chunk.text:
            delta["content"] = chunk.text
        if chunk.calls:
            delta["tool_calls"] = [_call_delta(part) for part in merged(chunk.calls)]
        return delta

    def _chunk(self, chunk: Chunk, delta: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        item = _choice(chunk.index, delta)
        said = self.said[chunk.index]
        if self.asked.logprobs and chunk.logprobs:
            item["logprobs"] = {"content": token_logprobs.chat(chunk.logprobs), "refusal": None}
        if self.asked.return_token_ids:
            item["token_ids"] = chunk.tokens
        if chunk.finish is not None:
            item["finish_reason"], item["stop_reason"] = finish_reason(said), chunk.stop_reason
            self.usage.finish(chunk.index, chunk.receipt, len(said.tokens))
            if self.asked.timings_per_token:
                more["timings"] = timings(chunk.receipt)
            if self.asked.receipts:
                more["quire"] = {"receipts": [receipt_body(chunk.index, chunk.receipt)]}
        return self.head.wrap([item], **more)

    def closing(self) -> Iterable[object]:
        if self.asked.wants_usage:
            self.usage.details = self.asked.details(self.said)
            yield self.head.wrap([], **self.asked.head(), usage=self.usage.body())


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call_delta(part: CallPart) -> dict[str, Any]:
    """News of a call: what it is comes once, with its first part."""
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}
