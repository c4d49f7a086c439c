"""Files, journal and queue of one server, opened together over its state folder.

A folder that cannot be used turns the feature off with the reason, and never keeps the server from starting.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

from fastapi import FastAPI

from quire.observe.errors import QuireError
from quire.server.database import Database
from quire.server.openai.batches import files, journal
from quire.server.openai.batches.call import Call
from quire.server.openai.batches.files import Files
from quire.server.openai.batches.journal import Journal
from quire.server.openai.batches.queue import Queue
from quire.server.server import Server

log = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class Storage:
    """The objects that the routes of files and batches work with."""

    files: Files
    journal: Journal
    queue: Queue


def storage_of(app: FastAPI, server: Server) -> Storage | None:
    """The one storage of an app; None where the state folder is off."""
    if not hasattr(app.state, "batches"):
        app.state.batches = _open(app, server)
    return app.state.batches


def _open(app: FastAPI, server: Server) -> Storage | None:
    folder = server.state.folder
    if folder is None:
        return None
    later = files.LATER + journal.LATER
    try:
        database = Database(folder / "batches.db", files.SCHEMA + journal.SCHEMA, later=later, durable=True)
        found = Files(database, folder / "files")
    except (sqlite3.Error, OSError, QuireError) as error:
        server.state.give_up(str(error) if isinstance(error, QuireError) else "the state folder cannot be used")
        log.warning("%s (%s)", server.state.line(), error)
        return None
    server.closing.append(database.close)
    record = Journal(database)
    queue = Queue(server, record, found, Call(app))
    server.jobs.append(queue)
    return Storage(found, record, queue)


def needed(app: FastAPI, server: Server, what: str) -> Storage:
    """The storage, or the refusal of a route that cannot do without."""
    server.state.needed(what)
    storage = storage_of(app, server)
    if storage is None:  # the folder was given up after it was chosen
        raise QuireError(f"{what} are off here")
    return storage
