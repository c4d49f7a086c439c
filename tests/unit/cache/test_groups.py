"""Groups: what a window answers, against plain loops, and what the tree makes of several of them. Pages hold 4 tokens."""

from __future__ import annotations

import random

import pytest

from quire.cache.groups import Full, State, Window
from quire.cache.pages import Pool
from quire.cache.prefix_tree import Lease, PrefixTree

P = 4


def make(full: int, width: int, pages: int) -> PrefixTree:
    """Layers that keep everything, and layers with a window."""
    return PrefixTree(Pool(full), P, Full(), [(Window(width), Pool(pages))])


def tokens(n: int, first: int = 0) -> list[int]:
    return list(range(first, first + n))


def walk(tree: PrefixTree, ids: list[int], step: int = P, namespace: str = "") -> Lease:
    """A lease on all of ids, computed `step` tokens at a time and published, as the scheduler would."""
    lease = tree.match(namespace, ids)
    at = lease.shared * P
    while at < len(ids):
        at = min(len(ids), at + step)
        assert tree.extend(lease, at)
        tree.publish(lease, ids, at)
        tree.forget(lease, at)
        tree.check([lease])
    return lease


def cache(tree: PrefixTree, ids: list[int], step: int = P) -> None:
    tree.release(walk(tree, ids, step))
    tree.check([])


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8, 9, 13, 100])
def test_what_a_window_can_resume(width: int) -> None:
    rng = random.Random(width)
    for _ in range(300):
        row = [rng.choice([-1, 7, 7, 7]) for _ in range(rng.randint(0, 9))]
        count = rng.randint(0, len(row))
        found = [
            n for n in range(count + 1) if all(row[at // P] >= 0 for at in range(max(0, n * P - width + 1), n * P))
        ]
        assert Window(width).resumable(row, count, P) == found[-1]


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 8, 9, 13])
def test_what_a_window_holds_at_most(width: int) -> None:
    group = Window(width)
    for step in (1, 2, 3, 4, 5, 9):
        peak = 0
        for start in range(64):
            low, high = group.resident(start)
            assert (low, high) == (max(0, start - width + 1), start)
            peak = max(peak, -(-(start + step) // P) - low // P)
        assert peak <= group.most(1 << 40, step, P) <= peak + 1
    assert group.most(5, 3, P) <= 2


def test_a_window_sees_at_least_itself() -> None:
    with pytest.raises(ValueError, match="a window of 0"):
        Window(0)


def test_memory_is_bounded_by_the_window() -> None:
    tree = make(64, 6, 4)
    lease = walk(tree, tokens(200), step=5)
    assert len(lease.rows[0]) == 50 and sum(page >= 0 for page in lease.rows[1]) <= 3
    assert tree.longest(5) == 64 * P and PrefixTree(Pool(4), P, Window(6)).longest(5) is None
    assert PrefixTree(Pool(3), P, Window(6)).longest(5) == 3 * P
    tree.release(lease)
    tree.check([])
    assert tree.available(0) == 64 and tree.available(1) == 4


def test_a_prefix_is_resumed_where_every_group_can() -> None:
    tree = make(64, 6, 16)
    ids = tokens(24)
    cache(tree, ids)
    lease = tree.match("", ids)
    assert lease.shared == 6 and lease.rows[1][:4] == [-1] * 4 and min(lease.rows[1][4:]) >= 0
    assert lease.low == [0, 4] and lease.changes() == (0, lease.rows[0], [lease.rows[1]])
    tree.release(lease)
    assert tree.evict(12, 1) == 6 and tree.cached(0) == 6
    lease = tree.match("", ids)  # nothing to resume from, though all of the other group is there
    assert lease.shared == 0
    tree.release(lease)
    old = tree.cached(0)
    lease = walk(tree, ids)  # computed again: one group's pages are duplicates, the other's are filled in
    assert tree.cached(0) == old and tree.pools[0].free_count == 64 - old
    tree.release(lease)
    assert tree.match("", ids).shared == 6


def test_holes_are_stepped_over() -> None:
    tree = make(64, 6, 16)
    ids = tokens(32)
    cache(tree, ids)
    middle = tree.match("", ids[:16])  # its window is pages 2 and 3: they are used now, the others go first
    tree.release(middle)
    tree.evict(6, 1)
    assert tree.match("", ids).shared == 4
    assert [n.pages[1] >= 0 for n in tree.match("", ids).path] == [False, False, True, True]


def test_groups_agree_before_a_prefix_is_resumed() -> None:
    """What one shortens, another may have to shorten further, and then the first again."""
    tree = PrefixTree(Pool(16), P, Window(5), [(Window(9), Pool(16))])
    lease = tree.match("", [])
    assert tree.extend(lease, 24)
    tree.publish(lease, tokens(24))
    path = list(lease.path)
    tree.release(lease)
    tree._drop(path[5], 1)
    tree._drop(path[4], 0)
    lease = tree.match("", tokens(24))
    assert lease.shared == 4 == resumable(tree, "", tokens(24))
    tree.check([lease])


def test_what_nobody_asked_for_goes_first() -> None:
    """Pages that a sequence leaves behind go before the end of an older one; pages that were found there do not."""
    tree = make(64, 6, 8)
    cache(tree, tokens(12))  # three pages
    long = walk(tree, tokens(64, 100))  # through the other five
    tree.release(long)
    assert tree.match("", tokens(12)).shared == 3


def test_a_page_gone_where_all_must_be_there_takes_the_others_along() -> None:
    tree = make(8, 6, 8)
    cache(tree, tokens(16))
    assert tree.evict(2, 0) == 2
    assert tree.cached(0) == 2 and tree.cached(1) <= 2
    tree.check([])
    assert tree.evict(2, 0) == 2 and not tree._roots and tree.pools[1].free_count == 8


def test_a_tree_of_windows_alone_leaves_no_empty_nodes() -> None:
    tree = PrefixTree(Pool(6), P, Window(5))
    for first in (0, 1000, 2000):
        cache(tree, tokens(60, first))
    assert tree.match("", tokens(60, 2000)).shared == 15
    fresh = PrefixTree(Pool(6), P, Window(5))
    cache(fresh, tokens(60))
    assert fresh.cached() == 6 == fresh.evict(99)
    fresh.check([])
    assert not fresh._roots and fresh.pool.free_count == 6


def test_extend_is_all_or_nothing() -> None:
    tree = make(8, 6, 3)
    lease = tree.match("", [])
    assert not tree.extend(lease, 4 * P)
    assert lease.rows == [[], []] and tree.pools[0].free_count == 8 and tree.pools[1].free_count == 3
    assert tree.extend(lease, 3 * P)
    tree.check([lease])


def test_what_is_short_counts_pages_that_will_be_let_go() -> None:
    tree = make(64, 6, 16)
    assert tree.short(None, 100, 4) == [25, Window(6).most(100, 4, P)]
    lease = walk(tree, tokens(40))
    assert tree.short(lease, 100, 4) == [15, Window(6).most(100, 4, P) - 2]
    assert tree.fits([54, 4], [0, 10]) and not tree.fits([54, 4], [1, 10]) and not tree.fits([54, 4], [0, 11])


def carried(full: int, states: int, every: int = 1000) -> PrefixTree:
    """Layers that keep everything, and layers that carry a state."""
    return PrefixTree(Pool(full), P, Full(), [(State(every), Pool(states))])


def test_what_a_state_asks_for() -> None:
    group = State(12)
    assert group.resumable([-1, 5, -1, 7, -1], 5, P) == 4 and group.resumable([-1, 5, -1], 3, P) == 2
    assert group.resumable([-1, -1], 2, P) == 0 == group.resumable([], 0, P)
    assert group.resident(0) == (0, 0) and group.resident(9) == (8, 9)
    assert group.most(3, 1, P) == 1 and group.most(1 << 40, 99, P) == 2
    assert (
        group.checkpoints(30, P) == ([6], [2, 5])
        and group.checkpoints(32, P) == ([6, 7], [2, 5])
        and group.checkpoints(3, P) == ([], [])
    )
    with pytest.raises(ValueError, match="a state every 0"):
        State(0)


@pytest.mark.parametrize("step", [1, 3, 4, 7, 50])
def test_states_are_two_however_long_the_sequence_is(step: int) -> None:
    tree = carried(64, 2)
    assert tree.longest(step) == 64 * P and not tree.rewinds
    lease = walk(tree, tokens(200), step=step)
    assert len(lease.rows[0]) == 50 and 1 <= sum(page >= 0 for page in lease.rows[1]) <= 2
    tree.release(lease)
    tree.check([])
    assert tree.available(1) == 2


def test_a_prefix_is_resumed_where_a_state_was_kept() -> None:
    tree = carried(64, 12, every=16)
    ids = tokens(50)
    cache(tree, ids, step=50)
    lease = tree.match("", [*ids, 1, 2])  # the end of what was known
    assert lease.shared == 12 and lease.rows[1][:11] == [-1] * 11 and lease.rows[1][11] >= 0
    tree.release(lease)
    lease = tree.match("", [*ids[:30], 9, 9])  # every sixteen
    assert lease.shared == 4 and sum(page >= 0 for page in lease.rows[1]) == 1
    assert tree.extend(lease, 32)  # what was read stays as it is; the new one is written elsewhere
    assert lease.rows[1][3] != lease.rows[1][7] and lease.rows[1][3] == lease.path[3].pages[1]
    tree.check([lease])


def test_a_state_is_kept_where_others_parted() -> None:
    """Nothing is known of a common beginning until somebody shares it; the third one finds its state."""
    tree = carried(64, 12)
    common = tokens(24)
    cache(tree, [*common, *tokens(10, 100)], step=50)
    second = walk(tree, [*common, *tokens(10, 200)], step=50)
    assert second.matched == 0 and second.rows[1][5] == -1  # left behind, in the tree
    third = tree.match("", [*common, *tokens(10, 300)])
    assert third.shared == 6
    tree.check([second, third])


def test_states_worth_having_are_not_taken_from_those_who_need_one() -> None:
    tree = carried(64, 4, every=4)
    other = tree.match("", [])
    assert tree.extend(other, 4)
    lease = tree.match("", tokens(40))
    assert tree.extend(lease, 40)
    assert tree.available(1) == 2  # one for each lease, and two are held
    tree.check([other, lease])


def test_a_state_goes_with_its_page_or_before() -> None:
    tree = carried(16, 8, every=4)
    cache(tree, tokens(32), step=32)
    assert tree.cached(1) > 3
    assert tree.evict(2, 1) == 2 and tree.cached(0) == 8
    tree.evict(4, 0)
    assert tree.cached(0) == 4
    tree.check([])
    assert tree.match("", tokens(32)).shared <= 4


def test_what_will_be_asked_for_stays_longer_than_what_decoding_leaves() -> None:
    tree = carried(256, 4)
    cache(tree, tokens(8, 900), step=8)  # older, and asked for once: it goes before the end of a prompt does
    prompt = tokens(21)
    lease = tree.match("", prompt)
    ids = [*prompt, *tokens(200, 500)]
    at = 0
    for n in (21, *[1] * 200):
        at += n
        assert tree.extend(lease, at)
        tree.publish(lease, ids, at)
        tree.forget(lease, at)
        tree.check([lease])
    assert tree.match("", prompt).shared == 5


def resumable(tree: PrefixTree, namespace: str, ids: list[int]) -> int:
    """The most pages at which every group has all that it needs."""
    path, node = [], tree._roots.get(namespace)
    while node is not None:
        node = node.kids.get(tuple(ids[len(path) * P : len(path) * P + P]))
        path += [] if node is None else [node]
    return max(
        n
        for n in range(len(path) + 1)
        if all(
            path[at // P].pages[g] >= 0
            for g, group in enumerate(tree.groups)
            for at in range(group.resident(n * P)[0], n * P)
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_random_leases_keep_every_page_in_one_place(seed: int) -> None:
    rng = random.Random(seed)
    first, last = rng.choice([(Full(), Full()), (Window(7), Full()), (Window(3), Window(10)), (Full(), State(8))])
    tree = PrefixTree(Pool(24), P, first, [(Window(rng.randint(1, 10)), Pool(14)), (last, Pool(24))])
    held: list[tuple[Lease, list[int], int]] = []
    for _ in range(300):
        roll = rng.random()
        if roll < 0.35:
            ids = [rng.randrange(2) for _ in range(rng.randint(0, 28))]
            name = rng.choice(["", "x"])
            best = resumable(tree, name, ids)
            lease = tree.match(name, ids)
            assert lease.shared == best
            held.append((lease, ids, lease.shared * P))
        elif roll < 0.75 and held:
            at = rng.randrange(len(held))
            lease, ids, done = held[at]
            upto = min(len(ids), done + rng.randint(1, 9))
            if tree.extend(lease, upto):
                if rng.random() < 0.8:
                    tree.publish(lease, ids, upto)
                    tree.forget(lease, upto)
                held[at] = lease, ids, upto
        elif roll < 0.9 and held:
            tree.release(held.pop(rng.randrange(len(held)))[0])
        else:
            tree.evict(rng.randint(1, 3), rng.randrange(3))
        tree.check(lease for lease, _, _ in held)
    for lease, _, _ in held:
        tree.release(lease)
    for g in range(3):
        tree.evict(99, g)
    tree.check([])
    assert [pool.free_count for pool in tree.pools] == [24, 14, 24] and not tree._roots
