"""What the prefix tree is made of, and what it lends: nodes and leases. They hold no rules; prefix_tree.py has those."""

from __future__ import annotations

from dataclasses import dataclass


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
