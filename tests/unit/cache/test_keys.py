"""Keys of pages: fixed digests, the same in every process, and different for whatever makes other bytes."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys

import pytest

from quire.cache.keys import SIZE, Keys, fingerprint
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree

PARTS = {"weights": "a" * 64, "backend": "native 1", "pages 0": "kind=full dtype=float16"}


def salt(namespace: str) -> bytes:
    return hashlib.sha256(b"secret" + namespace.encode()).digest()


def keys(page_size: int = 4, **changes: str) -> Keys:
    return Keys(fingerprint({**PARTS, **changes}), page_size, salt)


def test_the_scheme_is_what_it_was() -> None:
    """Fixed digests: a change here makes every page that anybody has kept unfindable, so it must be meant."""
    one = keys()
    assert fingerprint(PARTS).hex() == "6d1288b833313a72d0dca5c14601302911c2f1f1cd5090316be1eb4a39889808"
    assert one.root("").hex() == "3ec3ee6a8753f04a41bbc9c74316e6c9b553f5bfb591cab4c363f1f0858210f4"
    assert one.root("tenant").hex() == "630059e8c00c191d0b565680581df106c9c8bc2c60290592dbe0608632483c8e"
    assert [k.hex() for k in one.chain(one.root(""), [1, 2, 3, 4, 5, 6, 7, 49151])] == [
        "2ebe6a73e6e13a2990948705ae7f2154f00a1df7bda16b73886306f8f66f0554",
        "7cf0cc5393a5b1f0685d1fae88a8a6464369bc5185cc0793ba7bce36dbb67e26",
    ]


def test_the_scheme_is_what_it_says() -> None:
    """By hashlib alone, as somebody who reads the docs would write it."""

    def h(person: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32, person=person).digest()

    listed = b"".join(
        len(text).to_bytes(8, "little") + text
        for name, value in sorted(PARTS.items())
        for text in (name.encode(), value.encode())
    )
    model = h(b"quire model 1", listed)
    assert fingerprint(PARTS) == model
    root = h(b"quire root 1", model + salt("t"))
    first = h(b"quire page 1", root + b"".join(i.to_bytes(8, "little", signed=True) for i in [1, -2, 3, 2**40]))
    assert keys().chain(keys().root("t"), [1, -2, 3, 2**40]) == [first]


def test_two_processes_give_the_same_keys() -> None:
    """Whatever Python's own hash is seeded with."""
    code = (
        "from quire.cache.keys import Keys, fingerprint\n"
        "k = Keys(fingerprint({'weights': 'w', 'backend': 'b'}), 4, lambda name: name.encode())\n"
        "print(*(key.hex() for key in k.chain(k.root('tenant'), range(12))))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1 and len(said.pop().split()) == 3


@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_the_fingerprint_changes_every_key(name: str) -> None:
    one, other = keys(), keys(4, **{name: PARTS[name] + "x"})
    for namespace in ("", "tenant"):
        ours = one.chain(one.root(namespace), range(8))
        theirs = other.chain(other.root(namespace), range(8))
        assert not {one.root(namespace), *ours} & {other.root(namespace), *theirs}


def test_parts_do_not_run_into_each_other() -> None:
    lists = [{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a": "", "b": "c"}, {"a": "b", "": "c"}, {}]
    assert len({fingerprint(parts) for parts in lists}) == len(lists)
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


def test_a_key_is_of_the_whole_prefix_and_the_namespace() -> None:
    one = keys()
    prompts = [[1] * 8, [1] * 7 + [2], [2] + [1] * 7, [1, 1, 1, 2] + [1] * 4]
    last = {one.chain(one.root(space), ids)[-1] for space in ("", "a", "b") for ids in prompts}
    assert len(last) == 3 * len(prompts) and all(len(key) == SIZE for key in last)
    assert one.chain(one.root(""), [1] * 11) == one.chain(one.root(""), [1] * 8)  # full pages only


def test_namespaces_with_different_salts_do_not_collide() -> None:
    """The same name under two secrets, and two names under one."""
    secrets = [lambda name, s=s: hashlib.sha256(s + name.encode()).digest() for s in (b"1", b"2")]
    roots = [Keys(fingerprint(PARTS), 4, secret).root(name) for secret in secrets for name in ("a", "b", "ab")]
    assert len(set(roots)) == 6
    assert len({Keys(fingerprint(PARTS), 4, secret).root("") for secret in secrets}) == 1  # nobody's: no salt


def test_the_default_namespace_needs_no_secret() -> None:
    def refuse(namespace: str) -> bytes:
        raise AssertionError(namespace)

    assert Keys(fingerprint(PARTS), 4, refuse).root("") == keys().root("")


def test_a_fingerprint_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        Keys(b"x" * 31, 4, salt)


class Quiet:
    def stored(self, event: object) -> None: ...
    def removed(self, event: object) -> None: ...


def publish(tree: PrefixTree, tokens: list[int], parts: int = 1, namespace: str = "") -> None:
    lease = tree.match(namespace, tokens)
    for i in range(1, parts + 1):
        upto = len(tokens) * i // parts
        assert tree.extend(lease, upto)
        tree.publish(lease, tokens, upto)
    tree.release(lease)


def test_a_page_costs_one_hash_and_nobody_pays_without_a_listener() -> None:
    tree, made = PrefixTree(Pool(64), 4), keys()
    tree.name_pages(made)
    publish(tree, list(range(100)), 7)
    assert made.hashed == 0
    tree.listen(Quiet())
    assert made.hashed == 25  # what was there: each page once
    publish(tree, [*range(100), *range(40)], 40)
    assert made.hashed == 35
    tree.evict(3)
    tree.listen(Quiet())
    assert made.hashed == 35  # a node keeps its key


def test_a_lease_can_be_asked_for_keys_where_nobody_listens() -> None:
    tree, made = PrefixTree(Pool(64), 4), keys()
    tokens = list(range(30))
    publish(tree, tokens, namespace="t")
    lease = tree.match("t", tokens)
    assert [tree.address(node) for node in lease.path] == [None] * 7
    tree.name_pages(made)
    assert tree.address(lease.path[3]) == made.chain(made.root("t"), tokens)[3]
    hashed = made.hashed
    assert [tree.address(node) for node in lease.path] == keys().chain(keys().root("t"), tokens)
    assert made.hashed == hashed + 3


def test_the_keys_of_a_tree_do_not_depend_on_how_it_came_about() -> None:
    def of(parts: int, order: int) -> set[bytes | None]:
        tree = PrefixTree(Pool(64), 4)
        if order % 2:
            tree.name_pages(keys())
            tree.listen(Quiet())
        prompts = list(itertools.permutations([[1] * 20, [1] * 8 + [2] * 9, [3] * 5]))[order]
        for tokens in prompts:
            publish(tree, tokens, parts)
        if not order % 2:
            tree.name_pages(keys())
        return {tree.address(node) for node in tree._walk() if node.parent is not None}

    assert len({frozenset(of(parts, order)) for parts in (1, 2, 5) for order in range(6)}) == 1


def test_keys_are_given_once() -> None:
    tree = PrefixTree(Pool(4), 4)
    tree.name_pages(keys())
    with pytest.raises(RuntimeError, match="already"):
        tree.name_pages(keys(weights="other"))
