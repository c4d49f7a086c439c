"""The misbehaving server, a store that does not sleep between tries, and a Progress that remembers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from quire.config import Environment
from quire.weights.download.web import Http
from quire.weights.store.store import Store

from .origin import Origin


@dataclass
class Recorder:
    """A Progress that keeps what it was told."""

    notes: list[str] = field(default_factory=list)
    starts: list[tuple[int | None, str, int]] = field(default_factory=list)
    advanced: int = 0
    finished: int = 0

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        self.starts.append((total, label, done))

    def advance(self, n: int) -> None:
        self.advanced += n

    def finish(self) -> None:
        self.finished += 1

    def note(self, text: str) -> None:
        self.notes.append(text)

    def said(self, text: str) -> bool:
        return any(text in note for note in self.notes)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def origin() -> Iterator[Origin]:
    server = Origin()
    yield server
    server.close()


@pytest.fixture
def naps() -> list[float]:
    """The pauses that the client took, in seconds."""
    return []


@pytest.fixture
def http(naps: list[float]) -> Http:
    return Http(timeout=10, sleep=naps.append)


@pytest.fixture
def store(tmp_environment: Environment, http: Http) -> Store:
    return Store(tmp_environment, http)
