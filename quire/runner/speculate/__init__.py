"""Proposers: who guesses the next tokens of a sequence, so that one step can verify several of them.

A guess is only ever a guess: the sampler says which token comes, and a draft counts where it is that one. So a proposer
changes how many steps an answer takes, never a token of it. It knows slots and their tokens; whether it is asked, and for how many,
is decided above. One file here is one proposer, with `open(...)`; its name is the file's.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol


class Proposer(Protocol):
    """Told everything that a sequence says, in order."""

    def open(self, slot: int, tokens: Sequence[int]) -> None:
        """A sequence takes the slot, with these tokens so far."""
        ...

    def close(self, slot: int) -> None:
        """It is over. Closing a slot that is not open is harmless."""
        ...

    def propose(self, slot: int, most: int) -> list[int]:
        """At most so many tokens that may come next; none where there is nothing to go by."""
        ...

    def learn(self, slot: int, tokens: Sequence[int], drafted: int) -> None:
        """These tokens came, after so many drafts: all but the last of them were guessed."""
        ...


def names() -> list[str]:
    """The proposers there are."""
    return sorted(module.name for module in iter_modules(__path__))


def open_proposer(name: str, *, max_seqs: int, max_context: int) -> Proposer:
    """The proposer of that name. Raises ValueError where there is none."""
    if name not in names():
        raise ValueError(f"no proposer is named {name!r}: there are {', '.join(names())}")
    return import_module(f"{__name__}.{name}").open(max_seqs=max_seqs, max_context=max_context)
