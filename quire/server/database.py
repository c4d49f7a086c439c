"""One SQLite file, used from one thread of its own, so that no query stalls the event loop.

`run` is one transaction: committed when the work returns, rolled back when it raises. A killed process loses nothing that
was committed; with `durable` neither does a power cut, at the price of waiting for the disk. Without a path the tables
are in memory and go with the process. Knows nothing of what is in them.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from quire.observe.errors import QuireError

T = TypeVar("T")


class Database:
    """`schema` is a script of CREATE … IF NOT EXISTS statements; `version` is raised when it changes its meaning. `later` has the columns
    that older files lack: tables, and definitions with a default."""

    def __init__(
        self,
        path: Path | None,
        schema: str,
        *,
        later: Sequence[tuple[str, str]] = (),
        version: int = 1,
        durable: bool = False,
    ):
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._link: sqlite3.Connection | None = None
        self._schema = schema
        self._later = later
        self._version = version
        self._durable = durable
        if path is not None:
            self._open()  # trouble with a file is told now

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, as one transaction in the database's thread. Cancelling does not interrupt it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)

    def close(self) -> None:
        """Wait for what was asked, then let go of the file."""
        self._thread.shutdown()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        link = self._link or self._open()
        link.execute("BEGIN IMMEDIATE")
        try:
            result = work(link)
            link.execute("COMMIT")
            return result
        except BaseException:
            if link.in_transaction:
                link.execute("ROLLBACK")
            raise

    def _open(self) -> sqlite3.Connection:
        link = sqlite3.connect(self.path or ":memory:", isolation_level=None, check_same_thread=False)
        link.row_factory = sqlite3.Row
        try:
            link.execute("PRAGMA journal_mode = WAL")
            link.execute(f"PRAGMA synchronous = {'FULL' if self._durable else 'NORMAL'}")
            (found,) = link.execute("PRAGMA user_version").fetchone()
            if found not in (0, self._version):
                raise QuireError(
                    f"the state folder was written by another version of Quire (format {found}, not {self._version})",
                    cure="serve with another --state-dir",
                )
            link.executescript(self._schema)
            for table, column in self._later:
                has = {row["name"] for row in link.execute(f"PRAGMA table_info({table})")}
                if column.split()[0] not in has:
                    link.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
            link.execute(f"PRAGMA user_version = {self._version}")
        except BaseException:
            link.close()
            raise
        self._link = link
        return link
