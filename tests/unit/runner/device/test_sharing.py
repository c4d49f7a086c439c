"""Groups of rows that share pages: against a search through every way to share, and in a runner's decode steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.runner.device import sharing
from quire.runner.device.sharing import Sharing, find


def best(rows: list[list[int]], least: int) -> int:
    """The most pages that can be saved by groups of rows with a common beginning: over the tree of beginnings."""

    def under(members: list[list[int]], depth: int) -> int:
        kids: dict[int, list[list[int]]] = {}
        for row in members:
            if len(row) > depth:
                kids.setdefault(row[depth], []).append(row)
        inner = sum(under(kid, depth + 1) for kid in kids.values())
        return max(inner, (len(members) - 1) * depth if depth >= least else 0)

    return under(rows, 0)


def made(rng: random.Random, n: int) -> list[list[int]]:
    """Rows of pages that fork from each other, as a prefix tree makes them."""
    rows: list[list[int]] = []
    page = 0
    for _ in range(n):
        base = rng.choice(rows)[: rng.randrange(20)] if rows and rng.random() < 0.7 else []
        grown = base + list(range(page, page := page + rng.randrange(1, 12)))
        rows.append(grown)
    return rows


@pytest.mark.parametrize("seed", range(60))
def test_it_saves_what_can_be_saved(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST", 3)
    monkeypatch.setattr(sharing, "GROUPS", 1000)
    rng = random.Random(seed)
    rows = made(rng, rng.randrange(1, 14))
    table = np.full((len(rows), max(map(len, rows)) + 1), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    found = find(table, np.array([len(row) for row in rows], np.int32))
    assert (0 if found is None else found.saved) == best(rows, 3)
    if found is not None:
        check(found, rows)


def check(found: Sharing, rows: list[list[int]]) -> None:
    assert sorted(found.order.tolist()) == list(range(len(rows)))
    at = 0
    for count, pages in zip(found.counts, found.pages, strict=True):
        members = found.order[at : at + count].tolist()
        assert len({tuple(rows[m][:pages]) for m in members}) == 1 and all(len(rows[m]) >= pages for m in members)
        at += count


def test_only_the_best_groups_are_kept() -> None:
    rows = [[*range(100 * g, 100 * g + 10 + g), 5000 + i] for i, g in enumerate([*range(12), *range(12)])]
    table = np.full((24, 40), -1, np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    found = find(table, np.array([len(row) - 1 for row in rows], np.int32))
    assert found is not None and found.pages == [21, 20, 19, 18, 17, 16, 15, 14] and found.counts == [2] * 8
    check(found, rows)


def test_nothing_shared() -> None:
    assert find(np.arange(40, dtype=np.int32).reshape(2, 20), np.array([20, 20], np.int32)) is None
    assert find(np.zeros((0, 4), np.int32), np.zeros(0, np.int32)) is None
