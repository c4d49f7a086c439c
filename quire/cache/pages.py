"""Pages, and what can hold one: the free list of a pool, a node of the prefix tree, or a lease that the tree has lent out.

Pages are ints; what they store is not known here. These hold no rules about prefixes; prefix_tree.py has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class Pool:
    """The free list of `size` pages, numbered from 0.

    Last freed, first reused: such a page is the likeliest to be warm in a CPU cache. A page freed twice would be handed to
    two owners, so that is an error here and now, not wrong tokens later.
    """

    __slots__ = ("_free", "_held", "size")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} pages: it must have at least one")
        self.size = size
        self._free = list(range(size - 1, -1, -1))  # popped from the end: page 0 goes first
        self._held = bytearray(size)

    @property
    def free_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        """The pages that are free, for invariant checks."""
        return tuple(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when there are fewer."""
        free, held = self._free, self._held
        if count <= 0:
            return []
        if count > len(free):
            return None
        pages = free[-count:]
        del free[-count:]
        for page in pages:
            held[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Hand pages back. Raises RuntimeError for a page that is free already, or not of this pool."""
        held = self._held
        for page in pages:
            if not (0 <= page < self.size and held[page]):
                raise RuntimeError(f"page {page} freed, but nobody holds it (the pool has {self.size} pages)")
            held[page] = 0
            self._free.append(page)


class Node:
    """One full page of tokens of one prefix. `pages[g]` is its page in group g, or -1; a root has its namespace for a key."""

    __slots__ = ("address", "key", "kids", "pages", "parent", "pins", "refs")

    def __init__(self, key: tuple[int, ...] | str, pages: list[int], parent: Node | None) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent  # None: the root of a namespace
        self.kids: dict[tuple[int, ...] | str, Node] = {}
        self.pins = 0  # leases that end here
        self.refs = [0] * len(pages)
        self.address: bytes | None = None  # its content key (keys.py), once somebody has asked for it


@dataclass(slots=True, eq=False)
class Lease:
    """The right to one row of pages in each group. The rows are equally long; -1 stands where a page is gone."""

    namespace: str
    root: Node
    path: list[Node]  # a node for each shared page
    rows: list[list[int]]  # rows[g][: len(path)] are the tree's, the rest is this lease's alone
    low: list[int]  # rows[g][: low[g]] are gone
    matched: int  # pages that were found, not computed
    room: int  # tokens that the rows have pages for
    due: int  # with that many tokens verified there is a page to publish, and perhaps one to forget
    dirty: int = 0  # rows[g][dirty:] may differ from what the runner was last told
    checkpoints: frozenset[int] = frozenset()  # places in the rows of sparse groups where a page is worth having ...
    likely: frozenset[int] = frozenset()  # ... and those among them that somebody will likely ask for

    @property
    def shared(self) -> int:
        """Pages that belong to the tree."""
        return len(self.path)

    @property
    def pages(self) -> list[int]:
        """The row of the first group."""
        return self.rows[0]

    @property
    def node(self) -> Node:
        """The deepest node it has."""
        return self.path[-1] if self.path else self.root

    def changes(self) -> tuple[int, list[int], list[list[int]]]:
        """The changes that the runner has to be told now: where the rows change, the first group's new end, and those of further
        groups.

        Empty when nothing changed.
        """
        dirty, first = self.dirty, self.rows[0]
        if dirty >= len(first):
            return 0, [], []
        self.dirty = len(first)
        return dirty, first[dirty:], [row[dirty:] for row in self.rows[1:]]
