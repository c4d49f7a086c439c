"""/v1/responses, in OpenAI's shape: create, stream, run in the background, look at, cancel, delete, list input, count.

Owns the routes and what an answer repeats of its request. Requests are `request.py`, items `items.py`, the
answer and its events `answer.py`, background runs `runs.py`; stored responses are `stored.py`.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from quire.chat.types import Generation
from quire.observe.errors import BadRequest, NotFound, QuireError
from quire.server.callers import caller_of
from quire.server.database import Database
from quire.server.feed import Feed
from quire.server.openai.pages import cut, window
from quire.server.openai.responses.answer import Answer
from quire.server.openai.responses.compat import PATH
from quire.server.openai.responses.fields import (
    LOGPROBS,
    SEALED,
    check,
    parse,
    parse_compact,
    parse_count,
)
from quire.server.openai.responses.head import head, headers, told
from quire.server.openai.responses.request import Prepared, generated, prepare
from quire.server.openai.responses.runs import Listening, Runs
from quire.server.openai.responses.search import Searches, is_done_here
from quire.server.openai.responses.stored import LATER, SCHEMA, Record, StoredResponses
from quire.server.replies import EventStream, named_event, reply
from quire.server.served import Served
from quire.server.server import Server
from quire.server.shared.bodies import read_json

log = logging.getLogger("quire.server")


def register(app: FastAPI, server: Server) -> None:
    """Add the routes."""
    responses = _Responses(server)
    server.closing.append(responses.stored.close)
    for path in (PATH, "/responses"):
        app.add_api_route(path, responses.create, methods=["POST"], response_model=None)
    app.add_api_route(f"{PATH}/input_tokens", responses.count, methods=["POST"], response_model=None)
    app.add_api_route(f"{PATH}/compact", responses.compact, methods=["POST"], response_model=None)
    one = PATH + "/{response}"
    app.add_api_route(one, responses.retrieve, methods=["GET"], response_model=None)
    app.add_api_route(one, responses.delete, methods=["DELETE"], response_model=None)
    app.add_api_route(f"{one}/cancel", responses.cancel, methods=["POST"], response_model=None)
    app.add_api_route(f"{one}/input_items", responses.input_items, methods=["GET"], response_model=None)


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
        generation = await generated(served, ready)
        searches = Searches(served, ready) if is_done_here(ready) else None
        answer = _answer(served, ready, generation, searches, request)
        stream = None if searches is None else searches.stream

        async def keep() -> None:
            if asked.stored:
                record = Record(
                    answer.id, answer.state, asked.previous_response_id, ready.input, answer.output, served.caller.owner
                )
                await self.stored.put(record)

        if asked.background:
            served.completer.check(generation)  # what would be an error status must still be one
            await keep()
            run = self.runs.start(served, answer, generation, arrived, keep, stream)
            return Listening(run) if asked.stream else reply(answer.body())
        feed = Feed(served, [generation], request.receive, arrived, stream)
        if asked.stream:
            return _Events(feed, answer, keep, headers(ready))
        async with feed:
            _spend(answer.opening())
            async for items in feed.batches():
                _spend(answer.news(items))
            _spend(answer.closing())
        await keep()
        return reply(answer.body(), headers=headers(ready))

    async def count(self, request: Request) -> Response:
        asked = parse_count(await read_json(request))
        served = await self.server.resolve(request, asked.model)
        served.generates()
        ready = await prepare(served, self.stored, asked)
        return reply(
            {"object": "response.input_tokens", "input_tokens": len(ready.prompt)} | told(ready, request.scope)
        )

    async def compact(self, request: Request) -> Response:
        """Summarize a conversation, and answer with what goes in its place."""
        arrived = time.monotonic()
        asked = parse_compact(await read_json(request))
        served = await self.server.resolve(request, asked.model)
        served.generates()
        check(asked, served.reading)
        ready = await prepare(served, self.stored, asked, compacts=True)
        generation = await generated(served, ready)
        answer = _answer(served, ready, generation, None, request)
        async with Feed(served, [generation], request.receive, arrived) as feed:
            _spend(answer.opening())
            async for items in feed.batches():
                _spend(answer.news(items))
            _spend(answer.closing())
        body = answer.body()
        kept = [item for item in ready.items if item["type"] == "message" and item["role"] == "user"]
        notes = {"quire": body["quire"]} if "quire" in body else {}
        return reply(
            {
                "id": body["id"],
                "object": "response.compaction",
                "created_at": body["created_at"],
                "output": [*kept, *body["output"]],
                "usage": body["usage"],
                **notes,
            },
            headers=headers(ready),
        )

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
        items = [
            one for one in (*before, *record.input) if one["type"] != "compaction_trigger"
        ]  # which OpenAI does not list
        return reply(cut(items, asked))

    async def _found(self, response: str, owner: str) -> Record:
        record = await self.stored.get(response, owner)
        if record is None:
            raise _missing(response)
        return record


class _Events(EventStream):
    """A stream whose events have names, whose end is stored before it is told, and whose failure is an event too."""

    frame = staticmethod(named_event)
    done = b""

    def __init__(self, feed: Feed, answer: Answer, keep: Any, more: dict[str, str] | None):
        super().__init__(feed, answer, more)
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


def _answer(
    served: Served, ready: Prepared, generation: Generation, searches: Searches | None, request: Request
) -> Answer:
    asked = ready.asked
    return Answer(
        head(served, ready, generation.sampling.temperature, generation.sampling.top_p) | told(ready, request.scope),
        len(ready.prompt),
        summarized=asked.summary is not None,
        logprobs=asked.includes(LOGPROBS),
        sealed=asked.includes(SEALED),
        told=bool(asked.receipts),
        known=ready.tools.known,
        compacts=ready.compacts,
        searches=searches,
    )


def _spend(events: Any) -> None:
    """Read events to their end, which makes the answer whole, where nobody reads them."""
    for _ in events:
        pass


def _missing(response: str) -> NotFound:
    return NotFound(f"there is no response {response[:80]!r}", param="response_id", code="response_not_found")
