"""Proposers: who gives the draft tokens of speculative decoding, which one step of the model then verifies.

A proposer gets the whole batch and answers for all of its rows. The sampler says which token comes, and a draft token counts
where it is that one: so a proposer changes how many steps an answer takes, never a token of it. There are two kinds.

A `Proposer` works on the host and knows each sequence's tokens up to the newest step that was read. Steps in flight may have
sampled more; it is told how many at most (`DraftRows.ahead`) and predicts those tokens, too. The device knows which of
them came, and takes the draft tokens from behind them. So no step waits for the one before it.

A `DeviceProposer` (device.py beside the device's runner) works on tensors, and may have layers and KV cache groups of its own.

One file here is one proposer, with `open(...)`; its name is the file's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Protocol


@dataclass(slots=True)
class DraftRows:
    """The sequences of a step that may have draft tokens, an element each."""

    slots: list[int]
    most: list[int]  # draft tokens that are of use
    ahead: list[
        int
    ]  # tokens that were sampled since those the proposer was told, at most: draft tokens come after them


class Proposer(Protocol):
    """A proposer on the host. It is told every token of a sequence, in order."""

    on_device: ClassVar[bool] = False

    def open(self, slot: int, tokens: Sequence[int]) -> None:
        """A sequence takes the slot, with these tokens so far."""
        ...

    def close(self, slot: int) -> None:
        """Forget the sequence in a slot. Closing a slot that is not open is harmless."""
        ...

    def propose(self, batch: DraftRows, hidden: Any = None) -> list[list[int]]:
        """Predict the next tokens of every row: at most `ahead + most` tokens that may come next: all that are predicted, then the draft tokens.
        None where there is nothing to go by. `hidden` is what it asked of the model; host proposers ask for nothing."""
        ...

    def learn(self, slot: int, tokens: Sequence[int], drafted: int) -> None:
        """Add the tokens that a step gave, of which all but the last were draft tokens. `drafted`: how many draft tokens it verified."""
        ...


def names() -> list[str]:
    """The proposers there are."""
    return sorted(module.name for module in iter_modules(__path__))


def open_proposer(name: str, *, max_seqs: int, max_context: int) -> Proposer:
    """The proposer of that name. Raises ValueError where there is none."""
    if name not in names():
        raise ValueError(f"no proposer is named {name!r}: there are {', '.join(names())}")
    return import_module(f"{__name__}.{name}").open(max_seqs=max_seqs, max_context=max_context)
