"""The batch queue on disk: batches, their lines, and what came of each. Every step is one durable transaction.

    validating -> in_progress -> finalizing -> completed | expired | cancelled
        |             \\-> cancelling ------^
        \\-> failed

A line's result is written once: only while the line waits, together with the batch's counts. So a line that was computed
when the process died is computed again, and still is in the output once. `finalizing` knows the ids of the files it makes,
so doing it twice makes the same files. Knows no HTTP and no event loop but the database's.
"""

from __future__ import annotations

import math
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.observe.errors import BadRequest, NotFound
from quire.server.database import Database
from quire.server.openai.batches.files import File, find, insert, missing, new_id

SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, created INTEGER NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    window TEXT NOT NULL, expires INTEGER NOT NULL, metadata BLOB, keep_seconds INTEGER, model TEXT NOT NULL,
    status TEXT NOT NULL, outcome TEXT, errors BLOB, output_file TEXT, error_file TEXT, usage BLOB,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER, expired_at INTEGER,
    cancelling_at INTEGER, cancelled_at INTEGER, owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS batches_status ON batches (status);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, n INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, result BLOB,
    PRIMARY KEY (batch, n)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS lines_waiting ON lines (batch, n) WHERE state = 0;
"""
LATER = (("batches", "owner TEXT NOT NULL DEFAULT ''"),)
WAITING, COMPLETED, FAILED = 0, 1, 2  # of a line
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
MAX_ACTIVE = 1000  # batches that are not over yet
TOGETHER = 8 << 20  # bytes of results that are read together


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch, and where it is in the input file."""

    batch: str
    n: int  # from 0
    custom_id: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as the queue sees it. `row` has every column."""

    id: str
    endpoint: str
    input_file: str
    status: str
    expires: int
    row: dict[str, Any]

    @property
    def owner(self) -> str:
        return self.row["owner"]

    def body(self) -> dict[str, Any]:
        """The batch object. Files are told when they are whole; what has not happened is left out, as OpenAI's schema has it."""
        row, over = self.row, self.status not in ACTIVE
        told = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": row["model"],
            "errors": None if row["errors"] is None else {"object": "list", "data": msgspec.json.decode(row["errors"])},
            "input_file_id": self.input_file,
            "completion_window": row["window"],
            "status": self.status,
            "output_file_id": row["output_file"] if over else None,
            "error_file_id": row["error_file"] if over else None,
            "created_at": row["created"],
            "expires_at": self.expires,
            **{f"{name}_at": row[f"{name}_at"] for name in TIMES},
            "request_counts": {name: row[name] for name in ("total", "completed", "failed")},
            "usage": None if row["usage"] is None else msgspec.json.decode(row["usage"]),
        }
        metadata = None if row["metadata"] is None else msgspec.json.decode(row["metadata"])
        return {name: value for name, value in told.items() if value is not None} | {"metadata": metadata}


class Journal:
    """The tables, over a database with files' SCHEMA and this one's."""

    def __init__(self, database: Database):
        self._run = database.run

    async def create(
        self,
        *,
        endpoint: str,
        input_file: str,
        window: str,
        seconds: int,
        model: str,
        metadata: dict[str, str] | None,
        keep_seconds: int | None,
        owner: str = "",
    ) -> Batch:
        """A new batch over a file of its owner's that is there."""

        def work(link: sqlite3.Connection) -> Batch:
            file = find(link, input_file, owner)
            if file is None:
                raise missing(input_file)
            if file.purpose != "batch":
                raise BadRequest(f"the file's purpose is {file.purpose}: it must be batch", param="input_file_id")
            (active,) = link.execute(f"SELECT COUNT(*) FROM batches WHERE status IN {ACTIVE}").fetchone()
            if active >= MAX_ACTIVE:
                raise BadRequest(f"{active} batches are not over yet: that is the most", code="too_many_batches")
            now = time.time()
            batch = f"batch_{secrets.token_hex(16)}"
            link.execute(
                "INSERT INTO batches (id, created, endpoint, input_file, window, expires, metadata, keep_seconds, model,"
                " owner, status) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'validating')",
                (
                    batch,
                    int(now),
                    endpoint,
                    input_file,
                    window,
                    math.ceil(now) + seconds,  # never less than was asked for
                    _json(metadata),
                    keep_seconds,
                    model,
                    owner,
                ),
            )
            return _read(link, batch)

        return await self._run(work)

    async def get(self, batch: str, owner: str | None = None) -> Batch:
        """One batch, of that owner's if one is named, or NotFound."""
        return await self._run(lambda link: _read(link, batch, owner))

    async def listed(self, limit: int, after: str | None, owner: str = "") -> tuple[list[Batch], bool] | None:
        """A page, newest first, and whether there is more; None when `after` is not there."""

        def work(link: sqlite3.Connection) -> tuple[list[Batch], bool] | None:
            before = 1 << 62
            if after is not None:
                at = link.execute("SELECT rowid FROM batches WHERE id = ? AND owner = ?", (after, owner)).fetchone()
                if at is None:
                    return None
                before = at[0]
            query = "SELECT * FROM batches WHERE rowid < ? AND owner = ? ORDER BY rowid DESC LIMIT ?"
            found = [_batch(row) for row in link.execute(query, (before, owner, limit + 1))]
            return found[:limit], len(found) > limit

        return await self._run(work)

    async def active(self) -> list[Batch]:
        """Batches that are not over, oldest first."""
        query = f"SELECT * FROM batches WHERE status IN {ACTIVE} ORDER BY rowid"
        return await self._run(lambda link: [_batch(row) for row in link.execute(query)])

    async def used_files(self) -> set[str]:
        """Files that a batch still needs."""
        query = f"SELECT input_file FROM batches WHERE status IN {ACTIVE}"
        return await self._run(lambda link: {row["input_file"] for row in link.execute(query)})

    # What becomes of a batch

    async def clear(self, batch: str) -> None:
        """Delete the lines of a batch before its file is read (again)."""
        await self._run(lambda link: link.execute("DELETE FROM lines WHERE batch = ?", (batch,)))

    async def add(self, lines: Sequence[Line]) -> None:
        """Record lines of a batch that is validating."""
        rows = [(line.batch, line.n, line.custom_id, line.start, line.length) for line in lines]
        insertion = "INSERT INTO lines (batch, n, custom_id, start, length) VALUES (?, ?, ?, ?, ?)"
        await self._run(lambda link: link.executemany(insertion, rows))

    async def begin(self, batch: str, total: int, model: str | None = None) -> bool:
        """Let a batch run, whose lines are all recorded, by that model if it is known. False if it was cancelled meanwhile."""
        known = {} if model is None else {"model": model}
        return await self._run(lambda link: _move(link, batch, "validating", "in_progress", total=total, **known))

    async def refuse(self, batch: str, faults: list[dict[str, Any]]) -> None:
        """End a batch whose input file is not valid, with what is wrong."""

        def work(link: sqlite3.Connection) -> None:
            link.execute("DELETE FROM lines WHERE batch = ?", (batch,))
            _move(link, batch, "validating", "failed", errors=_json(faults))

        await self._run(work)

    async def cancel(self, batch: str, owner: str | None = None) -> Batch:
        """Ask a batch to stop. Answers that are there already stay."""

        def work(link: sqlite3.Connection) -> Batch:
            found = _read(link, batch, owner)
            if found.status == "cancelling":
                return found
            if found.status not in ("validating", "in_progress"):
                raise BadRequest(f"the batch is {found.status}: it cannot be cancelled", code="batch_not_cancellable")
            _move(link, batch, found.status, "cancelling")
            return _read(link, batch)

        return await self._run(work)

    async def waiting(self, limit: int, but: set[tuple[str, int]], names: Sequence[str]) -> list[Line]:
        """Lines to run next of the model that has these names, the oldest batch's first; those in `but` are running."""
        query = (
            "SELECT l.* FROM batches AS b JOIN lines AS l ON l.batch = b.id"
            f" WHERE b.status = 'in_progress' AND b.model IN ({', '.join('?' * len(names))}) AND l.state = 0"
            " ORDER BY b.rowid, l.n LIMIT ?"
        )

        def work(link: sqlite3.Connection) -> list[Line]:
            rows = [_line(row) for row in link.execute(query, (*names, limit + len(but)))]
            return [line for line in rows if (line.batch, line.n) not in but][:limit]

        return await self._run(work)

    async def record(self, line: Line, state: int, result: bytes) -> bool:
        """Record the result of a line, and count it. False when it has one already, or is not wanted any more."""

        def work(link: sqlite3.Connection) -> bool:
            update = "UPDATE lines SET state = ?, result = ? WHERE batch = ? AND n = ? AND state = 0"
            if link.execute(update, (state, result, line.batch, line.n)).rowcount == 0:
                return False
            column = "completed" if state == COMPLETED else "failed"
            link.execute(f"UPDATE batches SET {column} = {column} + 1 WHERE id = ?", (line.batch,))
            return True

        return await self._run(work)

    async def finalize(self, batch: Batch, outcome: str) -> Batch:
        """End the running of a batch: no more lines run. The files that will be made get their ids now, for good."""

        def work(link: sqlite3.Connection) -> Batch:
            if batch.status != "finalizing":
                _move(
                    link,
                    batch.id,
                    batch.status,
                    "finalizing",
                    outcome=outcome,
                    output_file=new_id(),
                    error_file=new_id(),
                )
            return _read(link, batch.id)

        return await self._run(work)

    async def results(self, batch: str, state: int, after: int) -> list[tuple[Line, bytes]]:
        """The results of some lines, in their order; none of waiting ones. Not more at a time than memory should hold."""
        query = "SELECT * FROM lines WHERE batch = ? AND state = ? AND n > ? ORDER BY n LIMIT 1000"

        def work(link: sqlite3.Connection) -> list[tuple[Line, bytes]]:
            found: list[tuple[Line, bytes]] = []
            size = 0
            for row in link.execute(query, (batch, state, after)):
                found.append((_line(row), row["result"] or b""))
                size += len(found[-1][1])
                if size > TOGETHER:
                    break
            return found

        return await self._run(work)

    async def close(self, batch: Batch, files: dict[str, File | None], usage: dict[str, Any] | None) -> None:
        """The files are on disk: list them, and end the batch. `files` by column; a column without one has no file."""

        def work(link: sqlite3.Connection) -> None:
            for file in files.values():
                if file is not None:
                    insert(link, file)
            named = {column: None if file is None else file.id for column, file in files.items()}
            (left,) = link.execute("SELECT COUNT(*) FROM lines WHERE batch = ? AND state = 0", (batch.id,)).fetchone()
            failed = batch.row["failed"] + left  # the lines that never ran
            _move(link, batch.id, "finalizing", batch.row["outcome"], **named, usage=_json(usage), failed=failed)
            link.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))

        await self._run(work)


def _move(link: sqlite3.Connection, batch: str, old: str, new: str, **more: Any) -> bool:
    """A batch's next status, with its time; False where it is not in the old one any more."""
    values = {"status": new, f"{new}_at": int(time.time()), **more}
    names = ", ".join(f"{name} = ?" for name in values)
    query = f"UPDATE batches SET {names} WHERE id = ? AND status = ?"
    return link.execute(query, (*values.values(), batch, old)).rowcount > 0


def _read(link: sqlite3.Connection, batch: str, owner: str | None = None) -> Batch:
    row = link.execute("SELECT * FROM batches WHERE id = ?", (batch,)).fetchone()
    if row is None or owner not in (None, row["owner"]):
        raise NotFound(f"there is no batch {batch[:80]!r}", param="id", code="batch_not_found")
    return _batch(row)


def _batch(row: sqlite3.Row) -> Batch:
    values = dict(row)
    return Batch(row["id"], row["endpoint"], row["input_file"], row["status"], row["expires"], values)


def _line(row: sqlite3.Row) -> Line:
    return Line(row["batch"], row["n"], row["custom_id"], row["start"], row["length"])


def _json(value: object) -> bytes | None:
    return None if value is None else msgspec.json.encode(value)
