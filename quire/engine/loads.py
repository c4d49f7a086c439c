"""Sequences that wait for pages on their way: who waits for which load, and what becomes of the pages.

A waiting sequence whose turn it is may have more of its prefix somewhere else than in the tree. Then it leaves the queue
until a load has brought those pages, and after that it is in its place again and finds them in the tree like any others:

    waiting ── begin ──► loading ── ended well: published ──► waiting ── a hit ──► running
                            └────── badly, or late ─────────► waiting ── a miss ─► running, computing

The lease whose pages a load fills belongs to the load and not to a sequence. So a sequence may go at any time, and the
pages are nobody else's until nothing writes them any more. Several sequences may wait for one load. One that ends well
when nobody waits any more is published all the same. No clock is read here: whether a load is late is the source's to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from quire.cache.loading import Found, Load
from quire.cache.pages import Lease
from quire.cache.prefix_tree import PrefixTree
from quire.engine.sequence import Sequence

TRIES = 2  # loads that a sequence waits for before it computes what is missing: another's, and then one of its own


class Source(Protocol):
    """Where pages that the tree does not have may be loaded from. Neither call waits, and no load moves while a step is planned."""

    def find(self, lease: Lease, tokens: list[int], upto: int) -> Found | None:
        """The pages of tokens[:upto] behind the lease's that can be loaded; None: there are none."""
        ...

    def load(self, lease: Lease, found: Found) -> Load | None:
        """Begin to fill the lease's private pages, which were staged for that. None: the load could not begin."""
        ...


@dataclass(slots=True, eq=False)
class _Flight:
    """A load, and who waits for it."""

    load: Load
    lease: Lease
    tokens: list[int]
    keys: list[bytes]
    waiting: dict[int, Sequence] = field(default_factory=dict)  # by key


class Loads:
    """The loads of one scheduler, at most `most` of them at a time. `loaded` counts tokens of pages that came."""

    def __init__(self, tree: PrefixTree, source: Source, most: int) -> None:
        self._tree = tree
        self._source = source
        self._most = most
        self._flights: list[_Flight] = []
        self._by_page: dict[bytes, _Flight] = {}  # by the key of each page on its way
        self._by_sequence: dict[int, _Flight] = {}
        self.loaded = 0

    def __bool__(self) -> bool:
        """Whether any is under way, waited for or not."""
        return bool(self._flights)

    def __len__(self) -> int:
        """Sequences that wait."""
        return len(self._by_sequence)

    def begin(self, seq: Sequence, upto: int) -> bool:
        """Let a sequence wait for more of tokens[:upto] than its lease has, if there is more. Then it has no lease any more."""
        tree, lease = self._tree, seq.held
        if seq.loads >= TRIES or len(self._flights) >= self._most:
            return False
        found = self._source.find(lease, seq.tokens, upto)
        seq.loads = TRIES if found is None else seq.loads + 1
        if found is None:
            return False
        flight = self._by_page.get(found.keys[0])
        if flight is None:
            flight = self._started(seq, lease, found, upto)
        elif flight.load.late:  # it is computed now, and not asked for again
            return False
        else:
            tree.release(lease)
        if flight is None:
            return False
        seq.lease = None
        flight.waiting[seq.key] = seq
        self._by_sequence[seq.key] = flight
        return True

    def leave(self, seq: Sequence) -> None:
        """Let a sequence wait no more. The load goes on."""
        del self._by_sequence.pop(seq.key).waiting[seq.key]

    def settle(self) -> list[Sequence]:
        """Take in the loads that ended since the last step. Gives the sequences that need not wait any more."""
        back: list[Sequence] = []
        for flight in self._flights:
            load, lease = flight.load, flight.lease
            if not (load.ended or load.late):
                continue
            well = load.ended and load.well
            for seq in flight.waiting.values():
                del self._by_sequence[seq.key]
                seq.loaded += len(flight.keys) * self._tree.page_size if well else 0
                if not well:
                    seq.loads = TRIES
                back.append(seq)
            flight.waiting = {}
            if load.ended:
                self._end(flight, lease, well)
        self._flights = [flight for flight in self._flights if not flight.load.ended]
        return back

    def _started(self, seq: Sequence, lease: Lease, found: Found, upto: int) -> _Flight | None:
        """A load of its own. None: it was not possible, and its lease is as before."""
        tree = self._tree
        if not tree.stage(lease, found.upto):
            return None
        load = self._source.load(lease, found)
        if load is None:
            tree.release(lease)
            seq.lease = tree.match(seq.request.namespace, seq.tokens, upto)
            return None
        flight = _Flight(load, lease, seq.tokens[: found.upto], found.keys)
        self._flights.append(flight)
        self._by_page.update(dict.fromkeys(found.keys, flight))
        return flight

    def _end(self, flight: _Flight, lease: Lease, well: bool) -> None:
        """Nobody writes the pages any more: they are the tree's, or free."""
        if well:
            self._tree.publish(lease, flight.tokens)
            self.loaded += len(flight.keys) * self._tree.page_size
        self._tree.release(lease)
        for key in flight.keys:
            if self._by_page.get(key) is flight:
                del self._by_page[key]
