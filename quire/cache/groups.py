"""Groups: layers whose KV lives and dies together, and what that asks of the prefix tree.

A model's layers fall into groups; each has its own pool of pages and its own row of the page table. Attention over
everything is one group, `Full` (a latent cache too: its pages are smaller, and that is all); layers with a sliding window
are another, `Window`; layers that fold the past into a state of one size are a third, `State`, whose pages are states. The
tree and the scheduler ask a group these questions and know nothing else about it. Positions are in tokens, counts in
pages of `size` tokens; in a row, a negative number stands for a page that is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

STATE_EVERY = 512  # tokens between the states of a prompt that are kept where there is room


class Group(Protocol):
    """The questions."""

    @property
    def whole(self) -> bool:
        """Whether a prefix is of no use unless every page of it is there."""
        ...

    @property
    def sparse(self) -> bool:
        """Whether a row needs no page but its last one, to be written; others may have one, so that a prefix can be resumed
        there: see `checkpoints`."""
        ...

    @property
    def rewinds(self) -> bool:
        """Whether tokens that were computed can be computed again otherwise, as draft tokens that are rejected are."""
        ...

    def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
        """The longest prefix of at most `pages` pages to resume from, when row[:pages] says which are cached."""
        ...

    def resident(self, length: int) -> tuple[int, int]:
        """The range of positions [low, high) that must be present to compute position `length` and those after it."""
        ...

    def most(self, tokens: int, step: int, size: int) -> int:
        """Pages that a sequence holds at most on its way to `tokens` tokens, when it computes `step` of them at a time;
        of a sparse group, those that it cannot do without."""
        ...

    def checkpoints(self, tokens: int, size: int) -> tuple[list[int], list[int]]:
        """In a sparse group, the places in the row of so many known tokens where a page is worth having. First the places that
        others will likely resume from, which get a page before the rest."""
        ...


class Full:
    """Attention over everything: any cached prefix can be resumed, and all of it must stay."""

    __slots__ = ()
    whole = True
    sparse = False
    rewinds = True

    def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
        return pages

    def resident(self, length: int) -> tuple[int, int]:
        return 0, length

    def most(self, tokens: int, step: int, size: int) -> int:
        return -(-tokens // size)

    def checkpoints(self, tokens: int, size: int) -> tuple[list[int], list[int]]:
        return [], []


class Window:
    """Attention over the last `width` tokens, the one that asks among them: what lies before may go."""

    __slots__ = ("width",)
    whole = False
    sparse = False
    rewinds = True

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

    def checkpoints(self, tokens: int, size: int) -> tuple[list[int], list[int]]:
        return [], []


class State:
    """Layers whose state holds all of the past: page i of a row is the state after the last computed token of page i.

    A step reads the state before its first token and writes the one after its last, so two pages are all that a sequence
    needs, however long. The state of a full page never changes again: published, it is a checkpoint, and a prefix can be
    resumed where there is one. Worth having are those at the end of what is known when a sequence begins (its prompt will
    be asked again, or gone on from), and one every `every` tokens.
    """

    __slots__ = ("every",)
    whole = False
    sparse = True
    rewinds = False

    def __init__(self, every: int = STATE_EVERY) -> None:
        if every < 1:
            raise ValueError(f"a state every {every} tokens: it must be at least 1")
        self.every = every

    def resumable(self, row: Sequence[int], pages: int, size: int) -> int:
        while pages and row[pages - 1] < 0:
            pages -= 1
        return pages

    def resident(self, length: int) -> tuple[int, int]:
        return max(0, length - 1), length

    def most(self, tokens: int, step: int, size: int) -> int:
        return min(-(-tokens // size), 2)

    def checkpoints(self, tokens: int, size: int) -> tuple[list[int], list[int]]:
        ends = {
            tokens // size - 1,
            (tokens - 1) // size - 1,
        }  # to be gone on from, and asked again: that takes a token less
        step = -(-self.every // size)
        return [at for at in sorted(ends) if at >= 0], list(range(step - 1, tokens // size, step))
