"""Groups: layers whose KV lives and dies together, and what that asks of the prefix tree.

A model's layers fall into groups; each has its own pool of pages and its own row of the page table. All attention
over everything is one group, `Full`. A sliding window, a latent cache or a recurrent state is one more class here:
the tree asks a group two questions and knows nothing else about it. Positions are in tokens, counts in pages.
"""

from __future__ import annotations

from typing import Protocol


class Group(Protocol):
    """The two questions."""

    def resumable(self, pages: int) -> int:
        """The longest prefix, in pages, to resume from when the first `pages` pages are cached."""
        ...

    def resident(self, length: int) -> tuple[int, int]:
        """The range of positions [low, high) that must be present to compute position `length`."""
        ...


class Full:
    """Attention over everything: any cached prefix can be resumed, and all of it must stay."""

    __slots__ = ()

    def resumable(self, pages: int) -> int:
        return pages

    def resident(self, length: int) -> tuple[int, int]:
        return 0, length
