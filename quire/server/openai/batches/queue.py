"""The worker of the batch queue: it validates batches, runs their lines at a lower priority than other requests, and writes their files.

One task for all batches; each line is a task of its own, a bounded number at a time, and goes through the same routes as a
request over HTTP. Everything it knows is in the journal, so it may die at any point and be started again: `_advance` looks at
what is there and does what is next. A server that is busy or restarting its engine is no line's fault: the line waits.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from quire.observe.errors import BadRequest, QuireError
from quire.server import errors
from quire.server.callers import BATCH, Caller
from quire.server.openai.batches import lines
from quire.server.openai.batches.call import Call
from quire.server.openai.batches.files import File, Files
from quire.server.openai.batches.journal import COMPLETED, FAILED, WAITING, Batch, Journal, Line
from quire.server.served import Model
from quire.server.server import Server
from quire.server.shared import bodies

log = logging.getLogger("quire.batches")

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
CHUNK = 500  # lines that go to the journal together
DEATHS = 3  # engines that may die under a line before it is given up
TROUBLE = 5.0  # seconds before what failed on this side is tried again
PATIENCE = (0.05, 5.0)  # seconds between tries while the server is busy, from and to
NEVER_RAN = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request was executed."),
}


class Queue:
    """The one worker."""

    def __init__(self, server: Server, journal: Journal, files: Files, call: Call):
        self._server = server
        self._journal = journal
        self._files = files
        self._call = call
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._models: dict[tuple[str, int], Model] = {}  # whose room each of them takes

    def start(self) -> None:
        """Start the queue, or wake it when there is something to do."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        self._news.set()

    async def stop(self) -> None:
        """Cancel all that runs; the journal has what is done."""
        tasks = [*self._running.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._task = None

    async def _work(self) -> None:
        swept = False
        while True:
            self._news.clear()
            try:
                if not swept:
                    await self._files.sweep()
                    swept = True
                soonest = await self._advance()
            except Exception as error:  # whatever it is, batches wait for it and are not forgotten
                known = isinstance(error, (QuireError, sqlite3.Error, OSError))
                log.error("batches: the queue cannot go on for now: %s", error, exc_info=None if known else error)
                soonest = time.time() + TROUBLE
            wait = None if soonest is None else max(0.0, soonest - time.time())
            try:
                async with asyncio.timeout(wait):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _advance(self) -> float | None:
        """Do what can be done now. Gives the time at which something becomes due by itself."""
        soonest: float | None = None
        active = await self._journal.active()
        for batch in active:
            status = batch.status
            if status in ("validating", "in_progress") and batch.expires <= time.time():
                await self._finish(batch, "expired")
            elif status == "cancelling":
                await self._finish(batch, "cancelled")
            elif status == "finalizing":
                await self._finish(batch, batch.row["outcome"])
            elif status == "validating":
                await self._validate(batch)
                self._news.set()
            else:
                soonest = min(soonest or batch.expires, batch.expires)
                if batch.row["completed"] + batch.row["failed"] >= batch.row["total"]:
                    await self._finish(batch, "completed")
        if any(batch.status == "in_progress" for batch in active):
            await self._begin_lines()
        await self._files.expire({batch.input_file for batch in active})
        return soonest

    # Files in

    async def _validate(self, batch: Batch) -> None:
        await self._journal.clear(batch.id)
        path = self._files.path(batch.input_file)
        found = lines.scan(path, batch.id, batch.endpoint, self._server.config.max_body)
        faults: list[lines.Fault] = []
        total = 0
        model: str | None = None
        while True:
            try:
                chunk = await asyncio.to_thread(_take, found)
            except FileNotFoundError:
                faults.append(lines.fault(None, "missing_file", "the input file is gone"))
                break
            if not chunk:
                break
            good = [one for one in chunk if isinstance(one, Line)]
            faults += [one for one in chunk if not isinstance(one, Line)]
            if not faults:
                if total == 0:
                    model = self._asked(await asyncio.to_thread(lines.read, path, good[0]))
                await self._journal.add(good)
                total += len(good)
        if faults:
            await self._journal.refuse(batch.id, faults)
        elif not await self._journal.begin(batch.id, total, model):  # cancelled meanwhile: nothing of it has run
            await self._journal.clear(batch.id)

    # Lines

    def _asked(self, body: bytes) -> str | None:
        """The model that a line's request names, by the name that answers have; None where it names none of ours."""
        try:
            name = msgspec.json.decode(body, type=_Asked).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        found = None if name is None else self._server.models.find(name)
        return None if found is None else found[0].name

    def _room(self, model: Model) -> int:
        most = self._server.config.batch_lines or max(1, model.info.max_seqs // 4)
        return most - sum(other is model for other in self._models.values())

    async def _begin_lines(self) -> None:
        """Lines of each model that is loaded, as many as it has room for: a slow one keeps no other waiting."""
        for model in self._server.models:
            if model.stage in ("loading", "draining") or (room := self._room(model)) <= 0:
                continue
            for line in await self._journal.waiting(room, set(self._running), model.names):
                key = line.batch, line.n
                self._running[key], self._models[key] = asyncio.create_task(self._run(line)), model
                self._running[key].add_done_callback(lambda _, key=key: self._ended(key))

    def _ended(self, key: tuple[str, int]) -> None:
        del self._running[key], self._models[key]
        self._news.set()

    async def _run(self, line: Line) -> None:
        state, result = FAILED, b""
        try:
            batch = await self._journal.get(line.batch)
            body = await asyncio.to_thread(lines.read, self._files.path(batch.input_file), line)
            status, answer = await self._answer(batch.endpoint, body, Caller(batch.owner, behind=BATCH))
            state = COMPLETED if status == 200 else FAILED
            result = lines.answered(line, status, answer)
        except Exception as error:
            log.error("batches: line %d of %s: %s", line.n, line.batch, type(error).__name__, exc_info=error)
            result = lines.not_run(line, "server_error", "the server failed on this request; its log has the cause")
        try:
            await self._journal.record(line, state, result)
        except sqlite3.Error as error:
            log.error("batches: a result cannot be written, so its line will run again: %s", error)
            await asyncio.sleep(TROUBLE)

    async def _answer(self, endpoint: str, body: bytes, caller: Caller) -> tuple[int, bytes]:
        """Answer one request. It is tried again for as long as the server cannot take it, and a few times when its engine dies."""
        deaths = 0
        pause, longest = PATIENCE
        while True:
            try:
                _check(body)
                status, answer = await self._call(endpoint, body, caller)
            except QuireError as error:
                return error.status, msgspec.json.encode(errors.body(error))
            if status not in (429, 503):
                return status, answer
            deaths += _code(answer) == "engine_dead"
            if deaths >= DEATHS:
                return status, answer
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    # Files out

    async def _finish(self, batch: Batch, outcome: str) -> None:
        """End a batch. Lines that still run are let go first; those that never ran are told of in the error file."""
        tasks = [task for (name, _), task in self._running.items() if name == batch.id]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        batch = await self._journal.finalize(batch, outcome)
        if batch.status != "finalizing":  # somebody cancelled it just now
            self._news.set()
            return
        usage = _Usage()
        output = await self._write(batch, "output_file", "output", (COMPLETED,), usage)
        faults = await self._write(batch, "error_file", "error", (FAILED, WAITING), usage)
        await self._journal.close(batch, {"output_file": output, "error_file": faults}, usage.body())
        log.info("batch %s is %s", batch.id, outcome)

    async def _write(self, batch: Batch, column: str, name: str, states: tuple[int, ...], usage: _Usage) -> File | None:
        file = batch.row[column]
        out = await asyncio.to_thread(lines.Writing, self._files.path(file))
        for state in states:
            after = -1
            while rows := await self._journal.results(batch.id, state, after):
                after = rows[-1][0].n
                why = NEVER_RAN.get(batch.row["outcome"], ("batch_failed", "This request was not executed."))
                texts = [result or lines.not_run(line, *why) for line, result in rows]
                await asyncio.to_thread(out.write, texts)
                if state == COMPLETED:
                    usage.add(texts)
        await asyncio.to_thread(out.end)
        if out.size == 0:
            return None
        now = int(time.time())
        keep = batch.row["keep_seconds"]
        until = None if keep is None else now + keep
        return File(file, f"{batch.id}_{name}.jsonl", "batch_output", out.size, now, until, batch.owner)


def _take(found: Iterator[Line | lines.Fault]) -> list[Line | lines.Fault]:
    chunk: list[Line | lines.Fault] = []
    for one in found:
        chunk.append(one)
        if len(chunk) >= CHUNK:
            break
    return chunk


def _check(body: bytes) -> None:
    """Refuse what makes no sense where nobody waits."""
    asked = bodies.top_level(body)
    for name in ("stream", "background"):
        if bytes(asked.get(name, msgspec.Raw(b"null"))).strip() not in (b"null", b"false"):
            raise BadRequest(f"{name} cannot be used in a batch", param=name)


def _code(answer: bytes) -> str | None:
    try:
        return msgspec.json.decode(answer)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None


class _Asked(msgspec.Struct):
    """The field of a request that names its model."""

    model: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Tokens(msgspec.Struct):
    """The token counts of an answer's usage, in either of OpenAI's spellings."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Tokens | None = None


class _Response(msgspec.Struct):
    body: _Answer


class _Written(msgspec.Struct):
    response: _Response


class _Usage:
    """The token counts of a batch: the sum of its answers."""

    _decoder = msgspec.json.Decoder(_Written)

    def __init__(self) -> None:
        self.input = self.output = self.cached = self.reasoning = 0

    def add(self, written: list[bytes]) -> None:
        for text in written:
            try:
                tokens = self._decoder.decode(text).response.body.usage or _Tokens()
            except msgspec.DecodeError:
                continue  # an answer that counts otherwise
            self.input += tokens.prompt_tokens + tokens.input_tokens
            self.output += tokens.completion_tokens + tokens.output_tokens
            for details in (tokens.prompt_tokens_details, tokens.input_tokens_details):
                self.cached += details.cached_tokens if details else 0
            for details in (tokens.completion_tokens_details, tokens.output_tokens_details):
                self.reasoning += details.reasoning_tokens if details else 0

    def body(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }
