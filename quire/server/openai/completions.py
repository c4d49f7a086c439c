"""POST /v1/completions, OpenAI's older dialect: text or tokens in, text out, several prompts in one request.

Choice `p * n + i` is the i-th continuation of prompt p. `echo` puts the prompt before the answer, and with `logprobs`
scores it; `max_tokens: 0` with `echo` scores only. `max_tokens` is 16 when not given, as it is for OpenAI. `best_of` computes that
many and answers with the n of the highest summed log probability, best first; all of them are in `usage`. `suffix` is for models with infill tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Chunk, TokenLogprob, TokenText
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS, MAX_N, SamplingParams
from quire.server.feed import Feed, News
from quire.server.reading import Reading
from quire.server.replies import EventStream, reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared import bodies
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.answers import MAX_CHOICES, Envelope, Usage, envelope, receipt_body
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import SAMPLING, Endpoint, Fields
from quire.server.shared.conversation import Dropped, check_prompt, encode_text
from quire.server.shared.fitting import HEADER, last_tokens
from quire.server.shared.infill import gap
from quire.server.shared.sampling import Sampling, generation

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(Sampling, kw_only=True):
    """The fields of a completions request that are honoured."""

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def computed(self) -> int:
        """Choices that are made of each prompt."""
        return self.best_of or self.n or 1


@dataclass(slots=True)
class Prompt:
    """A prompt in both its forms."""

    tokens: list[int]
    text: str | None  # as the client wrote it; None when it sent tokens, or when some of it was left out
    dropped: Dropped | None = None  # what was


def register(app: FastAPI, server: Server) -> None:
    """Add the route."""

    async def completions(request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse(await read_json(request), CompletionRequest)
        served = await server.resolve(request, asked.model)
        served.generates()
        prompts = _prompts(asked, server.config.max_prompts)
        _check(asked, len(prompts), served.reading)
        max_tokens = DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
        score_only = max_tokens == 0
        scores = asked.logprobs if asked.echo else None
        sampling = asked.params(
            served.info.vocab_size,
            max_tokens=1 if score_only else max_tokens,  # the engine always computes one; it is not delivered
            n=asked.computed,
            logprobs=0 if asked.logprobs is None and asked.computed > (asked.n or 1) else asked.logprobs,
            prompt_logprobs=max((k for k in (asked.prompt_logprobs, scores) if k is not None), default=None),
        )
        if asked.suffix:
            sampling = _until_filled(served, sampling)
        encoded: list[Prompt] = []
        for i, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            ids = await _encoded(served, asked, prompt, param)
            ids, dropped = last_tokens(
                served, ids, asked.truncate_prompt_tokens, asked.truncation_side, sampling.max_tokens
            )
            check_prompt(served, ids, sampling.max_tokens if asked.max_tokens else None, param, "max_tokens")
            text = prompt if isinstance(prompt, str) and dropped is None else None
            encoded.append(Prompt(ids, text, dropped))
        if asked.max_tokens is None:  # a default never refuses a prompt that leaves less room than itself
            room = [min(DEFAULT_MAX_TOKENS, served.info.context - len(p.tokens)) for p in encoded]
        else:
            room = [sampling.max_tokens or 1] * len(encoded)
        generations = [
            generation(asked, p.tokens, msgspec.structs.replace(sampling, max_tokens=r))
            for p, r in zip(encoded, room, strict=True)
        ]
        feed = Feed(served, generations, request.receive, arrived)
        answer = _Answer(served, asked, envelope(served, asked, "cmpl", "text_completion"), encoded, score_only)
        headers = next(({HEADER: p.dropped.header} for p in encoded if p.dropped is not None), None)
        if asked.stream:
            return EventStream(feed, answer, headers)
        return reply(await _whole(feed, answer), headers=headers)

    app.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)


def _prompts(asked: CompletionRequest, most: int) -> list[str | list[int]]:
    """The prompts, whichever of the four forms they came in."""
    prompt = asked.prompt
    if prompt is None:
        raise BadRequest("prompt is missing", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt is an empty list", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise BadRequest("prompt mixes text and tokens: send a list of one kind", param="prompt")
    if kinds == {int}:
        return [[item for item in prompt if isinstance(item, int)]]
    if len(prompt) > most:
        raise BadRequest(f"{len(prompt)} prompts: at most {most} in one request", param="prompt")
    return [item for item in prompt if not isinstance(item, int)]


async def _encoded(served: Served, asked: CompletionRequest, prompt: str | list[int], param: str) -> list[int]:
    """Tokens of one prompt."""
    if asked.suffix:
        return (await gap(served, prompt, asked.suffix, (param, "suffix")))[0]
    if isinstance(prompt, list):
        return prompt
    return await encode_text(served, prompt, param, asked.add_special_tokens)


def _until_filled(served: Served, sampling: SamplingParams) -> SamplingParams:
    """The sampling parameters, which also stop at the tokens that such models write when the gap is filled."""
    tokens = served.tokenizer.infill
    if tokens is None or sampling.ignore_eos:
        return sampling
    ends = (*sampling.stop_token_ids, *(t for t in tokens.ends if t not in sampling.stop_token_ids))
    return msgspec.structs.replace(sampling, stop_token_ids=ends)


def _check(asked: CompletionRequest, prompts: int, reading: Reading) -> None:
    asked.check(reading)
    n = 1 if asked.n is None else asked.n
    if asked.best_of is not None and n >= 1:  # an n that is none is refused with the other bounds
        if not n <= asked.best_of <= MAX_N:
            raise BadRequest(f"best_of is {asked.best_of}: it must be from n ({n}) to {MAX_N}", param="best_of")
        if asked.stream and asked.best_of > n:
            raise BadRequest(
                f"best_of is {asked.best_of}: the best of several is known at their end, so it cannot be streamed",
                cure="leave out stream, or best_of",
                param="best_of",
            )
    if n < 1 or n > MAX_N:
        raise BadRequest(f"n is {n}: it must be in [1, {MAX_N}]", param="n")
    if prompts * asked.computed > MAX_CHOICES:
        name = "n" if asked.best_of is None else "best_of"
        raise BadRequest(
            f"{prompts} prompts times {name} = {asked.computed}: at most {MAX_CHOICES} choices in one request",
            param=name,
        )
    if asked.suffix and asked.echo:
        raise BadRequest("echo has no meaning with suffix: the answer goes between the two", param="echo")
    if asked.suffix and asked.add_special_tokens is False:
        raise BadRequest("add_special_tokens is for prompts without a suffix", param="add_special_tokens")
    if asked.logprobs is not None and not 0 <= asked.logprobs <= MAX_LOGPROBS:
        raise BadRequest(f"logprobs is {asked.logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="logprobs")
    if asked.max_tokens == 0 and not asked.echo:
        raise BadRequest("max_tokens is 0: it must be at least 1, unless echo is true", param="max_tokens")


@dataclass(slots=True)
class _Choice:
    """One choice while it is being answered."""

    legacy: token_logprobs.Legacy | None
    begun: bool = False
    delivered: int = 0
    score: float = 0.0  # the sum of its log probabilities, where they were computed
    parts: list[dict[str, Any]] = field(default_factory=list)


class _Answer:
    """Turns news into choice objects, for a stream as they come and for a body joined at the end."""

    def __init__(
        self, served: Served, asked: CompletionRequest, head: Envelope, prompts: list[Prompt], score_only: bool
    ):
        self.tokenizer = served.tokenizer
        self.asked = asked
        self.head = head
        self.prompts = prompts
        self.score_only = score_only
        self.n = asked.computed
        self.usage = Usage([len(p.tokens) for p in prompts])
        self.scores: dict[int, list[TokenLogprob]] = {}
        self.waiting: dict[int, list[Chunk]] = {}  # chunks that came before their prompt's scores
        self.choices = [
            _Choice(token_logprobs.Legacy() if asked.logprobs is not None else None)
            for _ in range(len(prompts) * self.n)
        ]
        self.more: dict[str, Any] = {"usage": None} if asked.wants_usage else {}
        dropped = [p.dropped.body() | {"prompt": i} for i, p in enumerate(prompts) if p.dropped is not None]
        self.told: dict[str, Any] = {"dropped": dropped} if dropped else {}

    def opening(self) -> Iterable[object]:
        return ()

    def news(self, items: list[News]) -> Iterable[object]:
        for prompt, chunk in items:
            for item, receipt in self.take(prompt, chunk):
                more = dict(self.more)
                if self.asked.counts_chunks:
                    more["usage"] = self.usage.so_far(prompt, self.choices[item["index"]].delivered)
                told, self.told = self.told, {}  # the first chunk says what was left out
                if receipt is not None and self.asked.receipts:
                    told["receipts"] = [receipt]
                if told:
                    more["quire"] = told
                yield self.head.wrap([item], **more)

    def closing(self) -> Iterable[object]:
        if self.asked.wants_usage:
            yield self.head.wrap([], usage=self.usage.body())

    def take(self, prompt: int, chunk: Chunk) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
        """Choice objects, with a receipt where one ended. Scores of a prompt come with its first choice only."""
        if chunk.prompt_logprobs:
            self.scores[prompt] = chunk.prompt_logprobs
        wants_scores = (self.asked.echo and self.asked.logprobs is not None) or self.asked.prompt_logprobs is not None
        one_token = len(self.prompts[prompt].tokens) == 1  # nothing to score
        if wants_scores and prompt not in self.scores and not one_token and chunk.index != 0:
            self.waiting.setdefault(prompt, []).append(chunk)
            return []
        ready = [chunk, *self.waiting.pop(prompt, [])]
        return [made for c in ready if (made := self._item(prompt, c)) is not None]

    def _item(self, prompt: int, chunk: Chunk) -> tuple[dict[str, Any], dict[str, Any] | None] | None:
        index = prompt * self.n + chunk.index
        choice = self.choices[index]
        choice.delivered += len(chunk.tokens)
        choice.score += sum(entry.logprob for entry in chunk.logprobs)
        text, tokens, entries = chunk.text, chunk.tokens, chunk.logprobs
        if self.score_only:
            text, tokens, entries = "", [], []
        item: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        first = not choice.begun
        if first:
            self._begin(choice, prompt, item)
        if choice.legacy is not None:
            for entry in entries:
                choice.legacy.add(entry.token, entry)
            item["logprobs"] = choice.legacy.take()
        if self.asked.return_token_ids:
            item["token_ids"] = tokens
        receipt = None
        if chunk.finish is not None:
            item["finish_reason"] = "length" if self.score_only else chunk.finish
            item["stop_reason"] = None if self.score_only else self._reason(chunk)
            receipt = receipt_body(index, chunk.receipt)
            self.usage.finish(chunk.index, chunk.receipt, choice.delivered)
            if self.score_only:
                self.usage.output = 0
        speaks = item["text"] or item["finish_reason"] or first or (item["logprobs"] or {}).get("tokens")
        return (item, receipt) if speaks or (tokens and self.asked.return_token_ids) else None

    def _reason(self, chunk: Chunk) -> str | int | None:
        """The stop text that ended it, if the client named it: the tokens that end a filled gap are not told."""
        named = not isinstance(chunk.stop_reason, int) or chunk.stop_reason in (self.asked.stop_token_ids or ())
        return chunk.stop_reason if named else None

    def _begin(self, choice: _Choice, prompt: int, item: dict[str, Any]) -> None:
        """The text and scores that go before the first text of a choice: the echo of the prompt."""
        choice.begun = True
        source, scores = self.prompts[prompt], self.scores.get(prompt, [])
        if self.asked.prompt_logprobs is not None:
            item["prompt_logprobs"] = token_logprobs.prompt(
                _best(scores, self.asked.prompt_logprobs), len(source.tokens)
            )
        if self.asked.return_token_ids:
            item["prompt_token_ids"] = source.tokens
        if not self.asked.echo:
            return
        whole = self.tokenizer.decode(source.tokens, skip_special=False)
        shown = source.text if source.text is not None else whole
        item["text"] = shown + item["text"]
        if choice.legacy is None:
            return
        # Tokens that were put before the client's text (a beginning-of-sequence mark) lie before its offset 0.
        choice.legacy.characters = len(shown) - len(whole) if whole.endswith(shown) else 0
        for position, token in enumerate(source.tokens):
            at = position - (len(source.tokens) - len(scores))
            entry = _best(scores[at : at + 1], self.asked.logprobs or 0)[0] if at >= 0 else None
            choice.legacy.add(entry.token if entry else self._text(token), entry)
        choice.legacy.characters = len(shown)

    def _text(self, token: int) -> TokenText:
        return TokenText(token, self.tokenizer.token_text(token), self.tokenizer.token_bytes(token))


def _best(entries: list[TokenLogprob], k: int) -> list[TokenLogprob]:
    """Entries with at most k alternatives: the engine was asked for the larger of two counts."""
    return [TokenLogprob(e.token, e.logprob, e.rank, e.top[:k]) for e in entries]


async def _whole(feed: Feed, answer: _Answer) -> dict[str, Any]:
    receipts: list[dict[str, Any]] = []
    async with feed:
        async for items in feed.batches():
            for prompt, chunk in items:
                for item, receipt in answer.take(prompt, chunk):
                    answer.choices[item["index"]].parts.append(item)
                    if receipt is not None:
                        receipts.append(receipt)
    kept = _kept(answer)
    body = [_join(index, answer.choices[i].parts) for index, i in enumerate(kept)]
    more: dict[str, Any] = {"usage": answer.usage.body()}
    if answer.asked.receipts:
        by_index = {r["index"]: r for r in receipts}
        answer.told["receipts"] = [by_index[i] | {"index": index} for index, i in enumerate(kept)]
    if answer.told:
        more["quire"] = answer.told
    return answer.head.wrap(body, **more)


def _kept(answer: _Answer) -> list[int]:
    """The choices that are answered with, in order: all, or of each prompt the n best, the earlier of equals first."""
    each, n = answer.n, answer.asked.n or 1
    if each == n:
        return list(range(len(answer.choices)))
    kept: list[int] = []
    for first in range(0, len(answer.choices), each):
        kept += sorted(range(first, first + each), key=lambda i: (-answer.choices[i].score, i))[:n]
    return kept


def _join(index: int, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The parts of a choice as one object."""
    joined: dict[str, Any] = {
        **parts[0],
        **{k: v for k, v in parts[-1].items() if k in ("finish_reason", "stop_reason")},
    }
    joined["index"] = index
    joined["text"] = "".join(p["text"] for p in parts)
    if joined["logprobs"] is not None:
        joined["logprobs"] = {k: [v for p in parts for v in p["logprobs"][k]] for k in joined["logprobs"]}
    if "token_ids" in joined:
        joined["token_ids"] = [t for p in parts for t in p["token_ids"]]
    return joined


COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path="/v1/completions",
        what="OpenAI's fields, and vLLM's and llama.cpp's beside them.",
        fields=(
            Fields(
                shape=CompletionRequest,
                ignored=bodies.IGNORED,
                neutral=bodies.NEUTRAL,
                notes=SAMPLING
                | {
                    "prompt": "a text, texts, token ids, or lists of them; up to 64, and up to 512 prompts times `n`",
                    "echo": "with `logprobs` it scores the prompt",
                    "max_tokens": "16 by default; 0 with `echo`: score only",
                    "logprobs": "0 to 20",
                    "best_of": "the `n` of the highest summed log probability, best first; all are in `usage`; more than `n` not in a stream",
                    "suffix": "of a model with infill tokens; else 400",
                    "add_special_tokens": "true by default",
                },
            ),
        ),
        example={"prompt": "hi"},
        surface="model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream stream_options "
        "suffix temperature top_p user top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos "
        "min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids prompt_logprobs "
        "add_special_tokens response_format structured_outputs priority request_id return_token_ids return_tokens_as_token_ids cache_salt "
        "kv_transfer_params use_beam_search",
    ),
)
