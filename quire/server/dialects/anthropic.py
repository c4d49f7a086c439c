"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape.

Owns the two routes, the framing of streams and the shape of every error at these paths. What a request may say is
`_anthropic.py`, what is answered `_anthropic_answers.py`. See docs/server.md for what each field does.
"""

from __future__ import annotations

import secrets
import time

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Generation
from quire.observe.errors import QuireError
from quire.server import errors
from quire.server.dialects import _turns
from quire.server.dialects._anthropic import MessagesRequest, Prompt, encode, parse, room, talk
from quire.server.dialects._anthropic_answers import PING, Answer, Stream
from quire.server.dialects._anthropic_turns import dotted
from quire.server.feed import Feed
from quire.server.limits import read_json
from quire.server.replies import reply
from quire.server.service import Service
from quire.server.sse import EventStream, named_event

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
        said = talk(service, asked)
        wanted = asked.constraint()
        prompt = await encode(service, said)
        left = room(service, prompt)
        # max_tokens must be sent here, and clients send large ones: the context may end the answer first, and says so.
        sampling = msgspec.structs.replace(sampling, max_tokens=min(asked.max_tokens, left))
        reading, constraint = await _turns.answering(service, prompt, said.tools, wanted)
        made = Generation(secrets.token_hex(12), prompt, sampling, constraint=constraint, reading=reading)
        feed = Feed(service, [made], request.receive, arrived)
        stream = Stream(Answer(service.answering, len(prompt), asked.max_tokens > left))
        if asked.stream:
            return _NamedEvents(feed, stream)
        async with feed:
            async for items in feed.batches():
                for _ in stream.news(items):
                    pass
        return reply(stream.whole())

    async def count_tokens(request: Request) -> Response:
        asked = parse(await read_json(request), Prompt)
        service.check_model(asked.model)
        service.generator()
        return reply({"input_tokens": len(await encode(service, talk(service, asked)))})

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


class _NamedEvents(EventStream):
    """Anthropic's framing: every event has a name, and the last one has said that it is the last."""

    frame = staticmethod(named_event)
    waiting = named_event(PING)
    done = b""
