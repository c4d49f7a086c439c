"""The order of requests, and how the prompts of a step share its tokens. The scheduler asks; a policy decides nothing else.

A policy ranks requests: what it ranks lowest goes first, and equals go by arrival. And it says how many of a step's prompt
tokens the prompts behind a long one get, where the long one could use all of them: without that, a prompt of 20 tokens that
arrives behind one of 32k has its first token when the 32k are computed.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Protocol

from quire.engine.types import Request

PARTS = 5  # later prompts get one part in so many: the first is slowed by a quarter at most

by_priority = attrgetter("priority")  # lower values first


class Rank(Protocol):
    """The key that sorts requests. Those of one rank share steps, and a lower rank is served before a higher one."""

    def __call__(self, request: Request, /) -> Any: ...


class Policy(Protocol):
    """Asked by one scheduler: a policy may keep what it owes."""

    rank: Rank

    def share(self, tokens: int) -> int:
        """How many of the tokens left in a step are for the prompts behind one that could use them all."""
        ...

    def shared(self, tokens: int, used: int) -> None:
        """Count the tokens that those prompts used. Called once for each `share` that was granted."""
        ...


class FirstCome:
    """One prompt after the other: the first takes what it can use."""

    __slots__ = ("rank",)
    rank: Rank

    def __init__(self, rank: Rank = by_priority) -> None:
        self.rank = rank

    def share(self, tokens: int) -> int:
        return 0

    def shared(self, tokens: int, used: int) -> None:
        pass


class FairShare:
    """The default: behind a long prompt, later ones of its rank get a fifth of the tokens, the shortest of them first.

    A fifth is seldom a whole number. What is over is carried to the next step, so that later prompts have had a fifth at any
    time, and the first never waits for more than one step beyond a quarter.
    """

    __slots__ = ("_owed", "rank")
    rank: Rank

    def __init__(self, rank: Rank = by_priority) -> None:
        self.rank = rank
        self._owed = PARTS - 1  # in parts of a token: rounded up at first

    def share(self, tokens: int) -> int:
        return (tokens + self._owed) // PARTS

    def shared(self, tokens: int, used: int) -> None:
        self._owed = min(PARTS - 1, self._owed + tokens - PARTS * used)  # who needs less saves nothing up
