"""The invariants of the prefix tree, as a check that reads everything: for tests, which call it after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from quire.cache.groups import Group
from quire.cache.pages import Lease, Node, Pool


@dataclass(frozen=True, slots=True)
class Books:
    """The accounts that a tree keeps of its pages; see PrefixTree."""

    groups: Sequence[Group]
    pools: Sequence[Pool]
    roots: Mapping[str, Node]
    idle: Sequence[Mapping[Node, None]]
    owned: Sequence[int]
    out: int
    page_size: int

    def check(self, nodes: list[Node], leases: list[Lease]) -> None:
        """Raise RuntimeError unless every invariant holds. `nodes` are all of the tree, `leases` all that are out."""
        for g in range(len(self.pools)):
            self._check_group(g, [n for n in nodes if n.parent is not None], leases)
        ends: dict[Node, int] = {}
        for lease in leases:
            ends[lease.node] = ends.get(lease.node, 0) + 1
            above = [lease.root, *lease.path]
            if lease.root is not self.roots.get(lease.namespace) or any(
                kid.parent is not parent for parent, kid in pairwise(above)
            ):
                raise RuntimeError("a lease's shared pages are not the path to its node")
            if len({len(row) for row in lease.rows}) > 1 or lease.room != len(lease.rows[0]) * self.page_size:
                raise RuntimeError("a lease's rows are not equally long")
        if self.out != len(leases):
            raise RuntimeError(f"{self.out} leases are counted, and {len(leases)} are out")
        for node in nodes:
            if node.pins != ends.get(node, 0):
                raise RuntimeError(f"a node has {node.pins} pins, and {ends.get(node, 0)} leases end there")
            if not node.kids and not node.pins and max(node.pages, default=-1) < 0:
                raise RuntimeError("an empty namespace was kept" if node.parent is None else "an empty node was kept")

    def _check_group(self, g: int, nodes: list[Node], leases: list[Lease]) -> None:
        pool, group = self.pools[g], self.groups[g]
        have = [n for n in nodes if n.pages[g] >= 0]
        pages = [*pool.free_pages]
        pages += [n.pages[g] for n in have]
        refs: dict[Node, int] = {}
        for lease in leases:
            row, shared, low = lease.rows[g], lease.shared, lease.low[g]
            pages += [page for page in row[shared:] if page >= 0]
            needed = row[-1:] if group.sparse else row[low:]
            if max(row[:low], default=-1) >= 0 or min(needed, default=0) < 0:
                raise RuntimeError(f"group {g}: a lease's row does not begin where it says")
            for node, page in zip(lease.path[low:], row[low:shared], strict=True):
                if page < 0:
                    continue
                refs[node] = refs.get(node, 0) + 1
                if node.pages[g] != page:
                    raise RuntimeError(f"group {g}: a lease's shared pages are not those of its nodes")
        if sorted(pages) != list(range(pool.size)):
            twice = sorted({p for p in pages if pages.count(p) > 1})
            lost = sorted(set(range(pool.size)) - set(pages))
            raise RuntimeError(f"group {g}: page partition broken: held twice {twice}, lost {lost}")
        if any(n.refs[g] != refs.get(n, 0) for n in nodes):
            raise RuntimeError(f"group {g}: a page is in more or fewer rows than it says")
        if {n for n in have if not n.refs[g]} != set(self.idle[g]) or len(have) != self.owned[g]:
            raise RuntimeError(f"group {g}: the idle pages or the count do not agree with the tree")
        place = {node: i for i, node in enumerate(self.idle[g])}
        if group.whole and (
            len(have) != len(nodes) or any(place.get(k, -1) > at for n, at in place.items() for k in n.kids.values())
        ):
            raise RuntimeError(f"group {g}: a page would go before one that continues it")
