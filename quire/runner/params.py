"""SamplingParams: how one request wants its tokens chosen.

Frozen and msgspec-encodable, because it crosses from the HTTP process to the engine process. `validate()` is the one
place where ranges are checked; a value that passes it is honoured exactly.
"""

from __future__ import annotations

import math

import msgspec

from quire.observe.errors import BadRequest

MAX_N = 64
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 128
MAX_BIASES = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Greedy when `temperature` is 0. `logprobs=k` reports the chosen token and the k best; None reports nothing."""

    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: drawn at admission and told in the receipt
    stop: tuple[str, ...] = ()  # found in the text, by the client side
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    min_tokens: int = 0
    max_tokens: int | None = None  # None: up to the context
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def validate(self, vocab_size: int | None = None) -> SamplingParams:
        """Return self, or raise BadRequest naming the field and its bound."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("n", self.n, 1, MAX_N)
        _within("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise BadRequest(
                    f"min_tokens ({self.min_tokens}) is over max_tokens ({self.max_tokens})", param="min_tokens"
                )
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _within(name, value, 0, MAX_LOGPROBS)
        self._validate_stops()
        self._validate_ids(vocab_size)
        return self

    def _validate_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise BadRequest(f"{len(self.stop)} stop strings: at most {MAX_STOPS}", param="stop")
        for text in self.stop:
            if not text:
                raise BadRequest("a stop string is empty", param="stop")
            if len(text) > MAX_STOP_LENGTH:
                raise BadRequest(f"a stop string has {len(text)} characters: at most {MAX_STOP_LENGTH}", param="stop")

    def _validate_ids(self, vocab_size: int | None) -> None:
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise BadRequest(
                f"{len(self.stop_token_ids)} stop token ids: at most {MAX_STOP_IDS}", param="stop_token_ids"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise BadRequest(f"{len(self.logit_bias)} logit biases: at most {MAX_BIASES}", param="logit_bias")
        for value in self.logit_bias.values():
            _within("logit_bias", value, -100.0, 100.0)
        if vocab_size is None:
            return
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise BadRequest(f"{name} names token {token}: the vocabulary has {vocab_size}", param=name)


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise BadRequest(f"{name} is {value}: it must be in {bracket}{low:.10g}, {high:.10g}]", param=name)
