"""Files that clients have uploaded and batches have made: bytes in a folder under our own ids, the rest in a table.

A file's name is only ever told back; its id, which is ours, is where it lies. A row is written after its bytes are on disk,
so what is listed can be read; bytes without a row (a process that died between the two) are swept away at the next start.
Knows no HTTP.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.observe.errors import NotFound, TooLarge
from quire.server.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL, created INTEGER NOT NULL,
    expires INTEGER, owner TEXT NOT NULL DEFAULT ''
);
"""
LATER = (("files", "owner TEXT NOT NULL DEFAULT ''"),)
MAX_FILES = 10_000
MAX_BYTES = 16 << 30  # of all files together


@dataclass(frozen=True, slots=True)
class File:
    """A file as the journal knows it; its bytes are on disk."""

    id: str
    name: str
    purpose: str
    bytes: int
    created: int
    expires: int | None
    owner: str = ""

    def body(self) -> dict[str, Any]:
        """The file object."""
        expires = {} if self.expires is None else {"expires_at": self.expires}
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            **expires,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
        }


def new_id() -> str:
    """An id that nobody guesses, and that is safe as a name on disk."""
    return f"file-{secrets.token_hex(16)}"


class Files:
    """The table and the folder."""

    def __init__(self, database: Database, folder: Path):
        self._database = database
        self.folder = folder
        self._strays = [path.name for path in folder.iterdir()]  # until they are found in the table

    def path(self, file: str) -> Path:
        """The path of the bytes of a file, by its id."""
        return self.folder / file

    async def check_room(self) -> None:
        """Refuse an upload when there are enough."""

        def totals(link: sqlite3.Connection) -> tuple[int, int]:
            count, size = link.execute("SELECT COUNT(*), COALESCE(SUM(bytes), 0) FROM files").fetchone()
            return count, size

        count, size = await self._database.run(totals)
        if count >= MAX_FILES or size >= MAX_BYTES:
            raise TooLarge(
                f"there are {count} files of {size} bytes together: {MAX_FILES} and {MAX_BYTES} are the most",
                cure="delete some",
                code="file_storage_full",
            )

    async def add(self, file: str, name: str, purpose: str, size: int, seconds: int | None, owner: str = "") -> File:
        """A row for bytes that are on disk under `file`."""
        now = int(time.time())
        row = File(file, name, purpose, size, now, None if seconds is None else now + seconds, owner)
        await self._database.run(lambda link: insert(link, row))
        return row

    async def get(self, file: str, owner: str = "") -> File:
        """One file of that owner's, or NotFound."""
        found = await self._database.run(lambda link: find(link, file, owner))
        if found is None:
            raise missing(file)
        return found

    async def listed(
        self, limit: int, after: str | None, newest_first: bool, purpose: str | None, owner: str = ""
    ) -> tuple[list[File], bool] | None:
        """A page, and whether there is more; None when `after` is not there."""

        def read(link: sqlite3.Connection) -> tuple[list[File], bool] | None:
            sign, order = ("<", "DESC") if newest_first else (">", "ASC")
            where = "(expires IS NULL OR expires > ?) AND owner = ?"
            values: list[Any] = [int(time.time()), owner]
            if purpose is not None:
                where += " AND purpose = ?"
                values.append(purpose)
            if after is not None:
                at = link.execute("SELECT rowid FROM files WHERE id = ? AND owner = ?", (after, owner)).fetchone()
                if at is None:
                    return None
                where += f" AND rowid {sign} ?"
                values.append(at[0])
            query = f"SELECT * FROM files WHERE {where} ORDER BY rowid {order} LIMIT ?"
            found = [_file(row) for row in link.execute(query, (*values, limit + 1))]
            return found[:limit], len(found) > limit

        return await self._database.run(read)

    async def remove(self, file: str) -> None:
        """The row first, then the bytes: what is not listed is not there."""
        gone = await self._database.run(lambda link: link.execute("DELETE FROM files WHERE id = ?", (file,)).rowcount)
        if not gone:
            raise missing(file)
        self.path(file).unlink(missing_ok=True)

    async def expire(self, used: Collection[str] = ()) -> None:
        """Remove what has expired, unless it is `used`."""

        def expired(link: sqlite3.Connection) -> list[str]:
            rows = link.execute("SELECT id FROM files WHERE expires <= ?", (int(time.time()),)).fetchall()
            going = [row["id"] for row in rows if row["id"] not in used]
            link.executemany("DELETE FROM files WHERE id = ?", [(one,) for one in going])
            return going

        for file in await self._database.run(expired):
            self.path(file).unlink(missing_ok=True)

    async def sweep(self) -> None:
        """Remove bytes that were here at the start and that no row knows."""
        known = await self._database.run(lambda link: {row["id"] for row in link.execute("SELECT id FROM files")})
        strays, self._strays = self._strays, []
        for name in strays:
            if name not in known:
                self.path(name).unlink(missing_ok=True)


def missing(file: str) -> NotFound:
    """The refusal of an id that is nobody's."""
    return NotFound(f"there is no file {file[:80]!r}", param="id", code="file_not_found")


def find(link: sqlite3.Connection, file: str, owner: str) -> File | None:
    """One file of that owner's, unless it has expired; inside somebody's transaction."""
    row = link.execute(
        "SELECT * FROM files WHERE id = ? AND owner = ? AND (expires IS NULL OR expires > ?)",
        (file, owner, int(time.time())),
    ).fetchone()
    return None if row is None else _file(row)


def insert(link: sqlite3.Connection, file: File) -> None:
    """A row, inside somebody's transaction; again the same."""
    link.execute(
        "INSERT OR REPLACE INTO files (id, name, purpose, bytes, created, expires, owner) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (file.id, file.name, file.purpose, file.bytes, file.created, file.expires, file.owner),
    )


def _file(row: sqlite3.Row) -> File:
    return File(row["id"], row["name"], row["purpose"], row["bytes"], row["created"], row["expires"], row["owner"])
