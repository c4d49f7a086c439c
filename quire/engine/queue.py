"""Sequences that wait for a slot: in order, by size, and those that a limit lets wait for another sequence.

Each question costs the same whether one waits or a million do. `first` is the next in order, `shortest` the first to come
of those with the shortest prompts (sizes are told apart by powers of two, so that nobody is sorted). A sequence that is
held waits under the key of another one and is in neither of these until that one has come far enough, or is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from quire.engine.sequence import Sequence

SPARE = 64  # entries of sequences that wait no more, before the heap is made anew


class Queue:
    """The waiting sequences of one scheduler."""

    __slots__ = ("_aside", "_heap", "_held", "_holds", "_listed", "_reasons", "_sizes", "_waiting", "held")

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}  # by key, all but those that are held
        self._aside: dict[int, Sequence] = {}  # by key
        self._heap: list[tuple[tuple[Any, int], Sequence]] = []  # of these; some that wait no more are still in it
        self._listed: set[int] = set()  # keys in the heap: a sequence that comes back is not there twice
        self._sizes: dict[Any, dict[int, dict[int, Sequence]]] = {}  # by rank, by bits of the length, by key
        self._held: dict[
            int, tuple[list[tuple[int, int]], dict[int, Sequence]]
        ] = {}  # by the key of who is waited for:
        # (how far that one must come, key) as a heap, and by key those that still wait for it
        self._holds = 0
        self._reasons: dict[int, str] = {}  # of those that are held, by key
        self.held: dict[str, int] = {}  # how many are held, by the reason

    def __len__(self) -> int:
        return len(self._waiting) + self._holds

    def __bool__(self) -> bool:
        """Whether some waiting sequence could be taken now: one that is held cannot."""
        return bool(self._waiting)

    @property
    def asking(self) -> int:
        """The number of sequences that wait and are not held."""
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        """Let a sequence wait from now on."""
        self._waiting[seq.key] = seq
        self._list(seq)
        of_rank = self._sizes.setdefault(seq.order[0], {})
        of_rank.setdefault(len(seq.tokens).bit_length(), {})[seq.key] = seq

    def remove(self, seq: Sequence) -> None:
        """Let a sequence wait no more, whether for a slot or for another sequence."""
        if seq.waits_for is not None:
            held = self._held[seq.waits_for][1]
            del held[seq.key]
            if not held:
                del self._held[seq.waits_for]
            self._holds -= 1
            self._count(self._reasons.pop(seq.key), -1)
            seq.waits_for = None
            return
        if self._waiting.pop(seq.key, None) is not seq:
            raise RuntimeError(f"sequence {seq.key} is {seq.status}, but not where such sequences are")
        rank, bits = seq.order[0], len(seq.tokens).bit_length()
        del self._sizes[rank][bits][seq.key]
        if not self._sizes[rank][bits]:
            del self._sizes[rank][bits]
            if not self._sizes[rank]:
                del self._sizes[rank]
        if len(self._heap) > 2 * len(self._waiting) + SPARE:
            self._heap = [entry for entry in self._heap if entry[1].key in self._waiting]
            heapq.heapify(self._heap)
            self._listed = {entry[1].key for entry in self._heap}

    def first(self) -> Sequence | None:
        """The next in order, but for those that have stepped aside."""
        heap = self._heap
        while heap:
            seq = heap[0][1]
            if seq.key in self._waiting and seq.key not in self._aside:
                return seq
            heapq.heappop(heap)
            self._listed.discard(seq.key)
        return None

    def step_aside(self, seq: Sequence) -> None:
        """Let `first` pass over a sequence, which still waits, until `step_back`."""
        self._aside[seq.key] = seq

    def step_back(self, most: int) -> None:
        """Put sequences that have stepped aside back into their places, `most` of them at most: the longest aside come first."""
        while self._aside and most:
            seq = self._aside.pop(next(iter(self._aside)))
            most -= 1
            if seq.key in self._waiting:
                self._list(seq)

    def _list(self, seq: Sequence) -> None:
        if seq.key not in self._listed:
            self._listed.add(seq.key)
            heapq.heappush(self._heap, (seq.order, seq))

    def shortest(self, rank: Any) -> Iterator[Sequence]:
        """The waiting sequences of a rank, the shortest first, and among such the first to come. Nothing may change while they
        are looked at."""
        of_rank = self._sizes.get(rank)
        if of_rank:
            for bits in sorted(of_rank):
                yield from of_rank[bits].values()

    # ---- waiting for another sequence

    def hold(self, seq: Sequence, other: Sequence, upto: int, reason: str = "") -> None:
        """Hold a sequence until `upto` tokens of `other` are computed, or `other` has left its slot: it is not considered
        before."""
        self.remove(seq)
        seq.waits_for = other.key
        until, held = self._held.setdefault(other.key, ([], {}))
        heapq.heappush(until, (upto, seq.key))
        held[seq.key] = seq
        self._holds += 1
        self._reasons[seq.key] = reason
        self._count(reason, 1)

    def come(self, other: Sequence, computed: int | None = None) -> None:
        """Let go of the sequences that `other` held until so many of its tokens were computed; None: it has left its slot."""
        if other.key not in self._held:
            return
        until, held = self._held[other.key]
        while until and held and (computed is None or until[0][0] <= computed):
            seq = held.get(heapq.heappop(until)[1])
            if seq is not None:
                self.remove(seq)
                self.add(seq)

    def _count(self, reason: str, change: int) -> None:
        self.held[reason] = self.held.get(reason, 0) + change
        if not self.held[reason]:
            del self.held[reason]
