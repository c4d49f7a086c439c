"""Stored responses: by their ids, in a bounded place, with the items they were made from and those they made.

    responses   one row each: the object without its output, what it followed
    items       its input and output items, in order; any of them can be found by its id

Bounds are a count, bytes and age; what was used longest ago gives way first, and a use of a response is a use of all that
it followed, so that no conversation loses its beginning before its end. Bodies are JSON that nobody reads here.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.observe.errors import NotFound
from quire.server.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, previous TEXT, status TEXT NOT NULL, used REAL NOT NULL,
    bytes INTEGER NOT NULL, body BLOB NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE TABLE IF NOT EXISTS items (
    response TEXT NOT NULL, output INTEGER NOT NULL, n INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (response, output, n)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_id ON items (id);
"""
LATER = (("responses", "owner TEXT NOT NULL DEFAULT ''"),)
# The responses that one was built on, itself included; 0 is the newest.
CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = :id AND owner = :owner
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM chain JOIN responses AS r ON r.id = chain.previous WHERE depth < 10000
)
"""
UNFINISHED = ("queued", "in_progress")
# Of those used together, the end of a conversation before its beginning.
OLDEST = "SELECT id, used, bytes FROM responses WHERE status NOT IN (?, ?) ORDER BY used, rowid DESC"
ROW_BYTES = 256  # what a row costs beside its body


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds on what is stored."""

    count: int = 10_000
    bytes: int = 256 << 20
    seconds: float = 30 * 86_400.0

    def __str__(self) -> str:
        days = f"{self.seconds / 86_400:g} days" if self.seconds >= 86_400 else f"{self.seconds:g} s"
        return f"{self.count} responses, {self.bytes / 2**20:g} MiB and {days} at most"


@dataclass(frozen=True, slots=True)
class Record:
    """One response. `body` has no output of its own: that is `output`."""

    id: str
    body: dict[str, Any]
    previous: str | None = None
    input: Sequence[dict[str, Any]] = ()
    output: Sequence[dict[str, Any]] = field(default=())
    owner: str = ""

    @property
    def whole(self) -> dict[str, Any]:
        """The response object."""
        return self.body | {"output": list(self.output)}


class StoredResponses:
    """The store, over a database with SCHEMA."""

    def __init__(self, database: Database, bounds: Bounds | None = None):
        self.bounds = bounds or Bounds()
        self._database = database
        self._woken = False  # changed in the database's thread alone

    async def put(self, record: Record) -> None:
        """Keep it, in place of an older state of it."""
        await self._wake()
        await self._database.run(lambda link: self._put(link, record))

    async def get(self, response: str, owner: str = "") -> Record | None:
        """A response of that owner's by its id."""
        await self._wake()
        return await self._database.run(lambda link: _read(link, response, owner))

    async def remove(self, response: str, owner: str = "") -> bool:
        """Forget it. Whether it was there."""
        await self._wake()

        def forget(link: sqlite3.Connection) -> bool:
            mine = "SELECT 1 FROM responses WHERE id = ? AND owner = ?"
            return link.execute(mine, (response, owner)).fetchone() is not None and _delete(link, [response]) > 0

        return await self._database.run(forget)

    async def context(self, response: str, owner: str = "") -> list[dict[str, Any]]:
        """Every item before and in a response, in order: the conversation that goes on from it. NotFound names the one
        that is missing."""
        await self._wake()
        return await self._database.run(lambda link: self._context(link, response, owner))

    async def item(self, item: str, owner: str = "") -> dict[str, Any] | None:
        """An item by its id; of several, the newest."""
        await self._wake()

        def find(link: sqlite3.Connection) -> dict[str, Any] | None:
            row = link.execute(
                "SELECT i.body FROM items AS i JOIN responses AS r ON r.id = i.response WHERE i.id = ? AND r.owner = ?"
                " ORDER BY r.rowid DESC LIMIT 1",
                (item, owner),
            ).fetchone()
            return None if row is None else msgspec.json.decode(row["body"])

        return await self._database.run(find)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    async def _wake(self) -> None:
        """Fail, once, the responses that were running when the last process ended."""
        if not self._woken:
            await self._database.run(self._interrupt)

    def _interrupt(self, link: sqlite3.Connection) -> None:
        if self._woken:  # asked for twice before it was done: by now something may be running again
            return
        for row in link.execute("SELECT id, body FROM responses WHERE status IN (?, ?)", UNFINISHED).fetchall():
            body = msgspec.json.decode(row["body"])
            why = "the server was stopped before this response was finished"
            body |= {"status": "failed", "error": {"code": "server_error", "message": why}}
            link.execute(
                "UPDATE responses SET status = 'failed', body = ? WHERE id = ?", (msgspec.json.encode(body), row["id"])
            )
        self._woken = True

    def _put(self, link: sqlite3.Connection, record: Record) -> None:
        now = time.time()
        body = msgspec.json.encode(record.body)
        rows = [
            (record.id, output, n, item["id"], msgspec.json.encode(item))
            for output, items in enumerate((record.input, record.output))
            for n, item in enumerate(items)
        ]
        _delete(link, [record.id])
        link.execute(
            "INSERT INTO responses (id, previous, status, used, bytes, body, owner) VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                record.id,
                record.previous,
                record.body["status"],
                now,
                len(body) + ROW_BYTES + sum(len(row[4]) + ROW_BYTES for row in rows),
                body,
                record.owner,
            ),
        )
        link.executemany("INSERT INTO items (response, output, n, id, body) VALUES (?, ?, ?, ?, ?)", rows)
        if record.previous is not None:
            _touch(link, record.previous, record.owner, now)
        self._make_room(link, now)

    def _make_room(self, link: sqlite3.Connection, now: float) -> None:
        count, size = link.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM responses").fetchone()
        going: list[str] = []
        for row in link.execute(OLDEST, UNFINISHED):
            if count <= self.bounds.count and size <= self.bounds.bytes and row["used"] >= now - self.bounds.seconds:
                break
            going.append(row["id"])
            count, size = count - 1, size - row["bytes"]
        _delete(link, going)

    def _context(self, link: sqlite3.Connection, response: str, owner: str) -> list[dict[str, Any]]:
        which = {"id": response, "owner": owner}
        chain = link.execute(CHAIN + "SELECT id, previous, depth FROM chain ORDER BY depth", which).fetchall()
        if not chain or chain[-1]["previous"] is not None:
            missing = chain[-1]["previous"] if chain else response
            raise NotFound(f"{missing[:80]!r} is not stored: it never was, was deleted or gave way ({self.bounds})")
        _touch(link, response, owner, time.time())
        rows = link.execute(
            CHAIN + "SELECT i.body FROM chain JOIN items AS i ON i.response = chain.id ORDER BY depth DESC, output, n",
            which,
        )
        return [msgspec.json.decode(row["body"]) for row in rows]


def _read(link: sqlite3.Connection, response: str, owner: str) -> Record | None:
    row = link.execute("SELECT previous, body FROM responses WHERE id = ? AND owner = ?", (response, owner)).fetchone()
    if row is None:
        return None
    _touch(link, response, owner, time.time())
    items: tuple[list[Any], list[Any]] = ([], [])
    for item in link.execute("SELECT output, body FROM items WHERE response = ? ORDER BY output, n", (response,)):
        items[item["output"]].append(msgspec.json.decode(item["body"]))
    return Record(response, msgspec.json.decode(row["body"]), row["previous"], *items, owner=owner)


def _touch(link: sqlite3.Connection, response: str, owner: str, now: float) -> None:
    """A use of a response is one of all that it followed."""
    link.execute(
        CHAIN + "UPDATE responses SET used = max(used, :now) WHERE id IN (SELECT id FROM chain)",
        {"id": response, "owner": owner, "now": now},
    )


def _delete(link: sqlite3.Connection, responses: list[str]) -> int:
    gone = 0
    for one in responses:
        gone += link.execute("DELETE FROM responses WHERE id = ?", (one,)).rowcount
        link.execute("DELETE FROM items WHERE response = ?", (one,))
    return gone
