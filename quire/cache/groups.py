"""Groups: layers whose KV lives and dies together, and what that asks of the prefix tree.

A model's layers fall into groups; each has its own pool of pages and its own row of the page table. Attention over
everything is one group, `Full` (a latent cache too: its pages are smaller, and that is all); layers with a sliding window
are another, `Window`. The tree and the scheduler ask a group these questions and know nothing else about it. Positions
are in tokens, counts in pages of `size` tokens; in a row, a negative number stands for a page that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Group(Protocol):
    """The questions."""

    @property
    def whole(self) -> bool:
        """Whether a prefix is of no use unless every page of it is there."""
        ...

    def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
        """The longest prefix of at most `pages` pages to resume from, when row[:pages] says which are cached."""
        ...

    def resident(self, length: int) -> tuple[int, int]:
        """The range of positions [low, high) that must be present to compute position `length` and those after it."""
        ...

    def most(self, tokens: int, step: int, size: int) -> int:
        """Pages that a sequence holds at most on its way to `tokens` tokens, when it computes `step` of them at a time."""
        ...


class Full:
    """Attention over everything: any cached prefix can be resumed, and all of it must stay."""

    __slots__ = ()
    whole = True

    def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
        return pages

    def resident(self, length: int) -> tuple[int, int]:
        return 0, length

    def most(self, tokens: int, step: int, size: int) -> int:
        return -(-tokens // size)


class Window:
    """Attention over the last `width` tokens, the one that asks among them: what lies before may go."""

    __slots__ = ("width",)
    whole = False

    def __init__(self, width: int) -> None:
        if width < 1:
            raise ValueError(f"a window of {width} tokens: a token sees at least itself")
        self.width = width

    def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
        end = at = pages  # row[at:end] is there
        while at * size > max(0, end * size - self.width + 1):
            at -= 1
            if row[at] < 0:
                end = at
        return end

    def resident(self, length: int) -> tuple[int, int]:
        return max(0, length - self.width + 1), length

    def most(self, tokens: int, step: int, size: int) -> int:
        seen = self.width - 1 + step  # these lie together, and begin anywhere in a page
        return min(-(-tokens // size), -(-(seen - 1) // size) + 1)
