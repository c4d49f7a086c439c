"""The free list: which pages of a fixed set nobody holds. Pages are ints; what they store is not known here.

Last freed, first reused: such a page is the likeliest to be warm in a CPU cache. A page freed twice would be handed to
two owners, so that is an error here and now, not wrong tokens later.
"""

from __future__ import annotations

from collections.abc import Sequence


class Pool:
    """`size` pages, numbered from 0."""

    __slots__ = ("_free", "_held", "size")

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool of {size} pages: it must have at least one")
        self.size = size
        self._free = list(range(size - 1, -1, -1))  # popped from the end: page 0 goes first
        self._held = bytearray(size)

    @property
    def free_count(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def free_pages(self) -> Sequence[int]:
        """The pages that are free, for invariant checks."""
        return tuple(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when there are fewer."""
        free, held = self._free, self._held
        if count <= 0:
            return []
        if count > len(free):
            return None
        pages = free[-count:]
        del free[-count:]
        for page in pages:
            held[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Hand pages back. Raises RuntimeError for a page that is free already, or not of this pool."""
        held = self._held
        for page in pages:
            if not (0 <= page < self.size and held[page]):
                raise RuntimeError(f"page {page} freed, but nobody holds it (the pool has {self.size} pages)")
            held[page] = 0
            self._free.append(page)
