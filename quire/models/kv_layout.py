"""The layout of the KV cache: layers that keep K and V equally long share a group, with a pool of its own.

A decoder makes a `KVLayout` of its layers' windows, gives `kv_layout.kv(…)` for its pools, and names kv_layout[i] when layer i
attends. All layers are one group, kept for the whole context, until `split()` is called, before anything is recorded. The
answers are the same; the memory is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.backends.ops import KV


class KVLayout:
    """`windows` has for each layer the tokens it sees, or None for all. A window that no context exceeds is none."""

    def __init__(self, windows: Sequence[int | None], context: int) -> None:
        if not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(f"windows of {list(windows)} tokens: at least one layer, and each sees at least itself")
        self.windows = tuple(w if w is not None and w < context else None for w in windows)
        self._groups: list[int | None] = [None]
        self._layers = _count(self._groups, [None] * len(self.windows))

    def split(self) -> None:
        """A group for each window, and one for the layers that see everything, which comes first."""
        self._groups = sorted(dict.fromkeys(self.windows), key=lambda w: (w is not None, w or 0))
        self._layers = _count(self._groups, self.windows)

    def __getitem__(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and its number there."""
        return self._layers[layer]

    def kv(self, pages: int, page_size: int, kv_heads: int, head_dim: int) -> KV:
        """The pools, each with so many pages."""
        first, *rest = [
            KV(
                layers=sum(group == g for group, _ in self._layers),
                pages=pages,
                page_size=page_size,
                kv_heads=kv_heads,
                head_dim=head_dim,
                window=window or 0,
            )
            for g, window in enumerate(self._groups)
        ]
        return replace(first, more=tuple(rest))


def _count(groups: Sequence[int | None], windows: Sequence[int | None]) -> list[tuple[int, int]]:
    """For each layer its group, and its index among the layers of that group."""
    seen = [0] * len(groups)
    found: list[tuple[int, int]] = []
    for window in windows:
        g = groups.index(window)
        found.append((g, seen[g]))
        seen[g] += 1
    return found
