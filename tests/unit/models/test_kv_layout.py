"""Which group each layer is in."""

from __future__ import annotations

import pytest

from quire.backends.ops import KV
from quire.models.kv_layout import KVLayout


def test_layers_that_see_as_much_share_a_group() -> None:
    layout = KVLayout([512, 512, None, 512, None], 8192)
    layout.split()
    assert [layout[i] for i in range(5)] == [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1)]
    assert layout.windows == (512, 512, None, 512, None)
    assert layout.kv(7, 16, 2, 64) == KV(2, 7, 16, 2, 64, more=(KV(3, 7, 16, 2, 64, window=512),))


def test_one_window_is_one_group() -> None:
    layout = KVLayout([1024] * 3, 8192)
    layout.split()
    assert layout.kv(7, 16, 2, 64) == KV(3, 7, 16, 2, 64, window=1024)
    assert [layout[i] for i in range(3)] == [(0, 0), (0, 1), (0, 2)]


def test_a_window_that_no_context_exceeds_is_none() -> None:
    layout = KVLayout([8192, None, 9000], 8192)
    layout.split()
    assert layout.windows == (None,) * 3 and layout.kv(1, 16, 2, 64) == KV(3, 1, 16, 2, 64)


def test_until_they_are_split_all_layers_keep_everything() -> None:
    layout = KVLayout([512, None, 100], 8192)
    assert layout.windows == (512, None, 100)
    assert layout.kv(1, 16, 2, 64) == KV(3, 1, 16, 2, 64) and [layout[i] for i in range(3)] == [(0, 0), (0, 1), (0, 2)]
    layout.split()
    assert [k.window for k in layout.kv(1, 16, 2, 64).groups] == [0, 100, 512]


@pytest.mark.parametrize("windows", [[], [0], [None, -1]])
def test_windows_that_cannot_be(windows: list[int | None]) -> None:
    with pytest.raises(ValueError, match="windows of"):
        KVLayout(windows, 100)
