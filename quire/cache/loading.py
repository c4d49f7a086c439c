"""Loading: pages that the tree does not have are brought from a tier into pages of a lease.

    find     which pages a tier has behind those of a lease, and how far that reaches in every group
    load     tier ──job──► buffers ──write_pages──► pages of the lease          the caller holds the lease all the while
               └─────── one `Load`: it goes on at `advance`, never waits, and ends well, badly or late ──────┘

A load that is late has not ended: its pages may still be written, and are the lease's until it has. Nothing that goes wrong
in a tier is an error here; it is a miss, and whoever wanted the pages computes them. The clock is the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.backends.pages import PageBytes, PageCopy, PageIds
from quire.cache.pages import Lease
from quire.cache.prefix_tree import PrefixTree
from quire.cache.tiers import Job, Part, Tier

PATIENCE = 5.0  # seconds until a load is late
LOST = 12  # times that long until nobody waits for the pages that a late one still holds

log = logging.getLogger("quire.cache")


class CopiesPages(Protocol):
    """What copies bytes to pages: a runner. See Program."""

    def page_buffer(self, group: int, count: int) -> PageBytes: ...
    def write_pages(self, group: int, pages: PageIds, buffer: PageBytes) -> PageCopy: ...


@dataclass(frozen=True, slots=True)
class Found:
    """Pages that can be loaded."""

    upto: int  # tokens, from the first, that can be resumed from then on
    keys: list[bytes]  # of all pages from the first that the lease does not have, up to there


class Load:
    """Pages of one lease on their way.

    `ended`: nobody writes them any more. `well`: then they hold what they should. `late`: not worth waiting for.
    """

    __slots__ = ("_copies", "_job", "_parts", "began", "ended", "late", "well")

    def __init__(self, job: Job, parts: list[tuple[Part, list[int]]], began: float) -> None:
        """`parts` come with the pages that each is for; `began` is a reading of the clock."""
        self._job: Job | None = job
        self._parts = parts
        self._copies: list[PageCopy] = []
        self.began = began
        self.ended = self.late = False
        self.well = True

    def advance(self, pages: CopiesPages) -> None:
        """Go on as far as possible without waiting."""
        if self._job is not None:
            try:
                well = self._job.ended()
            except Exception as e:
                log.warning("a tier failed while it was loading pages: %r", e)
                well = False
            if well is None:
                return
            self._job, parts, self._parts = None, self._parts, []
            self.well = well
            if well:
                self._write(parts, pages)
        self._copies = [copy for copy in self._copies if not self._done(copy)]
        self.ended = not self._copies

    def wait(self, seconds: float) -> None:
        """Return when it may go on, or after so long."""
        if self._job is not None:
            try:
                self._job.wait(seconds)
            except Exception as e:
                log.warning("a tier failed while it was waited for: %r", e)

    def finish(self) -> None:
        """Wait until nobody writes the pages. Bytes that are not there yet will not be written at all."""
        self._job, self.well = None, False
        for copy in self._copies:
            try:
                copy.wait()
            except Exception:
                log.exception("pages that were loaded could not be written")
        self._copies, self.ended = [], True

    def _write(self, parts: list[tuple[Part, list[int]]], pages: CopiesPages) -> None:
        for part, own in parts:
            try:
                self._copies.append(pages.write_pages(part.group, own, part.buffer))
            except Exception:
                log.exception("pages that were loaded could not be written")
                self.well = False
                return  # those of other groups may be under way: it has not ended

    def _done(self, copy: PageCopy) -> bool:
        try:
            return copy.done()
        except Exception:
            log.exception("pages that were loaded could not be written")
            self.well = False
            return True


class Loader:
    """Loads from one tier, once there is one."""

    def __init__(
        self, tree: PrefixTree, pages: CopiesPages, clock: Callable[[], float], patience: float = PATIENCE
    ) -> None:
        """`patience` is how many seconds of `clock` it takes until a load is late."""
        self.tier: Tier | None = None
        self._tree = tree
        self._pages = pages
        self._clock = clock
        self._patience = patience
        self._under_way: list[Load] = []

    def find(self, lease: Lease, tokens: Sequence[int], upto: int) -> Found | None:
        """The longest prefix of tokens[:upto] that can be resumed with what the tier has behind the lease's pages, if it
        has any. Costs a hash for each page."""
        tier, keys, before = self.tier, self._tree.keys, self._tree.address(lease.node)
        if tier is None or keys is None or before is None:
            return None
        size, start = self._tree.page_size, lease.shared
        named = keys.chain(before, tokens[start * size : upto])
        if not named:
            return None
        try:
            has = [list(tier.has(g, named)) for g in range(len(self._tree.groups))]
        except Exception as e:
            log.warning("a tier could not say what it has: %r", e)
            return None
        if any(len(each) != len(named) for each in has):
            log.error("a tier was asked for %d pages, and answered for %s", len(named), [len(each) for each in has])
            return None
        reach = self._tree.resumable([[0 if there else -1 for there in each] for each in has], lease)
        return Found(reach * size, named[: reach - start]) if reach > start else None

    def load(self, lease: Lease, found: Found) -> Load | None:
        """Begin to fill the private pages of a lease that was staged for what was found. None: the load could not begin."""
        if self.tier is None:
            return None
        parts: list[tuple[Part, list[int]]] = []
        try:
            for g, row in enumerate(lease.rows):
                there = [(key, page) for key, page in zip(found.keys, row[lease.shared :], strict=True) if page >= 0]
                if there:
                    buffer = self._pages.page_buffer(g, len(there))
                    parts.append((Part(g, [key for key, _ in there], buffer), [page for _, page in there]))
            load = Load(self.tier.load([part for part, _ in parts]), parts, self._clock())
        except Exception as e:
            log.warning("a tier could not begin to load pages: %r", e)
            return None
        self._under_way.append(load)
        return load

    def advance(self) -> None:
        """Let every load go on as far as it can."""
        if self._under_way:
            now = self._clock()
            for load in self._under_way:
                load.advance(self._pages)
                load.late = load.late or now - load.began > self._patience
            self._under_way = [load for load in self._under_way if not load.ended]

    def wait(self, seconds: float) -> bool:
        """Return when a load may go on, or after so long. False: there is none, or all are so late that they must be lost."""
        now = self._clock()
        hopeful = [load for load in self._under_way if now - load.began <= LOST * self._patience]
        if hopeful:
            hopeful[0].wait(seconds)
        return bool(hopeful)

    def close(self) -> None:
        """End all loads. Only copies to pages are waited for, since these run where the pages are."""
        for load in self._under_way:
            load.finish()
        self._under_way = []
