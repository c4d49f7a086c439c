"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape.

Owns the two routes, the two answers (a body, a stream of named events) and the shape of every error at these paths.
What a request may say is `_anthropic.py`. Text only for now: media, tools and thinking are refused by name. See
docs/server.md for what each field does.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Generation
from quire.engine.types import Receipt
from quire.observe.errors import QuireError
from quire.server import errors
from quire.server.dialects._anthropic import MessagesRequest, Prompt, dotted, encode, parse, room
from quire.server.dialects._openai import Partial, collect
from quire.server.feed import Feed, News
from quire.server.limits import read_json
from quire.server.service import Service
from quire.server.sse import EventStream

PATH = "/v1/messages"
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def register(app: FastAPI, service: Service) -> None:
    """Add the routes."""
    errors.SHAPES[PATH] = shape

    async def messages(request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse(await read_json(request), MessagesRequest)
        service.check_model(asked.model)
        service.generator()
        sampling = asked.params(service.info.vocab_size)
        prompt = await encode(service, asked)
        left = room(service, prompt)
        # max_tokens must be sent here, and clients send large ones: the context may end the answer first, and says so.
        sampling = msgspec.structs.replace(sampling, max_tokens=min(asked.max_tokens, left))
        answer = _Answer(service.answering, len(prompt), asked.max_tokens > left)
        generation = Generation(id=secrets.token_hex(12), prompt=prompt, sampling=sampling)
        feed = Feed(service, [generation], request.receive, arrived)
        if asked.stream:
            return _NamedEvents(feed, _Stream(answer))
        choices, _ = await collect(feed)
        return _json(answer.whole(choices[0, 0]))

    async def count_tokens(request: Request) -> Response:
        asked = parse(await read_json(request), Prompt)
        service.check_model(asked.model)
        service.generator()
        return _json({"input_tokens": len(await encode(service, asked))})

    app.add_api_route(PATH, messages, methods=["POST"], response_model=None)
    app.add_api_route(f"{PATH}/count_tokens", count_tokens, methods=["POST"], response_model=None)


def shape(error: QuireError) -> tuple[int, object]:
    """An error as Anthropic's clients read it: the message names the field, `details` has Quire's stable code."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    said = errors.text(error)
    if error.param is not None:
        where = dotted(error.param)
        said = said.replace(error.param, where, 1) if error.param in said else f"{where}: {said}"
    what = {"type": kind, "message": said, "details": {"error_code": error.code}}
    return error.status, {"type": "error", "error": what}


def frame(value: Any) -> bytes:
    """One event; its name is the type of its object."""
    return b"event: " + value["type"].encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"


PING = {"type": "ping"}


class _NamedEvents(EventStream):
    """Anthropic's framing: every event has a name, and the last one has said that it is the last."""

    frame = staticmethod(frame)
    waiting = frame(PING)
    done = b""


class _Answer:
    """What both answers say, whatever their form."""

    def __init__(self, model: str, prompt: int, overlong: bool):
        self.id = f"msg_{secrets.token_hex(12)}"
        self.model = model
        self.prompt = prompt  # tokens
        self.overlong = overlong  # max_tokens is over what the context leaves

    def message(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **stop, "usage": usage}

    def whole(self, said: Partial) -> dict[str, Any]:
        """The answer as one body."""
        content = [{"type": "text", "text": "".join(said.text)}]
        return self.message(content, self.stop(said), self.usage(said.receipt, len(said.tokens)))

    def opening(self) -> dict[str, Any]:
        """The answer before its first token. What the cache gave is told at the end, so it is not known here."""
        usage = {"input_tokens": self.prompt, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": None}
        return self.message([], {"stop_reason": None, "stop_sequence": None}, usage)

    def stop(self, said: Partial) -> dict[str, Any]:
        """Why it ended."""
        if said.finish == "length":
            why = "model_context_window_exceeded" if self.overlong else "max_tokens"
            return {"stop_reason": why, "stop_sequence": None}
        if isinstance(said.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": said.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def usage(self, receipt: Receipt | None, output: int) -> dict[str, int]:
        """Input is what was computed; what the cache gave is counted beside it. Keeping it costs nothing extra: 0."""
        cached = 0 if receipt is None else receipt.cached_tokens
        return {
            "input_tokens": self.prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }


class _Stream:
    """Events of an answer: its start, one text block in pieces, why it stopped and what it cost."""

    def __init__(self, answer: _Answer):
        self.answer = answer
        self.said = Partial()

    def opening(self) -> Iterable[object]:
        yield {"type": "message_start", "message": self.answer.opening()}
        yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        yield PING

    def news(self, items: list[News]) -> Iterable[object]:
        for _, chunk in items:
            self.said.add(chunk)
            if chunk.text:
                delta = {"type": "text_delta", "text": chunk.text}
                yield {"type": "content_block_delta", "index": 0, "delta": delta}

    def closing(self) -> Iterable[object]:
        usage = self.answer.usage(self.said.receipt, len(self.said.tokens))
        yield {"type": "content_block_stop", "index": 0}
        yield {"type": "message_delta", "delta": self.answer.stop(self.said), "usage": usage}
        yield {"type": "message_stop"}


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
