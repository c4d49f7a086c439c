"""POST /v1/chat/completions, in OpenAI's shape with vLLM's and llama.cpp's extra fields.

Owns the request struct, the rules between its fields, and the two forms of an answer. Messages, tools and prompts are shared with other
dialects (`shared/messages.py`, `tools.py`, `conversation.py`). See docs/server.md for what each field does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.tools.types import Tools
from quire.chat.types import Chunk
from quire.observe.errors import BadRequest
from quire.runner.params import MAX_LOGPROBS
from quire.server.feed import Feed, News
from quire.server.openai.calls import CallDeltas
from quire.server.openai.calls import whole as whole_calls
from quire.server.reading import Reading
from quire.server.replies import EventStream, reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared import bodies, conversation, fitting
from quire.server.shared import logprobs as token_logprobs
from quire.server.shared.answers import Envelope, Pace, Partial, Usage, collect, envelope, receipt_body, timings
from quire.server.shared.bodies import parse, read_json
from quire.server.shared.compat import SAMPLING, Endpoint, Fields
from quire.server.shared.conversation import Conversation, check_prompt, template_kwargs
from quire.server.shared.fitting import HEADER, Fit, last_tokens
from quire.server.shared.messages import ChatMessage, turns
from quire.server.shared.sampling import Sampling, generation
from quire.server.shared.texts import nested_tool, text_names
from quire.server.shared.tools import NO_TOOLS, NOTHING, Raw, at, openai_choice, openai_tools

TIERS = (None, "auto", "default")
MAX_DOCUMENTS = 1024


class ChatRequest(Sampling, kw_only=True):
    """The fields of a chat request that are honoured."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = NOTHING
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Raw] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    include_reasoning: bool | None = None
    timings_per_token: bool | None = None
    service_tier: str | None = None
    prediction: msgspec.Raw = msgspec.Raw()
    truncation: str | None = None  # Quire's own here, the name that the Responses API has

    @property
    def text_tools(self) -> frozenset[str]:
        """Names of the tools that take a text. All are checked by then."""
        return text_names(self.tools or ())

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


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """`prediction`: taken, and not used."""

    type: str
    content: str | list[dict[str, str]]


def register(app: FastAPI, server: Server) -> None:
    """Add the route."""

    async def chat_completions(request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse(await read_json(request), ChatRequest)
        served = await server.resolve(request, asked.model)
        served.generates()
        _check(asked, served.reading)
        sampling = asked.params(
            served.info.vocab_size,
            max_tokens=_max_tokens(asked),
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        )
        said = _conversation(served, asked)
        prompt = await _prompt(served, asked, said, sampling.max_tokens)
        max_param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        check_prompt(served, prompt, sampling.max_tokens, "messages", max_param)
        made = generation(asked, prompt, sampling)
        reading, constraint = await conversation.answering(served, prompt, said.tools, made.constraint)
        made = replace(made, reading=reading, constraint=constraint, origin=said.origin)
        feed = Feed(served, [made], request.receive, arrived)
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        head = envelope(served, asked, "chatcmpl", kind)
        headers = None if said.dropped is None else {HEADER: said.dropped.header}
        if asked.stream:
            return EventStream(feed, Stream(asked, head, prompt, sampling.n, said.told()), headers)
        return reply(await whole(feed, asked, head, prompt, said.told()), headers=headers)

    for path in ("/v1/chat/completions", "/chat/completions"):
        app.add_api_route(path, chat_completions, methods=["POST"], response_model=None)


def _check(asked: ChatRequest, reading: Reading) -> None:
    asked.check(reading)
    if asked.top_logprobs is not None:
        if not asked.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if not 0 <= asked.top_logprobs <= MAX_LOGPROBS:
            raise BadRequest(
                f"top_logprobs is {asked.top_logprobs}: it must be in [0, {MAX_LOGPROBS}]", param="top_logprobs"
            )
    if asked.service_tier not in TIERS:
        refusal = BadRequest(
            "service_tier is not supported: the only accepted value is auto or default",
            param="service_tier",
            code="unsupported_parameter",
        )
        reading.excuse(refusal)
    if (
        bytes(asked.prediction) not in (b"", b"null")
        and at("prediction", asked.prediction, Prediction, reading).type != "content"
    ):
        raise BadRequest("prediction.type must be content", param="prediction.type")
    if asked.echo:
        reading.excuse(BadRequest("echo is for /v1/completions", param="echo"))
    if asked.add_special_tokens:
        refusal = BadRequest(
            "add_special_tokens is not supported here: the template writes them", param="add_special_tokens"
        )
        reading.excuse(refusal)


def _max_tokens(asked: ChatRequest) -> int | None:
    old, new = asked.max_tokens, asked.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise BadRequest(f"max_tokens is {old} but max_completion_tokens is {new}: send one", param="max_tokens")
    value = old if new is None else new
    if value is not None and value < 1:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise BadRequest(f"{name} is {value}: it must be at least 1", param=name)
    return value


def _conversation(served: Served, asked: ChatRequest) -> Conversation:
    """The conversation that a request asks for."""
    continues = bool(asked.continue_final_message)
    if continues and asked.messages and asked.messages[-1].role != "assistant":
        raise BadRequest(
            "continue_final_message needs the last message to be the assistant's", param="continue_final_message"
        )
    if continues and asked.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt contradict each other", param="continue_final_message"
        )
    kwargs = template_kwargs(asked.chat_template_kwargs)
    effort = asked.reasoning_effort
    if effort is not None:
        kwargs = conversation.thinking(served, None, effort, "reasoning_effort") | kwargs
    return Conversation(
        turns(served, asked.messages),
        _tools(asked, served.reading),
        kwargs,
        asked.add_generation_prompt is not False,
        continues,
        _documents(asked.documents),
    )


async def _prompt(served: Served, asked: ChatRequest, said: Conversation, answer: int | None) -> list[int]:
    """Tokens of the conversation, cut where the request asks for that."""
    if asked.truncation not in (None, "auto", "disabled"):
        raise BadRequest("truncation must be auto or disabled", param="truncation")
    fit = Fit("truncation", answer) if asked.truncation == "auto" else None
    if fit is not None and asked.truncate_prompt_tokens is not None:
        raise BadRequest("truncation and truncate_prompt_tokens both say what is cut: send one", param="truncation")
    tokens = await (conversation.encode(served, said) if fit is None else fitting.encode(served, said, fit))
    if asked.truncate_prompt_tokens is not None:
        tokens, said.dropped = last_tokens(served, tokens, asked.truncate_prompt_tokens, asked.truncation_side, answer)
        said.notes += [] if said.dropped is None else [said.dropped.note]
    return tokens


def _tools(asked: ChatRequest, reading: Reading) -> Tools:
    if asked.tools is None and asked.tool_choice is NOTHING:
        return NO_TOOLS
    return openai_choice(
        openai_tools(asked.tools, reading, nested_tool), asked.tool_choice, asked.parallel_tool_calls, reading
    )


def _documents(items: list[Raw] | None) -> list[dict[str, Any]] | None:
    if not items:
        return None
    if len(items) > MAX_DOCUMENTS:
        raise BadRequest(f"documents has {len(items)} items: at most {MAX_DOCUMENTS} are taken", param="documents")
    made: list[dict[str, Any]] = []
    for i, raw in enumerate(items):
        made.append(at(f"documents[{i}]", raw, dict[str, Any]))
        bodies.bounded(f"documents[{i}]", made[-1])
    return made


# Answers: one body, or chunks. Deltas of a choice, put together by the rules of OpenAI's clients, are the message of the whole answer, since
# both are made of the same `Partial`. Reasoning goes by two names, because clients know one or the other.


def finish_reason(said: Partial) -> str | None:
    """Why a choice ended, in OpenAI's words."""
    return "tool_calls" if said.called else said.finish


def _message(said: Partial, asked: ChatRequest) -> dict[str, Any]:
    text, calls = "".join(said.text), said.calls.all()
    body: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    thought = "".join(said.reasoning)
    if thought and asked.tells_reasoning:
        body |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        body["tool_calls"] = whole_calls(calls, asked.text_tools)
    return body


async def whole(
    feed: Feed, asked: ChatRequest, head: Envelope, prompt: list[int], told: dict[str, Any]
) -> dict[str, Any]:
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
    told = dict(told)
    if asked.receipts:
        told["receipts"] = [receipt_body(i, c.receipt) for (_, i), c in sorted(choices.items())]
    if told:
        more["quire"] = told
    return head.wrap(body, **more)


class Stream:
    """Chunks of a chat answer: a role for each choice, then news, then a finish reason, then usage if asked for. The first chunk has the
    notes on the request."""

    def __init__(self, asked: ChatRequest, head: Envelope, prompt: list[int], n: int, told: dict[str, Any]):
        self.asked = asked
        self.head = head
        self.prompt = prompt
        self.told = told
        self.usage = Usage([len(prompt)])
        self.said = [Partial() for _ in range(n)]
        self.calls: dict[int, CallDeltas] = {}  # of the choices that call
        self.paces = [Pace() for _ in range(n)]
        # With include_usage every chunk but the last has `usage: null`.
        self.more: dict[str, Any] = ({"usage": None} if asked.wants_usage else {}) | asked.head()

    def opening(self) -> Iterable[object]:
        more = self.more | ({"prompt_token_ids": self.prompt} if self.asked.return_token_ids else {})
        if self.asked.counts_chunks:
            more["usage"] = self.usage.so_far(0, 0)
        for index in range(len(self.said)):
            told = {"quire": self.told} if self.told and index == 0 else {}
            yield self.head.wrap([_choice(index, {"role": "assistant", "content": ""})], **more, **told)

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.said[chunk.index].add(chunk)
            more = dict(self.more)
            if chunk.prompt_logprobs:
                more["prompt_logprobs"] = token_logprobs.prompt(chunk.prompt_logprobs, len(self.prompt))
            delta = self._delta(chunk)
            if self.asked.counts_chunks:
                more["usage"] = self.usage.so_far(0, len(self.said[chunk.index].tokens))
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
        if chunk.calls or (chunk.finish is not None and chunk.index in self.calls):
            if (calls := self.calls.get(chunk.index)) is None:
                calls = self.calls[chunk.index] = CallDeltas(self.asked.text_tools)
            if told := calls.news(chunk.calls, chunk.finish is not None):
                delta["tool_calls"] = told
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


_USER = [{"role": "user", "content": "hi"}]
COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path="/v1/chat/completions",
        what="Also `/chat/completions`. OpenAI's fields, and vLLM's and llama.cpp's beside them.",
        fields=(
            Fields(
                shape=ChatRequest,
                ignored=bodies.IGNORED,
                neutral=bodies.NEUTRAL,
                refused={
                    "echo": (True, "for `/v1/completions`"),
                    "add_special_tokens": (True, "the template writes them; false and null are fine"),
                },
                notes=SAMPLING
                | {
                    "max_completion_tokens": "the newer name of `max_tokens`; if both are sent they must agree",
                    "logprobs": "",
                    "top_logprobs": "0 to 20; needs `logprobs`",
                    "add_generation_prompt": "true by default",
                    "chat_template_kwargs": "variables for the template; not those that the server itself sets",
                    "tools": "functions and custom tools with their grammars, up to 1024; described in the prompt where the template has no place for them, told in `quire.notes`",
                    "tool_choice": "`none`, `auto`, `required`, a tool or `allowed_tools`; a demanded call is enforced",
                    "parallel_tool_calls": "false: at most one call, enforced",
                    "reasoning_effort": "what the template can be told: an effort, or on and off; else refused",
                    "include_reasoning": "false leaves it out of the answer",
                    "continue_final_message": "the answer goes on with the last message, the assistant's",
                    "documents": "of a model whose template has a place for them",
                    "timings_per_token": "llama.cpp's `timings`",
                    "service_tier": "`auto` or `default`",
                    "truncation": "Quire's here: `auto` leaves out the oldest turns of a conversation that does not fit, and tells",
                    "prediction": "checked and not used; the usage says so",
                },
            ),
        ),
        example={"messages": _USER},
        surface="timings_per_token functions function_call modalities audio web_search_options moderation "
        "messages model max_completion_tokens max_tokens n stream stream_options temperature top_p stop seed logprobs top_logprobs "
        "logit_bias frequency_penalty presence_penalty tools tool_choice parallel_tool_calls response_format reasoning_effort "
        "verbosity prediction service_tier user safety_identifier prompt_cache_key store metadata "
        "top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens "
        "skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo "
        "add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs "
        "structured_outputs priority request_id session_id return_token_ids return_tokens_as_token_ids cache_salt "
        "kv_transfer_params thinking_token_budget include_reasoning use_beam_search",
    ),
)
