"""The prefix tree: owns all KV that is not being written, and lends it out as leases.

One node per page of tokens, found by those tokens under its parent; a namespace is a tree of its own. A node has a page in
each group's pool, or none where that was given up: which prefixes can be resumed then is the group's to say (groups.py).
The tree knows pages and token ids, not tensors, requests or features.

    lease.rows[g]  [ gone ... | tree ... tree | private ... private ]     a row of group g's page table
                     0 .. low | .. shared-1   | shared ..                 extend() grows all rows alike, publish() moves
                                                                          the bar right, forget() what is gone
  * in each group, every page is in exactly one of {free, tree, one lease's private part}; their sum is the pool
  * `refs[g]` counts the leases with a node's page in their row. A page without any is idle, in a list in the order in
    which pages go, never found by a scan. A lease is let go from its end, so in a group that needs prefixes whole a
    page is always behind those that continue it, and going there means going from the tree
  * a node without pages stays while it leads somewhere: to children, or to a lease that ends there (`pins`)
  * nothing enters the tree that the caller has not verified
  * a row of a sparse group has pages at some places only, always at its last; the optional ones (checkpoints, from which a
    prefix can be resumed) are taken as long as a page is left for every lease, so no lease ever waits because of them
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from quire.cache.events import DEVICE, Listener, Removed, Stored, tell
from quire.cache.groups import Full, Group
from quire.cache.invariants import Books
from quire.cache.keys import Keys
from quire.cache.pages import Lease, Node, Pool


class PrefixTree:
    """Cached prefixes over a pool for each group: `pool` for the first, `more` for others.

    `evictions` counts pages; `queries` and `hits` count tokens; `returned` counts how often leases gave pages back, so while it
    stays, no page has become available.
    """

    def __init__(
        self, pool: Pool, page_size: int, group: Group | None = None, more: Sequence[tuple[Group, Pool]] = ()
    ) -> None:
        if page_size < 1:
            raise ValueError(f"a page of {page_size} tokens: it must hold at least one")
        self.pool = pool
        self.pools = (pool, *(pool for _, pool in more))
        self.groups: tuple[Group, ...] = (group or Full(), *(group for group, _ in more))
        self.page_size = page_size
        self._all = range(len(self.pools))
        self._partial = [g for g in self._all if not self.groups[g].whole]
        self._sparse = [g for g in self._all if self.groups[g].sparse]
        self._dense = [g for g in self._all if not self.groups[g].sparse]
        self._out = 0  # leases
        self._roots: dict[str, Node] = {}
        self._idle: list[OrderedDict[Node, None]] = [OrderedDict() for _ in self._all]  # the first goes first
        self._owned = [0] * len(self.pools)  # pages in the tree
        self.keys: Keys | None = None  # of its pages, see name_pages
        self._listeners: list[Listener] = []
        self.evictions = 0
        self.queries = 0
        self.hits = 0
        self.returned = 0

    def available(self, g: int = 0) -> int:
        """Pages of a group that can be had now: free, or cached and in nobody's row."""
        return self.pools[g].free_count + len(self._idle[g])

    def cached(self, g: int = 0) -> int:
        """Pages of a group in the tree."""
        return self._owned[g]

    @property
    def rewinds(self) -> bool:
        """Whether tokens that were computed can be taken back in every group."""
        return all(group.rewinds for group in self.groups)

    def longest(self, step: int) -> int | None:
        """The longest sequence that fits when it is alone and computes `step` tokens at a time. None: any."""
        size = self.page_size
        bounds = [
            pool.size * size
            for group, pool in zip(self.groups, self.pools, strict=True)
            if group.most(1 << 60, step, size) > pool.size
        ]
        return min(bounds, default=None)

    def short(self, lease: Lease | None, upto: int, step: int) -> list[int]:
        """Pages that each group must still give before the lease has held all of `upto` tokens."""
        size = self.page_size
        if lease is None:
            return [group.most(upto, step, size) for group in self.groups]
        held = [len(row) - low for row, low in zip(lease.rows, lease.low, strict=True)]
        for g in self._sparse:
            held[g] = sum(page >= 0 for page in lease.rows[g][lease.low[g] :])
        return [max(0, group.most(upto, step, size) - held[g]) for g, group in enumerate(self.groups)]

    def fits(self, *needs: Sequence[int]) -> bool:
        """Whether every group has the pages that these need together."""
        return all(sum(need[g] for need in needs) <= self.available(g) for g in self._all)

    def match(self, namespace: str, tokens: Sequence[int], upto: int | None = None) -> Lease:
        """A lease on the longest prefix of tokens[:upto], in full pages, that every group can resume from."""
        size = self.page_size
        last = (len(tokens) if upto is None else min(upto, len(tokens))) - size
        node = root = self._roots.get(namespace)
        if node is None or root is None:
            node = root = self._roots[namespace] = Node(namespace, [], None)
        path: list[Node] = []
        at = 0
        while at <= last:
            kid = node.kids.get(tuple(tokens[at : at + size]))
            if kid is None:
                break
            path.append(kid)
            node = kid
            at += size
        rows = [[n.pages[g] for n in path] for g in self._all]
        found, count = len(path), self._agreed(rows, len(path))
        del path[count:]
        low = [group.resident(count * size)[0] // size for group in self.groups]
        for g, (row, first) in enumerate(zip(rows, low, strict=True)):
            del row[count:]
            row[:first] = [-1] * first
            for i in range(first, count):
                self._hold(path[i], g)
        lease = Lease(namespace, root, path, rows, low, count, count * size, (count + 1) * size)
        lease.node.pins += 1
        self._out += 1
        if self._sparse and last >= 0:
            self._note_checkpoints(lease, len(tokens), found)
        return lease

    def _agreed(self, rows: Sequence[Sequence[int]], count: int) -> int:
        """The longest prefix of at most `count` pages that every group can resume from, when these rows are cached."""
        before = -1
        while count != before:
            before = count
            for row, group in zip(rows, self.groups, strict=True):
                count = group.resumable(row, count, self.page_size)
        return count

    def resumable(self, more: Sequence[Sequence[int]], lease: Lease) -> int:
        """Pages that could be resumed, if behind the lease's there were these as well in each group: -1 for one missing."""
        rows = [[*row[: lease.shared], *new] for row, new in zip(lease.rows, more, strict=True)]
        whole = [row.index(-1) for row, group in zip(rows, self.groups, strict=True) if group.whole and -1 in row]
        return self._agreed(rows, min([*whole, *map(len, rows)]))

    def stage(self, lease: Lease, upto: int) -> bool:
        """Private pages for what must be there to go on at `upto`, which a whole number of pages ends at: somebody fills and
        then publishes them. False: there is no room, and nothing changed. Nothing else can be done with the lease then."""
        size, held = self.page_size, len(lease.rows[0])
        need = upto // size - held
        lows = [max(low, group.resident(upto)[0] // size) for low, group in zip(lease.low, self.groups, strict=True)]
        wants = [min(need, upto // size - low) for low in lows]
        if any(want > self.available(g) for g, want in enumerate(wants)):
            return False
        for g, want in enumerate(wants):
            lease.rows[g] += [-1] * (need - want) + self._take(g, want)
        self.forget(lease, upto)
        lease.dirty, lease.room = min(lease.dirty, held), upto
        return True

    def _note_checkpoints(self, lease: Lease, tokens: int, found: int) -> None:
        """Note the places in a lease's rows of sparse groups where a page is worth keeping, such as one where other sequences
        left this prefix."""
        ends, some = {found - 1} if found > lease.matched else set[int](), set[int]()
        for g in self._sparse:
            likely, others = self.groups[g].checkpoints(tokens, self.page_size)
            ends.update(likely)
            some.update(others)
        lease.likely, lease.checkpoints = frozenset(ends), frozenset(ends | some)

    def count(self, queried: int, hit: int) -> None:
        """Note a lookup that was used. The caller says so, since one that finds no room is tried again each step."""
        self.queries += queried
        self.hits += hit

    def extend(self, lease: Lease, upto: int) -> bool:
        """Private pages in every group until the lease holds `upto` tokens. False: there is no room, and nothing changed."""
        held = len(lease.rows[0])
        need = -(-upto // self.page_size) - held
        if need <= 0:
            return True
        for g in self._dense:
            if need > self.available(g):
                return False
        for g in self._sparse:
            if not self.available(g) and not self._drop_checkpoints(lease, g):
                return False
        for g in self._dense:
            lease.rows[g] += self._take(g, need)
        for g in self._sparse:
            lease.rows[g] += self._some(lease, g, held, need)
        lease.dirty = min(lease.dirty, held)
        lease.room = (held + need) * self.page_size
        return True

    def _take(self, g: int, need: int) -> list[int]:
        """Take so many pages, which must be available."""
        pool = self.pools[g]
        if need > pool.free_count:
            self.evict(need - pool.free_count, g)
        pages = pool.alloc(need)
        if pages is None:
            raise RuntimeError(f"{need} pages were counted as available, but only {pool.free_count} are")
        return pages

    def _drop_checkpoints(self, lease: Lease, g: int) -> bool:
        """Let go of all but the last page of a sparse row: steps are executed in order, and the next one goes on from there."""
        row = lease.rows[g]
        for i in range(lease.low[g], len(row) - 1):
            page, row[i] = row[i], -1
            if page >= 0 and i >= len(lease.path):
                self.pools[g].free([page])
            elif page >= 0:
                self._let_go(lease.path[i], g)
        self.returned += 1
        return self.available(g) > 0

    def _some(self, lease: Lease, g: int, held: int, need: int) -> list[int]:
        """Take a page for the last of `need` more places in a sparse row, and for those worth one while there are enough."""
        row = [-1] * need
        row[-1:] = self._take(g, 1)
        wanted = lease.checkpoints.intersection(range(held, held + need - 1))
        for at in sorted(wanted, key=lambda at: (at not in lease.likely, -at)):
            if self.available(g) <= self._out:
                break
            row[at - held : at - held + 1] = self._take(g, 1)
        return row

    def publish(self, lease: Lease, tokens: Sequence[int], upto: int | None = None) -> None:
        """Give the full pages of tokens[:upto] to the tree. Their KV must be present and verified.

        Where the tree has such a page already, the lease's row is rewritten to it, and then the duplicate is freed.
        """
        size, path = self.page_size, lease.path
        full = (len(tokens) if upto is None else min(upto, len(tokens))) // size
        if full <= len(path):
            return
        node = old = lease.node
        duplicates: list[tuple[Pool, int]] = []
        for i in range(len(path), full):
            key = tuple(tokens[i * size : (i + 1) * size])
            kid = node.kids.get(key)
            if kid is None:
                kid = node.kids[key] = Node(key, [-1] * len(self.pools), node)
            self._give(lease, i, kid, duplicates)
            path.append(kid)
            node = kid
        node.pins += 1
        old.pins -= 1
        for pool, page in duplicates:
            pool.free([page])
            self.returned += 1

    # ---- who else knows of it

    def name_pages(self, keys: Keys) -> None:
        """Give pages keys from now on. Listeners are told of those that are cached already."""
        if self.keys is not None:
            raise RuntimeError("the pages of this tree have keys already")
        self.keys = keys
        if self._listeners:
            self._tell_all(None)

    def listen(self, listener: Listener) -> None:
        """Tell a listener of every page that is cached now, and of every change after. Nothing is told before pages have keys."""
        self._listeners.append(listener)
        if self.keys is not None:
            self._tell_all(listener)

    def unlisten(self, listener: Listener) -> None:
        """Take a listener off: it is told nothing more."""
        self._listeners = [other for other in self._listeners if other is not listener]

    def address(self, node: Node) -> bytes | None:
        """The key of a node's page; of a root, where its chain begins. None as long as pages have no keys."""
        if node.address is None and self.keys is not None:
            above = [node]
            while above[-1].address is None and above[-1].parent is not None:
                above.append(above[-1].parent)
            for each in reversed(above):
                if each.address is None and each.parent is None:
                    each.address = self.keys.root(str(each.key))
                elif each.address is None:
                    before = each.parent.address if each.parent else None
                    assert before is not None and isinstance(each.key, tuple)
                    each.address = self.keys.key(before, each.key)
        return node.address

    def _tell_all(self, only: Listener | None) -> None:
        """Tell a listener of all pages that are cached, those in front first."""
        for node in self._walk():
            for g in self._all:
                if node.parent is not None and node.pages[g] >= 0:
                    self._tell_stored(node, g, only)

    def _tell_stored(self, node: Node, g: int, only: Listener | None = None) -> None:
        key, parent = self.address(node), node.parent
        if key is None or parent is None or isinstance(node.key, str):
            return
        before = None if parent.parent is None else parent.address
        tell(self._listeners, Stored(key, before, node.key, g, DEVICE, node.pages[g]), only)

    def _tell_removed(self, node: Node, g: int, page: int) -> None:
        key = self.address(node)
        if key is not None:
            tell(self._listeners, Removed(key, g, DEVICE, page))

    # ---- inside

    def _give(self, lease: Lease, i: int, node: Node, duplicates: list[tuple[Pool, int]]) -> None:
        """Move the i-th pages of a lease to a node, or the other way round where the node has them."""
        for g, row in enumerate(lease.rows):
            page = row[i]
            if page < 0:
                continue
            if node.pages[g] < 0:
                node.pages[g] = page
                node.refs[g] = 1
                self._owned[g] += 1
                if self._listeners:
                    self._tell_stored(node, g)
                continue
            duplicates.append((self.pools[g], page))
            row[i] = node.pages[g]
            self._hold(node, g)
            lease.dirty = min(lease.dirty, i)

    def forget(self, lease: Lease, at: int) -> None:
        """Give back the pages of a lease that no group needs to compute position `at` or a later one.

        What this lease computed and leaves behind is the first to go: nobody has asked for it yet. What it found there
        was asked for, and counts as used now; so does what will likely be.
        """
        size = self.page_size
        lease.due = (at // size + 1) * size
        for g in self._partial:
            row, first = lease.rows[g], lease.low[g]
            low = min(self.groups[g].resident(at)[0] // size, len(row))
            for i in range(first, low):
                page, row[i] = row[i], -1
                if page < 0:
                    continue
                self.returned += 1
                if i >= len(lease.path):
                    self.pools[g].free([page])
                elif self._let_go(lease.path[i], g) and i >= lease.matched and i not in lease.likely:
                    self._idle[g].move_to_end(lease.path[i], last=False)
            lease.low[g] = max(first, low)

    def release(self, lease: Lease) -> None:
        """End a lease: private pages are freed, shared ones stay cached. It is empty afterwards."""
        path, node = lease.path, lease.node
        if not node.pins:
            raise RuntimeError("a lease was released that is not out: twice, perhaps")
        for g, row in enumerate(lease.rows):
            self.pools[g].free([page for page in row[len(path) :] if page >= 0])
            for i in range(len(path) - 1, lease.low[g] - 1, -1):
                if row[i] >= 0:
                    self._let_go(path[i], g)
        node.pins -= 1
        self._out -= 1
        self.returned += 1
        self._prune(node)
        lease.root = Node(lease.namespace, [], None)  # never pinned: a second release is an error
        lease.path, lease.rows, lease.low = [], [[] for _ in self._all], [0] * len(self.pools)
        lease.dirty = lease.matched = lease.room = 0

    def evict(self, count: int, g: int = 0) -> int:
        """Free up to `count` cached pages of a group, those that go first; returns how many."""
        idle = self._idle[g]
        whole = self.groups[g].whole
        done = 0
        while done < count and idle:
            node = next(iter(idle))
            if whole and (node.kids or node.pins):
                raise RuntimeError("a page was about to go before one that continues it")
            for other in self._all if whole else (g,):  # a prefix that is whole no more is of no use to any group
                self._drop(node, other)
            self._prune(node)
            done += 1
        return done

    def _drop(self, node: Node, g: int) -> None:
        """Free a node's page in a group, if it has one."""
        if node.pages[g] < 0:
            return
        if node.refs[g]:
            raise RuntimeError("a page that is in a row was about to be freed")
        self._idle[g].pop(node, None)
        page, node.pages[g] = node.pages[g], -1
        self.pools[g].free([page])
        self._owned[g] -= 1
        self.evictions += 1
        if self._listeners:
            self._tell_removed(node, g, page)

    def _hold(self, node: Node, g: int) -> None:
        if not node.refs[g]:
            del self._idle[g][node]
        node.refs[g] += 1

    def _let_go(self, node: Node, g: int) -> bool:
        """Count one lease less on a page. True: that was the last, and the page is idle now."""
        node.refs[g] -= 1
        if node.refs[g] < 0:
            raise RuntimeError("a page was let go more often than it was taken")
        if node.refs[g]:
            return False
        self._idle[g][node] = None
        return True

    def _prune(self, node: Node) -> None:
        """Take a node from the tree that has no page and leads nowhere, and its parents likewise."""
        while not node.kids and not node.pins and max(node.pages, default=-1) < 0:
            parent = node.parent
            if parent is None:
                self._roots.pop(str(node.key), None)
                return
            del parent.kids[node.key]
            node = parent

    def _walk(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.kids.values())
            yield node

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise RuntimeError unless every invariant of this file holds. `leases` are all that are out."""
        Books(self.groups, self.pools, self._roots, self._idle, self._owned, self._out, self.page_size).check(
            list(self._walk()), list(leases)
        )
