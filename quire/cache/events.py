"""Events of the prefix tree: which pages of which prefixes are cached now, for whoever wants to know.

A listener that has heard everything since it began to listen knows exactly which pages are resident: what is there when
it begins is told first. Routers, KV event publishers, tiers and dashboards are listeners; the tree knows none of them.
Each event is about one page of one group. A page of a group that does not need whole prefixes may be stored without
its parent, or outlive it.

A listener is called by the thread that changes the tree, in the middle of the change: it must be quick, and must not use
the tree. One that raises has missed something, so it is taken off and that is logged; it may begin again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger("quire.cache")

DEVICE = "device"  # the medium of the pool that steps compute in


@dataclass(frozen=True, slots=True)
class Stored:
    """A page can be found from now on."""

    key: bytes
    parent: bytes | None  # the key of the page before; None: it is the first of its namespace
    tokens: tuple[int, ...]
    group: int
    medium: str
    page: int  # its number in the group's pool, for who wants its bytes; another prefix's once it was removed


@dataclass(frozen=True, slots=True)
class Removed:
    """A page cannot be found any more."""

    key: bytes
    group: int
    medium: str
    page: int  # the number that it had


class Listener(Protocol):
    """What is told of changes."""

    def stored(self, event: Stored) -> None: ...
    def removed(self, event: Removed) -> None: ...


def tell(listeners: list[Listener], event: Stored | Removed, only: Listener | None = None) -> None:
    """Tell all listeners, or only that one. One that raises is taken off the list."""
    for listener in list(listeners):
        if only is not None and listener is not only:
            continue
        try:
            if isinstance(event, Stored):
                listener.stored(event)
            else:
                listener.removed(event)
        except Exception:
            log.exception("a listener to cache events failed, and is told nothing more: %r", listener)
            listeners.remove(listener)
