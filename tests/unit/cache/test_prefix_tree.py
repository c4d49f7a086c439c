"""The prefix tree, one rule at a time. Pages hold 4 tokens here."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from quire.cache.groups import Full
from quire.cache.pages import Pool
from quire.cache.prefix_tree import Lease, PrefixTree

P = 4


def make(pages: int = 16) -> PrefixTree:
    return PrefixTree(Pool(pages), P)


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def compute(tree: PrefixTree, ids: list[int], namespace: str = "") -> Lease:
    """A lease on all of ids, computed and published."""
    lease = tree.match(namespace, ids)
    assert tree.extend(lease, len(ids))
    tree.publish(lease, ids)
    return lease


def cache(tree: PrefixTree, ids: list[int], namespace: str = "") -> list[int]:
    """Leave a prefix in the tree; returns its pages."""
    lease = compute(tree, ids, namespace)
    pages = lease.pages[: lease.shared]
    tree.release(lease)
    return pages


def test_match_takes_full_pages_only() -> None:
    tree = make()
    pages = cache(tree, tokens(11))
    lease = tree.match("", tokens(11))
    assert (lease.shared, lease.pages) == (2, pages)
    assert tree.match("", tokens(8)).shared == 2
    assert tree.match("", tokens(7)).shared == 1
    assert tree.match("", tokens(3)).shared == 0


def test_match_can_be_told_where_to_stop() -> None:
    tree = make()
    cache(tree, tokens(8))
    assert tree.match("", tokens(8), 7).shared == 1
    assert tree.match("", tokens(8), 8).shared == 2
    assert tree.match("", tokens(8), 0).shared == 0


def test_match_follows_the_longest_branch() -> None:
    tree = make()
    first = cache(tree, [1] * 4 + [2] * 4)
    second = cache(tree, [1] * 4 + [3] * 4)
    assert first[0] == second[0] and first[1] != second[1]
    assert tree.match("", [1] * 4 + [3] * 4 + [9]).pages == second
    assert tree.match("", [1] * 4 + [5] * 4).pages == first[:1]


def test_namespaces_share_nothing_and_leave_nothing() -> None:
    tree = make(4)
    cache(tree, tokens(8), "a")
    lease = tree.match("b", tokens(8))
    assert lease.shared == 0
    tree.release(lease)
    assert list(tree._roots) == ["a"]
    assert tree.evict(2) == 2
    assert not tree._roots
    tree.check([])


def test_extend_gives_private_pages() -> None:
    tree = make()
    lease = tree.match("", [])
    assert tree.extend(lease, 5)
    assert len(lease.pages) == 2 and lease.shared == 0
    assert tree.extend(lease, 8) and len(lease.pages) == 2
    tree.check([lease])


def test_extend_without_room_changes_nothing() -> None:
    tree = make(4)
    cached = cache(tree, tokens(8))
    mine = tree.match("", tokens(4))  # pins the first of the cached pages: three are left
    assert not tree.extend(mine, 5 * P)
    assert tree.cached() == 2 and tree.evictions == 0 and mine.pages == cached[:1] and mine.dirty == 0
    assert tree.extend(mine, 4 * P)
    assert tree.evictions == 1
    tree.check([mine])


def test_a_duplicate_row_is_rewritten_and_its_page_freed() -> None:
    tree = make()
    one, two = tree.match("", tokens(8)), tree.match("", tokens(8))
    assert tree.extend(one, 9) and tree.extend(two, 9)
    for lease in (one, two):
        assert lease.changes() == (0, lease.pages, [])
    own = list(two.pages)
    tree.publish(one, tokens(9))
    tree.publish(two, tokens(9))
    assert two.pages == one.pages[:2] + own[2:]
    assert set(own[:2]) <= set(tree.pool.free_pages)
    assert one.changes() == (0, [], [])
    assert two.changes() == (0, two.pages, [])
    tree.check([one, two])


def test_publish_in_parts_moves_the_bar() -> None:
    tree = make()
    lease = tree.match("", [])
    assert tree.extend(lease, 12)
    tree.publish(lease, tokens(12), 3)
    assert lease.shared == 0
    tree.publish(lease, tokens(12), 5)
    assert lease.shared == 1
    tree.publish(lease, tokens(12), 4)  # going back is nothing
    assert lease.shared == 1
    tree.publish(lease, tokens(12))
    assert lease.shared == 3
    tree.check([lease])


def test_changes_are_told_once_and_from_the_lowest() -> None:
    tree = make()
    cache(tree, tokens(4))
    lease = tree.match("", tokens(4))
    assert lease.changes() == (0, lease.pages, [])
    assert tree.extend(lease, 9)
    assert lease.changes() == (1, lease.pages[1:], [])
    assert lease.changes() == (0, [], [])
    rival = compute(tree, tokens(8))
    tree.publish(lease, tokens(8))
    assert tree.extend(lease, 13)
    assert lease.changes() == (1, lease.pages[1:], [])
    assert lease.pages[:2] == rival.pages


def test_eviction_is_by_last_use() -> None:
    tree = make()
    a, b, c = (cache(tree, [x] * 4) for x in (1, 2, 3))
    tree.release(tree.match("", [1] * 4))
    assert tree.evict(2) == 2
    assert tree.match("", [1] * 4).pages == a
    assert {*b, *c} <= set(tree.pool.free_pages)
    assert tree.evictions == 2


def test_an_old_chain_goes_before_a_newer_page() -> None:
    tree = make()
    cache(tree, tokens(12))
    newer = cache(tree, [7] * 4)
    assert tree.evict(3) == 3
    assert tree.match("", [7] * 4).pages == newer
    assert tree.match("", tokens(12)).shared == 0


def test_a_parent_used_by_itself_outlives_its_old_child() -> None:
    tree = make()
    cache(tree, tokens(8))
    cache(tree, [7] * 4)
    tree.release(tree.match("", tokens(4)))
    assert tree.evict(2) == 2  # the child, then [7]: the parent was used since
    assert tree.match("", tokens(8)).shared == 1


def test_what_is_leased_is_not_evicted() -> None:
    tree = make(4)
    cache(tree, tokens(12))
    lease = tree.match("", tokens(8))
    assert tree.available() == 2
    assert tree.evict(99) == 1
    again = tree.match("", tokens(12))
    assert again.pages == lease.pages
    tree.check([lease, again])


def test_available_counts_what_eviction_could_free() -> None:
    tree = make(8)
    cache(tree, tokens(8))
    cache(tree, tokens(4) + [9] * 4)
    assert (tree.cached(), tree.available()) == (3, 8)
    lease = tree.match("", tokens(8))
    assert tree.available() == 6
    other = tree.match("", tokens(8))
    assert tree.available() == 6
    tree.release(lease)
    assert tree.available() == 6
    tree.release(other)
    assert tree.available() == 8
    tree.check([])


def test_release_twice_is_an_error() -> None:
    tree = make()
    lease = compute(tree, tokens(8))
    keep = tree.match("", tokens(8))
    tree.release(lease)
    with pytest.raises(RuntimeError, match="twice"):
        tree.release(lease)
    tree.check([keep])


def test_a_group_may_shorten_what_can_be_resumed() -> None:
    class Pairs(Full):
        """Resumes at even counts of pages."""

        def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
            return pages - pages % 2

    tree = PrefixTree(Pool(8), P, Pairs())
    pages = cache(tree, tokens(12))
    lease = tree.match("", tokens(12))
    assert (lease.shared, lease.pages) == (2, pages[:2])
    tree.check([lease])


def test_full_attention_needs_everything() -> None:
    assert Full().resumable([0] * 7, 7, P) == 7
    assert Full().resident(33) == (0, 33)


@pytest.mark.parametrize("seed", range(20))
def test_random_leases_against_a_plain_model(seed: int) -> None:
    """Any mix of calls keeps the invariants, and a match is exactly the pages that a set of prefixes says."""
    rng = random.Random(seed)
    tree = make(24)
    held: list[tuple[Lease, list[int]]] = []
    for _ in range(300):
        roll = rng.random()
        if roll < 0.5:
            ids = [rng.randrange(2) for _ in range(rng.randint(0, 20))]
            name = rng.choice(["", "x"])
            known = {(n.key, id(n.parent)): n for n in tree._walk()}
            depth, parent = 0, tree._roots.get(name)
            while parent is not None:
                parent = known.get((tuple(ids[depth * P : depth * P + P]), id(parent)))
                depth += parent is not None
            lease = tree.match(name, ids)
            assert lease.shared == depth
            held.append((lease, ids))
            if tree.extend(lease, len(ids)) and rng.random() < 0.8:
                tree.publish(lease, ids, rng.randint(0, len(ids)))
        elif roll < 0.9 and held:
            tree.release(held.pop(rng.randrange(len(held)))[0])
        else:
            tree.evict(rng.randint(1, 3))
        tree.check(lease for lease, _ in held)
    for lease, _ in held:
        tree.release(lease)
    tree.evict(99)
    tree.check([])
    assert tree.pool.free_count == 24 and not tree._roots


def test_check_sees_a_lost_page() -> None:
    tree = make()
    lease = compute(tree, tokens(9))
    lease.pages.pop()
    with pytest.raises(RuntimeError, match="lost"):
        tree.check([lease])


def test_eviction_does_not_scan() -> None:
    """Evicting from a tree ten times the size takes about as long for each page."""

    def each(pages: int) -> float:
        tree = PrefixTree(Pool(pages), 1)
        for i in range(pages):
            cache(tree, [i])
        before = time.process_time()
        tree.evict(pages)
        return (time.process_time() - before) / pages

    small = min(each(1000) for _ in range(3))
    assert each(20000) < 8 * small
