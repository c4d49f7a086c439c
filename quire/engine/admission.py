"""Admission: which sequences wait, and which have a slot. The scheduler decides what a step computes, admission who may be in it.

* a waiting sequence takes a slot where one is free, no limit holds it back, and there is room for all that it needs beside what
  running sequences were promised
* one that found no room is not tried again before pages came back, and one that a limit lets wait for another sequence is
  out of the queue until then: what a plan costs does not depend on what waits
* a waiting sequence never preempts a running one, whatever its priority: it is next when a slot or pages come free.
  (Taking them by force can throw work away and still not make enough room.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from quire.cache.prefix_tree import PrefixTree
from quire.engine.limits import Limit, TokenBudget
from quire.engine.loads import Loads, Source
from quire.engine.sequence import LOADING, RUNNING, WAITING, NoRoom, Sequence, mix_seed
from quire.observe.steps import LOADING as PAGES_COMING
from quire.observe.steps import PAGES, SLOTS
from quire.runner.plan import Open

SPARE = 64  # entries of sequences that wait no more, before the heap is made anew
LOOKED_UP = 64  # pages of a prefix that may be looked up for each plan in which there was no room
FEW = 4  # steps: a prompt that its share takes longer to compute does not take the last slot while an earlier one is computed

# What became of a waiting sequence. Held: it is out of the queue, because of another one or of a load (loads.py).
TAKEN, HELD, HELD_BACK, FULL = "taken", "held", "held back", "full"

_order = attrgetter("order")


class Queue:
    """Sequences that wait for a slot: in order, by size, and those that a limit lets wait for another sequence.

    Each question costs the same whether one waits or a million do. `first` is the next in order, `shortest` the first to come
    of those with the shortest prompts (sizes are told apart by powers of two, so that nobody is sorted). A sequence that is
    held waits under the key of another one and is in neither of these until that one has come far enough, or is gone.
    """

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


class Admission:
    """The sequences of one scheduler that are not finished: in its queue, in its loads, or running in a slot.

    `running` is sorted by order. `closed` are the slots left since the last plan. `cuts` says how many sequences got less than they
    asked for in this plan, by the reason.
    """

    __slots__ = (
        *("_budget", "_limits", "_planned", "_prefix_cache", "_tree"),
        *("closed", "cuts", "loads", "preemptions", "promised", "queue", "running", "slots"),
    )

    def __init__(
        self, tree: PrefixTree, limits: tuple[Limit, ...], budget: TokenBudget, slots: int, prefix_cache: bool
    ) -> None:
        self._tree = tree
        self._limits = limits
        self._budget = budget
        self._prefix_cache = prefix_cache
        self._planned = 0  # plans so far
        self.queue = Queue()
        self.running: list[Sequence] = []
        self.slots = list(range(slots - 1, -1, -1))
        self.closed: list[int] = []
        self.loads: Loads | None = None
        self.cuts: dict[str, int] = {}
        self.preemptions = 0
        self.promised: list[int] | None = (
            None  # in this plan: pages that running sequences will still need; None: to be counted
        )

    def load_from(self, source: Source) -> None:
        """Let waiting sequences wait, from now on, for pages that the source has and the tree has not."""
        if self.loads is None:
            self.loads = Loads(self._tree, source, len(self.slots) + len(self.running))

    def begin(self, planned: int) -> None:
        """Begin a new plan, and put sequences back into the queue whose pages have come, or will not come in time."""
        self._planned, self.promised, self.cuts = planned, None, {}
        if self.loads:
            for seq in self.loads.settle():
                seq.status = WAITING
                self.queue.add(seq)

    def cut(self, reason: str) -> None:
        """Count a sequence that got less than it asked for."""
        self.cuts[reason] = self.cuts.get(reason, 0) + 1

    def told(self) -> tuple[int, dict[str, int]]:
        """The newest plan in numbers: how many sequences have no slot, and what holds others back."""
        queue, held = self.queue, self.cuts
        waiting, loading = len(queue), len(self.loads or ())
        if loading:
            held[PAGES_COMING] = loading
        if waiting:
            held |= queue.held
            if queue.asking and not self.slots:
                held[SLOTS] = queue.asking
            elif queue.asking and not self._budget.left:
                held[self._budget.reason] = held.get(self._budget.reason, 0) + queue.asking
            elif queue and (head := queue.first()) is not None and head.no_room is not None:
                held[PAGES] = held.get(PAGES, 0) + queue.asking
        return waiting + loading, held

    # ---- slots

    def overtaking(self, first: Sequence, left: int | None, share: int, tried: set[int]) -> Sequence | None:
        """The waiting sequence that gets the share of those behind `first` next: one shorter than what is `left` of the running
        ones among them. Nobody overtakes a sequence that waits for pages: it would never have enough."""
        head = self.queue.first()
        if head is None or head.no_room is not None or head.order < first.order:
            return None if head is None or head.key in tried else head
        seq = next((seq for seq in self.queue.shortest(first.order[0]) if seq.key not in tried), None)
        if seq is None or (left is not None and seq.left >= left):
            return None
        return None if len(self.slots) == 1 and seq.left > FEW * share else seq

    def take(self, seq: Sequence) -> str:
        """Give a waiting sequence a slot and a lease on its cached prefix, if there is room. Then its first tokens must be planned,
        or both are given `back`."""
        tree, memo, running = self._tree, seq.no_room, self.running
        if running and memo is not None and memo.returned == tree.returned:
            return FULL
        if running and seq.not_before > self._planned:
            return HELD_BACK if memo is None else FULL
        for limit in self._limits:
            if not limit.grant(seq, 0, 1):
                awaited = limit.waits_for(seq)
                if awaited is None:
                    self.cut(limit.reason)
                    return HELD_BACK
                self.queue.hold(seq, *awaited, limit.reason)
                return HELD
        promised = self._promises()
        need = [1] * len(tree.pools) if memo is None else memo.need
        if not tree.fits(promised, need):
            seq.no_room = NoRoom(need, tree.returned)
            return FULL
        before = [tree.available(g) for g in range(len(need))]
        seq.lease = lease = tree.match(seq.request.namespace, seq.tokens, self.reusable(seq))
        short = self._short(seq)
        if not tree.fits(promised, short):
            need = [pages + before[g] - tree.available(g) for g, pages in enumerate(short)]
            tree.release(lease)
            seq.lease, seq.no_room = None, NoRoom(need, tree.returned)
            if memo is not None:
                self._not_soon(seq)
            return FULL
        if self.loads is not None and self.loads.begin(seq, self.reusable(seq)):
            self.queue.remove(seq)
            seq.status, seq.no_room = LOADING, None
            return HELD
        self.queue.remove(seq)
        seq.computed, seq.slot, seq.no_room = seq.held.shared * tree.page_size, self.slots.pop(), None
        insort(running, seq, key=_order)
        self._promise(seq, promised)
        seq.status = RUNNING
        for limit in self._limits:
            limit.opened(seq)
        return TAKEN

    def back(self, seq: Sequence) -> None:
        """Let a sequence wait again that has just taken a slot, and of which nothing was planned: a limit holds it back after all."""
        self._remove(seq)
        self._tree.release(seq.held)
        self.slots.append(seq.slot)
        seq.lease, seq.slot, seq.computed, seq.status = None, -1, 0, WAITING
        self._not_soon(seq)
        self.queue.come(seq)
        self.queue.add(seq)

    def leave(self, seq: Sequence) -> None:
        """Let a sequence wait no more; or take the slot and the lease from a running one."""
        if seq.status == LOADING and self.loads is not None:
            self.loads.leave(seq)
            return
        if seq.status != RUNNING:
            self.queue.remove(seq)
            return
        self._remove(seq)
        if seq.lease is not None:
            self._tree.release(seq.lease)
        self.closed.append(seq.slot)
        self.slots.append(seq.slot)
        seq.lease, seq.slot, seq.again = None, -1, None
        seq.computed = seq.in_flight = seq.sampling = 0
        seq.sampled_here = False

    def preempt(self, seq: Sequence) -> None:
        """Put a running sequence back among the waiting ones, in its place. What it published is still cached: resuming is a hit."""
        self.leave(seq)
        seq.epoch += 1
        seq.loads = 0
        seq.preemptions += 1
        self.preemptions += 1
        self.cut(PAGES)
        seq.status = WAITING
        self.queue.come(seq)
        self.queue.add(seq)

    def _remove(self, seq: Sequence) -> None:
        running = self.running
        i = bisect_left(running, seq.order, key=_order)
        if i == len(running) or running[i] is not seq:
            raise RuntimeError(f"sequence {seq.key} is {seq.status}, but not where such sequences are")
        del running[i]

    def _not_soon(self, seq: Sequence) -> None:
        """Put off the next lookup of a prefix that was looked up in vain: the longer it may be, the more plans pass."""
        seq.not_before = self._planned + 1 + len(seq.tokens) // (self._tree.page_size * LOOKED_UP)

    # ---- pages

    def reusable(self, seq: Sequence) -> int:
        """The number of tokens of a sequence that may come from the tree."""
        return seq.reusable if self._prefix_cache else 0

    def starting(self, seq: Sequence) -> list[int]:
        """Take back what a sequence was promised, while its first tokens are planned. Returns what others were promised."""
        promised = self._promises()
        self._promise(seq, promised, -1)
        return promised

    def started(self, seq: Sequence, promised: list[int]) -> None:
        """Promise a sequence the pages that it needs beyond its first tokens. `promised` is what `starting` gave."""
        self._promise(seq, promised)
        self.promised = promised

    def _promises(self) -> list[int]:
        """Pages of each group that running sequences still need for the tokens they have and the next one: not to be given away."""
        promised = self.promised
        if promised is None:
            promised = self.promised = [0] * len(self._tree.pools)
            for seq in self.running:
                self._promise(seq, promised)
        return promised

    def _short(self, seq: Sequence) -> list[int]:
        """The pages of each group that a sequence still needs for the tokens it has and the next one."""
        wanted = seq.wanted
        return self._tree.short(seq.lease, wanted, max(1, min(self._budget.most, wanted - seq.computed)))

    def _promise(self, seq: Sequence, promised: list[int], times: int = 1) -> None:
        for g, pages in enumerate(self._short(seq)):
            promised[g] += times * pages


def opening(seq: Sequence) -> Open:
    """What the runner is told of a sequence that has just taken a slot."""
    request = seq.request
    return Open(
        slot=seq.slot,
        sampling=request.sampling,
        seed=mix_seed(seq.seed, request.index),
        tokens=seq.tokens.copy(),
        prompt_len=seq.prompt_len,
        stop_ids=list(seq.stop_ids),
        adapter=request.adapter,
        spans=request.spans,
        vector=request.vector,
    )
