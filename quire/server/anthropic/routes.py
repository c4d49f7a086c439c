"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's shape.

Owns the two routes, the framing of streams and the shape of every error at these paths. What a request may say is
`request.py`, what is answered `answers.py`. See docs/server.md for what each field does.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Generation
from quire.observe.errors import QuireError
from quire.server import errors
from quire.server.anthropic.answers import PING, Answer, Stream, told
from quire.server.anthropic.request import (
    HINTS,
    IGNORED,
    NEUTRAL,
    MessagesRequest,
    Prompt,
    conversation_of,
    edits_of,
    encode,
    parse,
    room,
)
from quire.server.anthropic.turns import dotted
from quire.server.feed import Feed
from quire.server.replies import EventStream, named_event, reply
from quire.server.server import Server
from quire.server.shared import conversation
from quire.server.shared.bodies import read_json
from quire.server.shared.compat import Endpoint, Fields

PATH = "/v1/messages"
ALIVE = 4  # silences, each of KEEP_ALIVE_SECONDS, between two events that are no pings
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    errors.SHAPES[PATH] = shape

    async def messages(request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse(await read_json(request), MessagesRequest)
        served = await server.resolve(request, asked.model)
        served.generates()
        sampling = asked.params(served.info.vocab_size)
        notes = asked.hints()
        said = conversation_of(served, asked, notes)
        wanted = asked.constraint()
        encoded = await encode(served, said, edits_of(served, asked))
        prompt, said = encoded.tokens, encoded.said
        notes += said.changes
        left = room(served, prompt)
        # max_tokens must be sent here, and clients send large ones: the context may end the answer first, and says so.
        sampling = msgspec.structs.replace(sampling, max_tokens=min(asked.max_tokens, left))
        reading, constraint = await conversation.answering(served, prompt, said.tools, wanted)
        made = Generation(
            secrets.token_hex(12), prompt, sampling, constraint=constraint, reading=reading, origin=said.origin
        )
        feed = Feed(served, [made], request.receive, arrived)
        applied = None if asked.context_management is None else encoded.applied
        answer = Answer(served.name, len(prompt), asked.max_tokens > left, notes, applied, bool(asked.receipts))
        thinking = asked.thinking
        thinks = thinking is not None and thinking.type != "disabled" and conversation.reasons_apart(served)
        stream = Stream(answer, thinking is not None and thinking.omits, thinks)
        if asked.stream:
            return _NamedEvents(feed, stream)
        async with feed:
            async for items in feed.batches():
                for _ in stream.news(items):
                    pass
        return reply(stream.whole())

    async def count_tokens(request: Request) -> Response:
        asked = parse(await read_json(request), Prompt)
        served = await server.resolve(request, asked.model)
        served.generates()
        notes = asked.hints()
        encoded = await encode(served, conversation_of(served, asked, notes), edits_of(served, asked))
        notes += encoded.said.changes
        more: dict[str, Any] = {}
        if asked.context_management is not None:
            more["context_management"] = {"original_input_tokens": encoded.before}
        return reply({"input_tokens": len(encoded.tokens), **more, **told(notes)})

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
    """Anthropic's framing: every event has a name, and the last one has said that it is the last.

    A long prompt is silent for minutes. Claude Code drops a stream that had nothing but pings for five of them, so every fourth silence is
    told by a delta that adds nothing.
    """

    frame = staticmethod(named_event)
    waiting = named_event(PING)
    done = b""
    notes_in = "message"

    def __init__(self, feed: Feed, encoder: Stream):
        super().__init__(feed, encoder)
        self.blocks = encoder.blocks
        self.silences = 0

    def silence(self) -> bytes:
        self.silences += 1
        return b"".join(map(named_event, self.blocks.alive())) if self.silences % ALIVE == 0 else self.waiting


_HINTS = dict.fromkeys(HINTS, "a hint; no effect, told in `quire.notes`") | {
    "diagnostics": "none are made; no effect, told in `quire.notes`"
}
_EDITS = {
    "context_management": "old results of tools and old thinking are cleared; compaction is refused when it is due"
}
_USER = [{"role": "user", "content": "hi"}]
COMPAT = (
    Endpoint(
        dialect="Anthropic",
        method="POST",
        path="/v1/messages",
        fields=(
            Fields(
                shape=MessagesRequest,
                ignored=IGNORED,
                neutral=NEUTRAL,
                notes={
                    "max_tokens": "a bound: the context may end the answer first, and `stop_reason` says so",
                    "temperature": "may go beyond Anthropic's 1",
                    "metadata": "`user_id`; without effect",
                    "system": "text or text blocks",
                    "messages": "text, tool_use, tool_result and thinking blocks; an assistant's last message is continued",
                    "tools": "the client's own; described in the prompt where the template has no place for them, told in `quire.notes`. Those that Anthropic runs are left out, told in `quire.notes`",
                    "tool_choice": "`any` and `tool` are enforced",
                    "thinking": "of a model that reasons, else no effect, told in `quire.notes`; the budget is a target",
                    "output_config": "`format` is enforced; `effort` as the template can be told it, else no effect, told in `quire.notes`",
                    "receipts": "Quire's: what happened to the request",
                    "output_format": "the older place of `output_config.format`",
                    **_HINTS,
                    **_EDITS,
                },
            ),
        ),
        example={"model": "", "max_tokens": 4, "messages": _USER},
        surface="model max_tokens messages system stop_sequences temperature top_p top_k tools tool_choice thinking metadata stream",
    ),
    Endpoint(
        dialect="Anthropic",
        method="POST",
        path="/v1/messages/count_tokens",
        what="Renders and counts the same prompt, and runs nothing.",
        fields=(Fields(shape=Prompt, ignored=IGNORED, neutral=NEUTRAL, notes=_HINTS | _EDITS),),
        example={"model": "", "messages": _USER},
        surface="model messages system tools tool_choice thinking",
    ),
)
