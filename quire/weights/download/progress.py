"""The interface that a transfer reports progress to, and sizes in readable units. It is not in fetch.py, so that a report imports no network code."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """The listener to a transfer's progress. `start` comes again when a transfer starts over."""

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        """A transfer of `total` bytes (None: unknown) begins, `done` of them being here already."""
        ...

    def advance(self, n: int) -> None:
        """`n` more bytes are here."""
        ...

    def finish(self) -> None:
        """The transfer is over, well or badly."""
        ...

    def note(self, text: str) -> None:
        """A sentence for the user."""
        ...


class Quiet:
    """A Progress that says nothing. Failures still raise."""

    def start(self, total: int | None, label: str, done: int = 0) -> None: ...
    def advance(self, n: int) -> None: ...
    def finish(self) -> None: ...
    def note(self, text: str) -> None: ...


def mb(n: int) -> str:
    """A byte count for people."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} bytes"
