"""The free list: no page has two owners, and none gets lost."""

from __future__ import annotations

import pytest

from quire.cache.pages import Pool


def test_alloc_hands_out_every_page_once() -> None:
    pool = Pool(5)
    pages = [*(pool.alloc(2) or []), *(pool.alloc(3) or [])]
    assert sorted(pages) == [0, 1, 2, 3, 4]
    assert pool.free_count == 0


def test_alloc_of_too_many_takes_nothing() -> None:
    pool = Pool(3)
    assert pool.alloc(4) is None
    assert pool.free_count == 3
    assert pool.alloc(0) == []


def test_freed_pages_come_back() -> None:
    pool = Pool(3)
    pages = pool.alloc(3)
    assert pages is not None
    pool.free(pages[:2])
    assert pool.free_count == 2
    assert set(pool.alloc(2) or []) == set(pages[:2])


def test_double_free_is_an_error() -> None:
    pool = Pool(3)
    pages = pool.alloc(1)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(RuntimeError, match="nobody holds it"):
        pool.free(pages)
    assert pool.free_count == 3


@pytest.mark.parametrize("page", [-1, 3])
def test_foreign_page_is_an_error(page: int) -> None:
    pool = Pool(3)
    pool.alloc(3)
    with pytest.raises(RuntimeError, match=f"page {page} "):
        pool.free([page])


def test_a_pool_has_pages() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Pool(0)
