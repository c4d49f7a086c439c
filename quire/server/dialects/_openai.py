"""What OpenAI's chat and completions dialects share: the sampling fields, prompt bounds, usage and receipts.

Requests come in as msgspec structs and leave as `Generation`s; answers are plain dicts, encoded once. `null` means the
default everywhere, as it does for OpenAI.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.chat.types import Chunk, Generation
from quire.engine.types import Receipt
from quire.observe.errors import BadRequest
from quire.runner.params import SamplingParams
from quire.server import limits
from quire.server.dialects._answers import Calls, Thoughts
from quire.server.dialects._constraint import Structured
from quire.server.dialects._sampling import sampling
from quire.server.feed import Feed
from quire.server.service import Service

MAX_PRIORITY = 2**31 - 1
MAX_SALT = 256
MAX_CHOICES = 512  # prompts times n
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: not done, so only false is taken
    continuous_usage_stats: bool | None = None


class Sampling(Structured, kw_only=True):
    """The fields that both dialects honour."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    receipts: bool | None = None

    def params(self, vocab_size: int, **more: Any) -> SamplingParams:
        """SamplingParams, range-checked. `more` overrides what the request says."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        asked: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,  # vLLM writes "no limit" as -1
            "min_p": self.min_p,
            "typical_p": self.typical_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "seed": self.seed,
            "stop": stop,
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "include_stop": self.include_stop_str_in_output,
            "min_tokens": self.min_tokens,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "n": self.n,
            "prompt_logprobs": self.prompt_logprobs,
            "skip_special_tokens": self.skip_special_tokens,
        }
        return sampling(asked | more, vocab_size)

    def check(self) -> None:
        """Rules between fields, and bounds that SamplingParams does not know."""
        options = self.stream_options
        if options is not None and not self.stream:
            raise BadRequest("stream_options needs stream to be true", param="stream_options")
        if options is not None and options.include_obfuscation:
            raise BadRequest("include_obfuscation is not supported", param="stream_options.include_obfuscation")
        if options is not None and options.continuous_usage_stats:
            raise BadRequest("continuous_usage_stats is not supported", param="stream_options.continuous_usage_stats")
        if self.priority is not None and abs(self.priority) > MAX_PRIORITY:
            raise BadRequest(f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}", param="priority")
        if self.cache_salt is not None and not 1 <= len(self.cache_salt) <= MAX_SALT:
            raise BadRequest(f"cache_salt must have 1 to {MAX_SALT} characters", param="cache_salt")
        if self.request_id is not None and not _ID.fullmatch(self.request_id):
            raise BadRequest(
                "request_id must be 1 to 128 letters, digits, dots, colons, dashes or underscores", param="request_id"
            )

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


def generation(request: Sampling, prompt: list[int], sampling: SamplingParams) -> Generation:
    """The internal request. Its id is ours alone: two clients may send the same request_id."""
    return Generation(
        id=secrets.token_hex(12),
        prompt=prompt,
        sampling=sampling,
        priority=request.priority or 0,
        namespace=request.cache_salt or "",
        constraint=request.constraint(),
    )


def check_text(service: Service, text: str, param: str) -> None:
    """Refuse text that cannot fit the context however it is tokenized, before the work of tokenizing it."""
    context, longest = service.info.context, service.ready().tokenizer.max_token_bytes
    if longest is not None and len(text) > context * longest:
        raise BadRequest(
            f"{param} has {len(text)} characters, more than any {context} tokens (the context of this model)",
            param=param,
            code="context_length_exceeded",
        )


def check_prompt(service: Service, tokens: list[int], max_tokens: int | None, param: str, max_param: str) -> None:
    """Refuse what does not fit the context; nothing is ever cut."""
    context, vocab = service.info.context, service.info.vocab_size
    if not tokens:
        raise BadRequest(f"{param} is empty", param=param)
    if min(tokens) < 0 or max(tokens) >= vocab:
        bad = next(t for t in tokens if not 0 <= t < vocab)
        raise BadRequest(f"{param} holds token {bad}: the vocabulary has {vocab}", param=param)
    room = context - len(tokens)
    if room < 1:
        raise BadRequest(
            # "maximum context length" are OpenAI's words; clients know by them that a prompt is too long and shorten it.
            f"{param} has {len(tokens)} tokens: this model's maximum context length is {context} tokens, and at least one is "
            "for the answer",
            cure="shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    if max_tokens is not None and max_tokens > room:
        raise BadRequest(
            f"{max_param} is {max_tokens}: this model's maximum context length is {context} tokens, {param} has "
            f"{len(tokens)}, which leaves {room}",
            param=max_param,
            code="context_length_exceeded",
        )


async def encode_text(service: Service, text: str, param: str, add_special: bool | None = None) -> list[int]:
    """Tokens of a prompt."""
    check_text(service, text, param)
    completer = service.ready()
    if add_special is None or add_special:
        return await completer.encode_prompt(text)
    return await asyncio.to_thread(completer.tokenizer.encode, text, add_special=False, parse_special=True)


@dataclass(slots=True)
class Partial:
    """One choice as it comes together."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    thoughts: Thoughts = field(default_factory=Thoughts)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    receipt: Receipt | None = None

    def add(self, chunk: Chunk) -> None:
        """Take one chunk in."""
        self.text.append(chunk.text)
        if chunk.reasoning:
            self.reasoning.append(chunk.reasoning)
        if chunk.calls:
            self.calls.add(chunk.calls)
        self.thoughts.add(chunk)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs
        if chunk.finish is not None:
            self.finish, self.stop_reason, self.receipt = chunk.finish, chunk.stop_reason, chunk.receipt

    @property
    def called(self) -> bool:
        """It ended with calls to make: not cut by a length, nor by a stop string inside of one."""
        if self.finish != "stop" or not self.calls:
            return False
        return not isinstance(self.stop_reason, str) or self.calls.whole


@dataclass(slots=True)
class Usage:
    """Counts of one HTTP request: each prompt once, the output of every choice."""

    prompts: list[int]  # tokens of each
    output: int = 0
    cached: int = 0
    details: dict[str, int] | None = None  # of the output; None: the dialect has none

    def finish(self, index: int, receipt: Receipt | None, tokens: int) -> None:
        """A choice ended; `tokens` were delivered of it. What was computed past a stop string depends on timing."""
        self.output += tokens
        if index == 0 and receipt is not None:
            self.cached += receipt.cached_tokens

    def body(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt = sum(self.prompts)
        body: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.output,
            "total_tokens": prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        return body if self.details is None else body | {"completion_tokens_details": self.details}


def receipt_body(index: int, receipt: Receipt | None) -> dict[str, Any]:
    """A receipt as clients see it: every field, defaults included."""
    fields = {} if receipt is None else {f: getattr(receipt, f) for f in receipt.__struct_fields__}
    return {"index": index, **fields}


@dataclass(slots=True)
class Envelope:
    """The fields that every object of one answer repeats."""

    id: str
    object: str
    model: str
    fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        """One response object."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
            **more,
        }


def envelope(service: Service, request: Sampling, prefix: str, kind: str) -> Envelope:
    """The envelope of an answer; the client's request_id, if any, is in its id."""
    return Envelope(
        f"{prefix}-{request.request_id or secrets.token_hex(12)}", kind, service.answering, service.fingerprint
    )


async def collect(feed: Feed) -> tuple[dict[tuple[int, int], Partial], dict[int, list[Any]]]:
    """Run a feed to its end: choices by (prompt, index), and prompt logprobs by prompt."""
    choices: dict[tuple[int, int], Partial] = {}
    prompt_logprobs: dict[int, list[Any]] = {}
    async with feed:
        async for items in feed.batches():
            for prompt, chunk in items:
                choices.setdefault((prompt, chunk.index), Partial()).add(chunk)
                if chunk.prompt_logprobs:
                    prompt_logprobs[prompt] = chunk.prompt_logprobs
    return choices, prompt_logprobs


def check_open(name: str, value: Any) -> None:
    """Bound a field whose shape is the client's."""
    if value is not None:
        limits.bounded(name, value)
