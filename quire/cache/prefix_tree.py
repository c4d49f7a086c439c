"""The prefix tree: owns all KV that is not being written, and lends it out as leases.

One node per page, found by the page's tokens under its parent; a namespace is a tree of its own. It knows pages and
token ids, not tensors, requests or features.

    lease.pages   [ tree ... tree | private ... private ]      a row of the page table
                    0 .. shared-1 | shared ..                  extend() grows it, publish() moves the bar right

  * every page is in exactly one of {free, tree, one lease's private tail}; their sum is the pool
  * a lease pins its deepest node; `pins` counts those plus pinned children, so a node with pins == 0 has no lease
    below it. A walk up stops at the first node that stays pinned: each step is paid for by a matched or published page
  * only unpinned leaves are evicted, from a list in order of last use, never by a scan
  * nothing enters the tree that the caller has not verified
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from quire.cache.groups import Full, Group
from quire.cache.pool import Pool


class Node:
    """One full page of one prefix. `pages[g]` is its page in group g; a root has none, and its namespace for a key."""

    __slots__ = ("key", "kids", "pages", "parent", "pins", "tick")

    def __init__(self, key: tuple[int, ...] | str, pages: tuple[int, ...], parent: Node | None) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent  # None: the root of a namespace
        self.kids: dict[tuple[int, ...] | str, Node] = {}
        self.pins = 0  # leases that end here, plus children with pins
        self.tick = 0  # when a lease that ended here was last released


@dataclass(slots=True, eq=False)
class Lease:
    """The right to one row of pages. A second group adds a second row; the node stays one."""

    namespace: str
    node: Node  # the deepest node it holds
    shared: int  # pages[:shared] belong to the tree, the rest to this lease alone
    pages: list[int]
    dirty: int = 0  # pages[dirty:] may differ from what the runner was last told

    def changes(self) -> tuple[list[int], int]:
        """What to tell the runner now: the row's new end, and where it begins. Empty when nothing changed."""
        dirty, pages = self.dirty, self.pages
        if dirty >= len(pages):
            return [], 0
        self.dirty = len(pages)
        return pages[dirty:], dirty


class PrefixTree:
    """Cached prefixes over a pool. `evictions` counts pages; `queries` and `hits` count tokens."""

    def __init__(self, pool: Pool, page_size: int, group: Group | None = None) -> None:
        if page_size < 1:
            raise ValueError(f"a page of {page_size} tokens: it must hold at least one")
        self.pool = pool
        self.page_size = page_size
        self._group: Group = group or Full()
        self._roots: dict[str, Node] = {}
        self._leaves: OrderedDict[Node, None] = OrderedDict()  # unpinned, least recently used first
        self._clock = 0
        self._owned = 0  # nodes with a page
        self._pinned = 0  # of those, with pins
        self.evictions = 0
        self.queries = 0
        self.hits = 0

    @property
    def available(self) -> int:
        """Pages that can be had now: free, or cached and not pinned."""
        return self.pool.free_count + self._owned - self._pinned

    @property
    def cached(self) -> int:
        """Pages in the tree."""
        return self._owned

    def match(self, namespace: str, tokens: Sequence[int], upto: int | None = None) -> Lease:
        """A lease on the longest cached prefix of tokens[:upto], in full pages. It is pinned from here on."""
        size = self.page_size
        last = (len(tokens) if upto is None else min(upto, len(tokens))) - size
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = Node(namespace, (), None)
        pages: list[int] = []
        at = 0
        while at <= last:
            kid = node.kids.get(tuple(tokens[at : at + size]))
            if kid is None:
                break
            node = kid
            pages.append(node.pages[0])
            at += size
        for _ in range(len(pages) - self._group.resumable(len(pages))):
            pages.pop()
            node = node.parent or node
        self._pin(node)
        return Lease(namespace, node, len(pages), pages)

    def count(self, queried: int, hit: int) -> None:
        """Note a lookup that was used. The caller says so, since one that finds no room is tried again each step."""
        self.queries += queried
        self.hits += hit

    def extend(self, lease: Lease, upto: int) -> bool:
        """Private pages until the lease holds `upto` tokens. False: there is no room, and nothing changed."""
        need = -(-upto // self.page_size) - len(lease.pages)
        if need <= 0:
            return True
        short = need - self.pool.free_count
        if short > 0:
            if short > self._owned - self._pinned:
                return False
            self.evict(short)
        pages = self.pool.alloc(need)
        if pages is None:
            raise RuntimeError(f"{need} pages were counted as available, but only {self.pool.free_count} are")
        lease.dirty = min(lease.dirty, len(lease.pages))
        lease.pages += pages
        return True

    def publish(self, lease: Lease, tokens: Sequence[int], upto: int | None = None) -> None:
        """Give the full pages of tokens[:upto] to the tree. Their KV must be present and verified.

        Where the tree has such a page already, the lease's row is rewritten to it, and then the duplicate is freed.
        """
        size = self.page_size
        full = (len(tokens) if upto is None else min(upto, len(tokens))) // size
        if full <= lease.shared:
            return
        node = lease.node
        duplicates: list[int] = []
        for i in range(lease.shared, full):
            key = tuple(tokens[i * size : (i + 1) * size])
            kid = node.kids.get(key)
            if kid is None:
                if not node.kids:
                    self._leaves.pop(node, None)  # an unpinned leaf no longer
                kid = node.kids[key] = Node(key, (lease.pages[i],), node)
                self._owned += 1
            else:
                duplicates.append(lease.pages[i])
                lease.pages[i] = kid.pages[0]
                lease.dirty = min(lease.dirty, i)
            node = kid
        self._pin(node)  # before the old pin goes: the path is never without one
        self._unpin(lease.node)
        lease.node = node
        lease.shared = full
        self.pool.free(duplicates)

    def release(self, lease: Lease) -> None:
        """Let go: private pages are freed, shared ones stay cached. The lease is empty afterwards."""
        self.pool.free(lease.pages[lease.shared :])
        self._clock += 1
        lease.node.tick = self._clock
        self._unpin(lease.node)
        lease.pages = []
        lease.shared = lease.dirty = 0
        lease.node = Node(lease.namespace, (), None)  # never pinned: a second release is an error

    def evict(self, count: int) -> int:
        """Free up to `count` cached pages, least recently used first; returns how many."""
        done = 0
        while done < count and self._leaves:
            node, _ = self._leaves.popitem(last=False)
            parent = node.parent
            if parent is None:
                raise RuntimeError("a root is in the list of leaves")
            del parent.kids[node.key]
            self.pool.free(node.pages)
            self._owned -= 1
            done += 1
            if parent.kids or parent.pins:
                continue
            if parent.parent is None:
                self._drop(parent)
                continue
            # A parent is as recent as its child: next in line. One that was used by itself since gets a new round.
            self._leaves[parent] = None
            if parent.tick <= node.tick:
                parent.tick = node.tick
                self._leaves.move_to_end(parent, last=False)
        self.evictions += done
        return done

    def _pin(self, node: Node) -> None:
        if not node.pins and not node.kids:
            self._leaves.pop(node, None)
        while True:
            node.pins += 1
            if node.pins > 1 or node.parent is None:
                return
            self._pinned += 1
            node = node.parent

    def _unpin(self, node: Node) -> None:
        leaf = node
        while True:
            node.pins -= 1
            if node.pins < 0:
                raise RuntimeError("a node was unpinned more often than it was pinned")
            if node.pins:
                break
            if node.parent is None:
                self._drop(node)
                break
            self._pinned -= 1
            node = node.parent
        if not leaf.pins and not leaf.kids and leaf.parent is not None:
            self._leaves[leaf] = None

    def _drop(self, root: Node) -> None:
        """Forget a namespace once it holds no page and no lease."""
        if not root.kids and not root.pins:
            self._roots.pop(str(root.key), None)

    def _walk(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.kids.values())
            yield node

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise RuntimeError unless every invariant of this file holds. `leases` are all that are out."""
        leases = list(leases)
        nodes = list(self._walk())
        paged = [n for n in nodes if n.parent is not None]
        pages = [*self.pool.free_pages]
        pages += [n.pages[0] for n in paged]
        for lease in leases:
            pages += lease.pages[lease.shared :]
        if sorted(pages) != list(range(self.pool.size)):
            twice = sorted({p for p in pages if pages.count(p) > 1})
            lost = sorted(set(range(self.pool.size)) - set(pages))
            raise RuntimeError(f"page partition broken: held twice {twice}, lost {lost}")
        ends: dict[Node, int] = {}
        for lease in leases:
            ends[lease.node] = ends.get(lease.node, 0) + 1
            node, path = lease.node, []
            while node.parent is not None:
                path.append(node.pages[0])
                node = node.parent
            if node is not self._roots.get(lease.namespace) or path[::-1] != lease.pages[: lease.shared]:
                raise RuntimeError("a lease's shared pages are not the path to its node")
        for node in nodes:
            if node.pins != ends.get(node, 0) + sum(1 for kid in node.kids.values() if kid.pins):
                raise RuntimeError(f"a node has {node.pins} pins: its leases and children say otherwise")
        leaves = {n for n in paged if not n.kids and not n.pins}
        pinned = sum(1 for n in paged if n.pins)
        if leaves != set(self._leaves) or len(paged) != self._owned or pinned != self._pinned:
            raise RuntimeError("the list of leaves or the counts do not agree with the tree")
        if any(not n.kids and not n.pins for n in self._roots.values()):
            raise RuntimeError("an empty namespace was kept")
