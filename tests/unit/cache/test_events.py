"""Events of the tree: whoever replays them knows what is resident, at any moment and from any moment on."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from quire.cache.events import DEVICE, Listener, Removed, Stored
from quire.cache.groups import Full, Group, State, Window
from quire.cache.keys import Keys, fingerprint
from quire.cache.pages import Lease, Pool
from quire.cache.prefix_tree import PrefixTree

P = 4


def keys() -> Keys:
    return Keys(fingerprint({"weights": "w"}), P, lambda namespace: namespace.encode())


class Replica:
    """What a listener knows: page by (key, group)."""

    def __init__(self) -> None:
        self.pages: dict[tuple[bytes, int], int] = {}
        self.said: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.events: list[Stored | Removed] = []

    def stored(self, event: Stored) -> None:
        assert (event.key, event.group) not in self.pages, "stored twice"
        assert event.medium == DEVICE
        assert self.said.setdefault(event.key, (event.parent, event.tokens)) == (event.parent, event.tokens)
        self.pages[event.key, event.group] = event.page
        self.events.append(event)

    def removed(self, event: Removed) -> None:
        assert self.pages.pop((event.key, event.group)) == event.page, "another page was stored under that key"
        assert event.medium == DEVICE
        self.events.append(event)


def resident(tree: PrefixTree) -> dict[tuple[bytes, int], int]:
    """By a walk over the tree, each key from the tokens on the way."""
    made, found = keys(), dict[tuple[bytes, int], int]()
    stack = [(root, made.root(name)) for name, root in tree._roots.items()]
    while stack:
        node, key = stack.pop()
        for kid in node.kids.values():
            assert isinstance(kid.key, tuple)
            own = made.key(key, kid.key)
            stack.append((kid, own))
            found |= {(own, g): page for g, page in enumerate(kid.pages) if page >= 0}
    return found


MIXES: list[list[Group]] = [
    [Full()],
    [Full(), Window(6)],
    [Window(9)],
    [Full(), State(8)],
    [Full(), Window(3), State(12)],
    [Full(), Full()],
]


@pytest.mark.parametrize("kinds", MIXES, ids=lambda kinds: "+".join(type(k).__name__ for k in kinds))
@pytest.mark.parametrize("seed", range(12))
def test_replayed_events_are_the_resident_pages(kinds: list[Group], seed: int) -> None:
    rng = random.Random(seed)
    made = [(kind, Pool(rng.randint(4, 18))) for kind in kinds]
    tree = PrefixTree(made[0][1], P, made[0][0], made[1:])
    named = rng.choice([0, 30])
    replicas = {0: Replica(), rng.randint(1, 80): Replica(), 100: Replica()}
    leases: list[tuple[Lease, list[int], int]] = []
    for step in range(160):
        if step == named:
            tree.name_pages(keys())
        if step in replicas:
            tree.listen(replicas[step])
        deed = rng.random()
        if deed < 0.35 and len(leases) < 3:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 60))]
            leases.append((tree.match(rng.choice(["", "t"]), tokens, rng.randint(0, 60)), tokens, 0))
        elif deed < 0.8 and leases:
            i = rng.randrange(len(leases))
            lease, tokens, _ = leases[i]
            upto = min(len(tokens), max(lease.room, lease.shared * P) + rng.randint(1, 9))
            if tree.extend(lease, upto):
                tree.publish(lease, tokens, upto)
                tree.forget(lease, upto)
        elif deed < 0.9 and leases:
            tree.release(leases.pop(rng.randrange(len(leases)))[0])
        elif deed < 0.95:
            tree.evict(rng.randint(1, 3), rng.randrange(len(kinds)))
        tree.check([lease for lease, _, _ in leases])
        for since, replica in replicas.items():
            if step >= max(since, named):
                assert replica.pages == resident(tree)
    for lease, _, _ in leases:
        tree.release(lease)
    for g in range(len(kinds)):
        tree.evict(100, g)
    assert not any(replica.pages for replica in replicas.values())
    assert any(isinstance(e, Removed) for e in replicas[0].events) and any(e.group for e in replicas[0].events) == (
        len(kinds) > 1
    )


def cache(tree: PrefixTree, tokens: list[int]) -> None:
    lease = tree.match("", tokens)
    assert tree.extend(lease, len(tokens))
    tree.publish(lease, tokens)
    tree.release(lease)


def test_an_event_says_what_is_where() -> None:
    tree, one = PrefixTree(Pool(8), P), Replica()
    tree.name_pages(keys())
    tree.listen(one)
    cache(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    first, second = keys().chain(keys().root(""), [1, 2, 3, 4, 5, 6, 7, 8])
    assert one.events == [
        Stored(first, None, (1, 2, 3, 4), 0, DEVICE, one.pages[first, 0]),
        Stored(second, first, (5, 6, 7, 8), 0, DEVICE, one.pages[second, 0]),
    ]
    last = one.pages[second, 0]
    tree.evict(1)
    assert one.events[2:] == [Removed(second, 0, DEVICE, last)]


def test_nothing_is_told_before_pages_have_keys() -> None:
    tree, one = PrefixTree(Pool(8), P), Replica()
    tree.listen(one)
    cache(tree, [1] * 9)
    tree.evict(1)
    assert not one.events
    tree.name_pages(keys())
    assert [type(e) for e in one.events] == [Stored]


def test_who_stops_listening_is_told_nothing_more() -> None:
    tree, one, two = PrefixTree(Pool(8), P), Replica(), Replica()
    tree.name_pages(keys())
    tree.listen(one)
    tree.listen(two)
    cache(tree, [1] * 4)
    tree.unlisten(one)
    cache(tree, [2] * 4)
    assert (len(one.events), len(two.events)) == (1, 2)


@pytest.mark.parametrize("when", ["stored", "removed", "at once"])
def test_a_listener_that_raises_is_taken_off_and_hurts_nobody(when: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Replica):
        def stored(self, event: Stored) -> None:
            if when != "removed":
                raise ValueError("broken listener")

        def removed(self, event: Removed) -> None:
            raise ValueError("broken listener")

    tree, before, broken, after = PrefixTree(Pool(3), P), Replica(), Broken(), Replica()
    tree.name_pages(keys())
    listeners: list[Any] = [before, broken, after]
    if when == "at once":
        cache(tree, [9] * 4)
    for listener in listeners:
        tree.listen(listener)
    with caplog.at_level(logging.ERROR):
        for token in range(8):
            cache(tree, [token] * 8)
    assert before.pages == after.pages == resident(tree)
    tree.check([])
    own = [r for r in caplog.records if "told nothing more" in r.message]
    assert len(own) == 1


def test_a_listener_may_begin_again() -> None:
    tree, one = PrefixTree(Pool(8), P), Replica()
    tree.name_pages(keys())
    tree.listen(one)
    cache(tree, [1] * 8)
    tree.unlisten(one)
    tree.evict(1)
    again: Listener = Replica()
    tree.listen(again)
    assert isinstance(again, Replica) and again.pages == resident(tree)
