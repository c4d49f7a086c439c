"""The contract of a tier: who keeps pages of KV somewhere else, by their keys.

Host memory, a disk and another machine are tiers. Each has these four methods and a `Job`, and is called from the
engine's thread, so no call may wait for anything. Pages lie in buffers, one row for each key, as `Program.read_pages`
makes them (backends/pages.py).

A tier owes the bytes that were stored under a key in that group, or none. One whose medium may change them, a disk or a
network, checks them itself (sealed.py does it for any tier); memory is trusted as the pool is. Everything else may go
wrong: `has` may be out of date, a job may fail or take long. Whoever loads then computes. But every job must end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.backends.pages import PageBytes


@dataclass(frozen=True, slots=True)
class Part:
    """Pages of one group: row i of the buffer is the page with keys[i]."""

    group: int
    keys: Sequence[bytes]
    buffer: PageBytes


class Job(Protocol):
    """Pages on their way from or to a tier."""

    def ended(self) -> bool | None:
        """Whether a job has ended. None: it is under way. True: it ended well, and every row is filled, or stored. False: it
        failed. Once it has ended, nobody touches the buffers."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when it has ended, or after so long, or before."""
        ...


class Tier(Protocol):
    """A place besides the device that keeps pages."""

    def has(self, group: int, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which of these pages are there, as far as is known without asking anybody. In some groups a prefix can be resumed
        with pages missing in front, so there is an answer for each."""
        ...

    def load(self, parts: Sequence[Part]) -> Job:
        """Fill these buffers: all of them, or the job ends badly."""
        ...

    def store(self, parts: Sequence[Part]) -> Job:
        """Keep these pages; the buffers are the tier's until the job has ended."""
        ...

    def drop(self, group: int, keys: Sequence[bytes]) -> None:
        """Forget these pages, where they are there."""
        ...
