"""/v1/responses, in OpenAI's shape: create, stream, run in the background, look at, cancel, delete, list input, count.

Owns the routes and what an answer repeats of its request. Requests are `request.py`, items `items.py`, the
answer and its events `answer.py`, background runs `runs.py`; stored responses are `stored.py`.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.observe.errors import BadRequest, NotFound, QuireError
from quire.server import ignored
from quire.server.callers import caller_of
from quire.server.database import Database
from quire.server.errors import Unimplemented
from quire.server.feed import Feed
from quire.server.openai.pages import cut, window
from quire.server.openai.responses.answer import Answer
from quire.server.openai.responses.request import (
    ELSEWHERE,
    IGNORED,
    LOGPROBS,
    NEUTRAL,
    SEALED,
    CountRequest,
    Prepared,
    ResponseRequest,
    check,
    generated,
    parse,
    parse_count,
    prepare,
    schema_of,
)
from quire.server.openai.responses.runs import Listening, Runs
from quire.server.openai.responses.stored import LATER, SCHEMA, Record, StoredResponses
from quire.server.replies import EventStream, named_event, reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared.bodies import read_json
from quire.server.shared.compat import SAMPLING, Absent, Endpoint, Fields
from quire.server.shared.fitting import HEADER

PATH = "/v1/responses"
log = logging.getLogger("quire.server")


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    responses = _Responses(server)
    server.closing.append(responses.stored.close)
    for path in (PATH, "/responses"):
        app.add_api_route(path, responses.create, methods=["POST"], response_model=None)
    app.add_api_route(f"{PATH}/input_tokens", responses.count, methods=["POST"], response_model=None)
    app.add_api_route(f"{PATH}/compact", _compact, methods=["POST"], response_model=None)
    one = PATH + "/{response}"
    app.add_api_route(one, responses.retrieve, methods=["GET"], response_model=None)
    app.add_api_route(one, responses.delete, methods=["DELETE"], response_model=None)
    app.add_api_route(f"{one}/cancel", responses.cancel, methods=["POST"], response_model=None)
    app.add_api_route(f"{one}/input_items", responses.input_items, methods=["GET"], response_model=None)


async def _compact(request: Request) -> Response:
    raise Unimplemented("/v1/responses/compact is not here: nothing shortens a conversation")


class _Responses:
    """The routes, over one store."""

    def __init__(self, server: Server):
        self.server = server
        self.stored = _open(server)
        self._runs: Runs | None = None

    @property
    def runs(self) -> Runs:
        if self._runs is None:  # made in the loop that uses it
            self._runs = Runs(self.server)
        return self._runs

    async def create(self, request: Request) -> Response:
        arrived = time.monotonic()
        asked = parse(await read_json(request))
        served = await self.server.resolve(request, asked.model)
        served.generates()
        check(asked, served.reading)
        if asked.background:
            self.runs.check_room()
        ready = await prepare(served, self.stored, asked)
        generation = await generated(served, asked, ready)
        notes = _told(ready, request)
        answer = Answer(
            _head(served, asked, ready, generation.sampling.temperature, generation.sampling.top_p) | notes,
            len(ready.prompt),
            summarized=asked.summary is not None,
            logprobs=asked.includes(LOGPROBS),
            sealed=asked.includes(SEALED),
            told=bool(asked.receipts),
            spaces=ready.tools.spaces,
        )

        async def keep() -> None:
            if asked.stored:
                record = Record(
                    answer.id, answer.state, asked.previous_response_id, ready.input, answer.output, served.caller.owner
                )
                await self.stored.put(record)

        if asked.background:
            served.completer.check(generation)  # what would be an error status must still be one
            await keep()
            run = self.runs.start(served, answer, generation, arrived, keep)
            return Listening(run) if asked.stream else reply(answer.body())
        feed = Feed(served, [generation], request.receive, arrived)
        if asked.stream:
            return _Events(feed, answer, keep, _headers(ready))
        async with feed:
            _spend(answer.opening())
            async for items in feed.batches():
                _spend(answer.news(items))
            _spend(answer.closing())
        await keep()
        return reply(answer.body(), headers=_headers(ready))

    async def count(self, request: Request) -> Response:
        asked = parse_count(await read_json(request))
        served = await self.server.resolve(request, asked.model)
        served.generates()
        ready = await prepare(served, self.stored, asked)
        return reply({"object": "response.input_tokens", "input_tokens": len(ready.prompt)} | _told(ready, request))

    async def retrieve(self, request: Request) -> Response:
        response, query, owner = request.path_params["response"], request.query_params, caller_of(request.scope).owner
        if query.get("stream") in ("true", "1", "True"):
            return await self._listen(response, owner, query.get("starting_after"))
        if query.get("starting_after") is not None:
            raise BadRequest("starting_after needs stream to be true", param="starting_after")
        run = self.runs.running(response, owner)
        if run is not None and run.ending:  # who hears of the end finds it stored
            await self.runs.settled(run)
            run = None
        return reply(run.answer.body() if run else (await self._found(response, owner)).whole)

    async def _listen(self, response: str, owner: str, after: str | None) -> Response:
        if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
            raise BadRequest("starting_after must be the number of an event", param="starting_after")
        run = self.runs.get(response, owner)
        if run is None:
            record = await self._found(response, owner)
            why = "its events are no longer kept" if record.body["background"] else "it did not run in the background"
            raise BadRequest(f"the response cannot be streamed: {why}", cure="get it without stream", param="stream")
        return Listening(run, 0 if after is None else int(after) + 1)

    async def delete(self, request: Request) -> Response:
        response, owner = request.path_params["response"], caller_of(request.scope).owner
        if run := self.runs.running(response, owner):
            await self.runs.cancel(run)
        self.runs.forget(response, owner)
        if not await self.stored.remove(response, owner):
            raise _missing(response)
        return reply({"id": response, "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        response, owner = request.path_params["response"], caller_of(request.scope).owner
        if run := self.runs.running(response, owner):
            await self.runs.cancel(run)
        record = await self._found(response, owner)
        if not record.body["background"]:
            raise BadRequest(
                "only a response that runs in the background can be cancelled",
                cure="close the connection of one that does not",
                code="response_not_cancellable",
            )
        return reply(record.whole)

    async def input_items(self, request: Request) -> Response:
        asked, owner = window(request), caller_of(request.scope).owner
        record = await self._found(request.path_params["response"], owner)
        before = [] if record.previous is None else await self.stored.context(record.previous, owner)
        return reply(cut([*before, *record.input], asked))

    async def _found(self, response: str, owner: str) -> Record:
        record = await self.stored.get(response, owner)
        if record is None:
            raise _missing(response)
        return record


class _Events(EventStream):
    """A stream whose events have names, whose end is stored before it is told, and whose failure is an event too."""

    frame = staticmethod(named_event)
    done = b""

    def __init__(self, feed: Feed, answer: Answer, keep: Any, headers: dict[str, str] | None):
        super().__init__(feed, answer, headers)
        self.answer = answer
        self.keep = keep

    def silence(self) -> bytes:
        return named_event(self.answer.waiting())

    async def settle(self) -> None:
        await self.keep()

    def trouble(self, path: str, error: QuireError) -> bytes:
        return b"".join(map(named_event, self.answer.failing(error)))


def _open(server: Server) -> StoredResponses:
    """The store: in the state folder if it can be used, else in memory."""
    path = server.state.path("responses.db")
    try:
        return StoredResponses(Database(path, SCHEMA, later=LATER))
    except (sqlite3.Error, QuireError) as error:
        log.warning("stored responses are in memory: %s", error)
        return StoredResponses(Database(None, SCHEMA))


def _head(served: Served, asked: ResponseRequest, ready: Prepared, temperature: float, top_p: float) -> dict[str, Any]:
    """The response object before anything has happened, without its output. OpenAI's schema wants some fields as null and does not
    take null in others: those (`user`, `usage`) are there once they have a value."""
    text = asked.text.format if asked.text and asked.text.format else None
    shape: dict[str, Any] = {"type": text.type if text else "text"}
    if text is not None and text.type == "json_schema":
        shape |= {"name": text.name, "schema": schema_of(text), "strict": True}  # a schema is always enforced
        shape |= {} if text.description is None else {"description": text.description}
    effort = asked.reasoning.effort if asked.reasoning and "reasoning.effort" not in ready.no_effect else None
    summary = None if "reasoning.summary" in ready.no_effect else asked.summary
    return {
        "id": f"resp_{secrets.token_hex(24)}",
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "queued" if asked.background else "in_progress",
        "background": bool(asked.background),
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "model": served.name,
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "prompt_cache_retention": asked.prompt_cache_retention,
        "reasoning": {"effort": effort, "summary": summary},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.stored,
        "temperature": temperature,
        "text": {"format": shape, "verbosity": "medium"},
        "tool_choice": "auto" if bytes(asked.tool_choice) in (b"", b"null") else msgspec.json.decode(asked.tool_choice),
        "tools": ready.tools.told,
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": top_p,
        "truncation": asked.truncation or "disabled",
        **({} if asked.user is None else {"user": asked.user}),
    }


def _told(ready: Prepared, request: Request) -> dict[str, Any]:
    """What the request asked for and got nothing of, and what became of its conversation, for the answer; no word of it where there is
    nothing. A response is kept with its notes."""
    notes = [f"{name}: {why}; no effect" for name, why in ready.no_effect.items()] + ignored.take(request.scope)
    told = ready.said.told()
    told |= {"notes": [*notes, *ready.said.notes]} if notes else {}
    return {"quire": told} if told else {}


def _headers(ready: Prepared) -> dict[str, str] | None:
    return None if ready.said.dropped is None else {HEADER: ready.said.dropped.header}


def _spend(events: Any) -> None:
    """Read events to their end, which makes the answer whole, where nobody reads them."""
    for _ in events:
        pass


def _missing(response: str) -> NotFound:
    return NotFound(f"there is no response {response[:80]!r}", param="response_id", code="response_not_found")


_NOTES = SAMPLING | {
    "input": "a string or items: messages of text, calls, their results, reasoning, references",
    "instructions": "of this request alone",
    "previous_response_id": "a stored response that is over",
    "text": "`format` is enforced: `text`, `json_object` or `json_schema`; `verbosity` has no effect, and the answer says so",
    "tools": "functions and namespaces of them, up to 1024 in all, described in the prompt where the template has no place for them; web search is left out, and the answer says so",
    "tool_choice": "`none`, `auto`, `required`, a function or `allowed_tools`; a demanded call is enforced; a web search cannot be demanded",
    "parallel_tool_calls": "false: at most one call, enforced",
    "reasoning": "`effort` as the template can be told it, `summary` auto or detailed; where the model has no place for them the answer says so",
    "truncation": "`auto` leaves out the oldest items of a conversation that does not fit, and tells; `disabled` refuses it",
    "chat_template_kwargs": "variables for the template; not those that the server itself sets",
    "include": "`message.output_text.logprobs`, `reasoning.encrypted_content`; others ask for parts of tools that are not here",
    "top_logprobs": "0 to 20; needs `include`",
    "max_output_tokens": "never more than the context leaves: more is refused",
    "max_tool_calls": "told back; it bounds tools that run on OpenAI's side",
    "store": "true by default: see responses.md",
    "background": "needs `store`",
    "metadata": "kept and told back",
    "user": "told back",
    "safety_identifier": "told back",
    "prompt_cache_key": "told back",
    "prompt_cache_retention": "told back",
    "service_tier": "there is one: the answer says that another had no effect",
    "stream_options": "`include_obfuscation` only false",
}
_PROMPT = "model input instructions previous_response_id tools tool_choice parallel_tool_calls reasoning text truncation conversation"
COMPAT = (
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=PATH,
        what="Also `/responses`. With vLLM's sampling fields. See responses.md, also for `/v1/responses/{response}`, `/v1/responses/{response}/cancel` and "
        "`/v1/responses/{response}/input_items`.",
        fields=(Fields(shape=ResponseRequest, ignored=IGNORED, neutral=NEUTRAL, refused=ELSEWHERE, notes=_NOTES),),
        example={"input": "hi"},
        surface=f"{_PROMPT} background context_management include max_output_tokens max_tool_calls metadata prompt prompt_cache_key "
        "prompt_cache_options prompt_cache_retention safety_identifier service_tier store stream stream_options temperature "
        "top_logprobs top_p user moderation image access_programs client_metadata",
    ),
    Endpoint(
        dialect="OpenAI",
        method="POST",
        path=f"{PATH}/input_tokens",
        what="Renders and counts the same prompt, and runs nothing.",
        fields=(Fields(shape=CountRequest, ignored=IGNORED, neutral=NEUTRAL, notes=_NOTES),),
        example={"input": "hi"},
        surface=f"{_PROMPT} personality",
    ),
)
ABSENT = (Absent("OpenAI", f"{PATH}/compact", "nothing shortens a conversation", 501),)
