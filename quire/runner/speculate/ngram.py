"""Prompt lookup: what followed the last time that the sequence said its last few tokens is what may follow now.

    .. the cat sat on the mat . the cat ?        the longest match ends here; of several, the latest
       ~~~~~~~ sat on the                        what followed is the draft

No model and no state but the tokens: it costs a look through them, on the host, while the device computes. A continuation
that runs past the end goes on with itself, as text that repeats does. A sequence is trusted with more draft tokens while they are right;
wrong ones make it wait for longer matches, so text that never repeats costs next to nothing. Tokens alone decide, never the
batch or the clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from quire.runner.speculate import DraftRows

LEAST, MOST = 2, 8  # tokens that must be the same, and beyond which more of them tell nothing
START = 2  # draft tokens that a new sequence is trusted with


class NGram:
    """Tokens by slot."""

    on_device: ClassVar[bool] = False

    def __init__(self, max_seqs: int, max_context: int):
        # Rows of untouched memory: what no sequence has reached takes none.
        self._tokens: npt.NDArray[np.int32] = np.zeros((max_seqs, max_context + 1), np.int32)
        self._length = [0] * max_seqs
        self._trust = [START] * max_seqs  # draft tokens at a time
        self._need = [LEAST] * max_seqs  # tokens that must be the same

    def open(self, slot: int, tokens: Sequence[int]) -> None:
        self._length[slot], self._trust[slot], self._need[slot] = 0, START, LEAST
        self._add(slot, tokens)

    def close(self, slot: int) -> None:
        self._length[slot] = 0

    def propose(self, batch: DraftRows, hidden: Any = None) -> list[list[int]]:
        rows = zip(batch.slots, batch.most, batch.ahead, strict=True)
        return [
            self._continue(slot, ahead + min(most, self._trust[slot])) if most else [] for slot, most, ahead in rows
        ]

    def _continue(self, slot: int, count: int) -> list[int]:
        """Up to that many tokens that followed the last n-gram where it occurred before; none where it did not."""
        said = self._tokens[slot, : self._length[slot]]
        end, same = _match(said)
        if same < self._need[slot]:
            return []
        found = said[end : end + count].tolist()
        while len(found) < count:  # what repeats goes on repeating
            found.append(found[len(found) - (said.size - end)])
        return found

    def learn(self, slot: int, tokens: Sequence[int], drafted: int) -> None:
        self._add(slot, tokens)
        if not drafted:
            return
        right = len(tokens) - 1
        if right == 0:
            self._trust[slot], self._need[slot] = 1, min(MOST, self._need[slot] + 1)
        else:
            grown = 2 * self._trust[slot] if right == drafted else right
            self._trust[slot], self._need[slot] = min(grown, self._tokens.shape[1]), LEAST

    def _add(self, slot: int, tokens: Sequence[int]) -> None:
        first = self._length[slot]
        kept = tokens[: self._tokens.shape[1] - first]  # the last token of a full context is never continued
        self._tokens[slot, first : first + len(kept)] = kept
        self._length[slot] = first + len(kept)


def _match(said: npt.NDArray[np.int32]) -> tuple[int, int]:
    """The longest earlier occurrence of the last tokens, of several the latest: where it ends, and how many are the same."""
    if said.size < 2:
        return 0, 0
    at = np.flatnonzero(said[:-1] == said[-1])  # where a match of `same` tokens has its last
    if at.size == 0:
        return 0, 0
    for same in range(1, MOST):
        on = at[at >= same]
        longer = on[said[on - same] == said[-1 - same]] if on.size else on
        if longer.size == 0:
            return int(at[-1]) + 1, same
        at = longer
    return int(at[-1]) + 1, MOST


def open(*, max_seqs: int, max_context: int) -> NGram:
    """The proposer, for an engine of that size."""
    return NGram(max_seqs, max_context)
