"""The order of requests, and how the prompts of a step share its tokens. The scheduler asks; a policy decides nothing else.

A policy ranks requests: what it ranks lowest goes first, and equals go by arrival. And it says how many of a step's prompt
tokens the prompts behind a long one get, where the long one could use all of them: without that, a prompt of 20 tokens that
arrives behind one of 32k has its first token when the 32k are computed.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from quire.engine.sequence import Sequence
from quire.engine.types import Request

PARTS = 5  # later prompts get one part in so many: the first is slowed by a quarter at most
AHEAD = 8  # ... and short ones that part of what the first still needs, before it

by_priority = attrgetter("priority")  # lower values first


class Rank(Protocol):
    """The key that sorts requests. Those of one rank share steps, and a lower rank is served before a higher one."""

    def __call__(self, request: Request, /) -> Any: ...


class Share(NamedTuple):
    """How many of the tokens left in a step are for the prompts behind the first."""

    any: int  # for whichever is the shortest of them
    short: int  # a prompt that needs no more than that is short ...
    most: int  # ... and such prompts get so many


class Policy(Protocol):
    """Asked by one scheduler: a policy may keep what it owes."""

    rank: Rank

    def share(self, first: Sequence, tokens: int) -> Share:
        """What the prompts behind `first` get of the tokens left in a step, all of which `first` could use."""
        ...

    def shared(self, first: Sequence, tokens: int, used: int) -> None:
        """Count the tokens that those prompts used. Called once for each `share` that was granted."""
        ...


NOTHING = Share(0, 0, 0)


class FirstCome:
    """One prompt after the other: the first takes what it can use."""

    __slots__ = ("rank",)
    rank: Rank

    def __init__(self, rank: Rank = by_priority) -> None:
        self.rank = rank

    def share(self, first: Sequence, tokens: int) -> Share:
        return NOTHING

    def shared(self, first: Sequence, tokens: int, used: int) -> None:
        pass


class FairShare:
    """The default: the first prompt is slowed by a quarter at most, and later ones of its rank get that quarter, the shortest first.

    There is an account on each first prompt: what it has computed since it was the first (`had`), what it still needs (`left`) and
    what later prompts have had before it (`lent`).

    * Behind it they get a fifth of each step, so that `lent` is up to had / 4. A fifth is seldom a whole number: what is over is
      carried to the next step. Who needs less saves nothing up.
    * One that is short enough goes before it, with four fifths of each step, as long as `lent` stays within had / 4 + left / 8.

    Neither sum is ever more than a quarter of had + left, the tokens that it had to compute: that is the most that it waits for. And while
    the second one stands at its bound, each 8 tokens that it computes make room for one more: nobody starves, either.
    """

    __slots__ = ("_owed", "rank")
    rank: Rank

    def __init__(self, rank: Rank = by_priority) -> None:
        self.rank = rank
        self._owed = PARTS - 1  # in parts of a token: rounded up at first

    def share(self, first: Sequence, tokens: int) -> Share:
        left = first.left
        if not first.whole:
            first.whole = left
        had = max(0, first.whole - left)  # less than nothing: it gave way, and computes again what was not kept
        room = had // (PARTS - 1) + left // AHEAD - first.lent
        fifth = (tokens + self._owed) // PARTS
        if first.lent > had // (PARTS - 1):
            fifth = min(fifth, room)
        return Share(max(0, fifth), max(0, room), min(tokens - max(1, tokens // PARTS), room))

    def shared(self, first: Sequence, tokens: int, used: int) -> None:
        first.lent += used
        self._owed = max(0, min(PARTS - 1, self._owed + tokens - PARTS * used))
