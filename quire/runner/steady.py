"""Steady plans: every sequence goes on by the one token that only its slot knows, and has the next one sampled.

Nearly all steps are of this kind, and one is like the step before: the same sequences in the same order, most of them with
the very Work they had. So what is read from a plan is kept, and only a Work that is another object is looked at. This knows
plans and arrays; whether the slots can go on is not its business.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.runner.plan import Work

Index = npt.NDArray[np.intp]


class Steady:
    """`slot` has the slots of the newest steady plan, row for row; the same array for as long as they are the same."""

    __slots__ = ("_count", "_work", "slot")

    def __init__(self, count: int):
        """`count` slots exist."""
        self._count = count
        self._work: list[Work] = []
        self.slot: Index = np.zeros(0, np.intp)

    def take(self, work: list[Work]) -> bool:
        """Whether this is a steady plan, of different slots that exist."""
        if work and len(work) == len(self._work):
            new = [(w, old) for w, old in zip(work, self._work, strict=True) if w is not old]
            if all(w.slot == old.slot and _goes_on(w) for w, old in new):
                self._work = work
                return True
        if not work or not all(map(_goes_on, work)):
            return False
        slots = [w.slot for w in work]
        if len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= self._count:
            return False
        self._work, self.slot = work, np.array(slots, np.intp)
        return True


def _goes_on(w: Work) -> bool:
    return w.tokens is None and w.n == 1 and w.start == -1 and w.sample and not w.drafts and not w.prompt_logits
