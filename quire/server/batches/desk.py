"""Files, journal and queue of one server, opened together over its state folder.

A folder that cannot be used turns the feature off with the reason, and never keeps the server from starting.
"""

from __future__ import annotations

import logging
import sqlite3
from dataclasses import dataclass

from fastapi import FastAPI

from quire.observe.errors import QuireError
from quire.server import files
from quire.server.batches import journal
from quire.server.batches.call import Call
from quire.server.batches.journal import Journal
from quire.server.batches.queue import Queue
from quire.server.database import Database
from quire.server.files import Files
from quire.server.service import Service

log = logging.getLogger("quire.server")


@dataclass(frozen=True, slots=True)
class Desk:
    """What the routes of files and batches work with."""

    files: Files
    journal: Journal
    queue: Queue


def desk_of(app: FastAPI, service: Service) -> Desk | None:
    """The one desk of an app; None where the state folder is off."""
    if not hasattr(app.state, "desk"):
        app.state.desk = _open(app, service)
    return app.state.desk


def _open(app: FastAPI, service: Service) -> Desk | None:
    folder = service.state.folder
    if folder is None:
        return None
    later = files.LATER + journal.LATER
    try:
        database = Database(folder / "batches.db", files.SCHEMA + journal.SCHEMA, later=later, durable=True)
        kept = Files(database, folder / "files")
    except (sqlite3.Error, OSError, QuireError) as error:
        service.state.give_up(str(error) if isinstance(error, QuireError) else "the state folder cannot be used")
        log.warning("%s (%s)", service.state.line(), error)
        return None
    service.closing.append(database.close)
    record = Journal(database)
    queue = Queue(service, record, kept, Call(app))
    service.jobs.append(queue)
    return Desk(kept, record, queue)


def needed(app: FastAPI, service: Service, what: str) -> Desk:
    """The desk, or the refusal of a route that cannot do without."""
    service.state.needed(what)
    desk = desk_of(app, service)
    if desk is None:  # the folder was given up after it was chosen
        raise QuireError(f"{what} are off here")
    return desk
