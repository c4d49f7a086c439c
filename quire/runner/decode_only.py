"""Decode-only plans: every sequence computes one token, which its slot sampled last, and samples the next one.

Nearly all steps are decode-only, and repeat the step before: the same sequences in the same order, most of them with the very
Work object they had. So the slot numbers read from a plan are cached, and only a Work that is another object is looked at.
This module knows plans and arrays; the caller checks whether the slots can compute another token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from quire.runner.plan import Work

Index = npt.NDArray[np.intp]


class DecodeOnly:
    """`slot` has the slots of the newest decode-only plan, row for row; the same array for as long as they are the same."""

    __slots__ = ("_count", "_work", "slot")

    def __init__(self, count: int):
        """`count` slots exist."""
        self._count = count
        self._work: list[Work] = []
        self.slot: Index = np.zeros(0, np.intp)

    def take(self, work: list[Work]) -> bool:
        """Whether this is a decode-only plan, of different slots that exist."""
        if work and len(work) == len(self._work):
            new = [(w, old) for w, old in zip(work, self._work, strict=True) if w is not old]
            if all(w.slot == old.slot and _decodes(w) for w, old in new):
                self._work = work
                return True
        if not work or not all(map(_decodes, work)):
            return False
        slots = [w.slot for w in work]
        if len(set(slots)) < len(slots) or min(slots) < 0 or max(slots) >= self._count:
            return False
        self._work, self.slot = work, np.array(slots, np.intp)
        return True


def _decodes(w: Work) -> bool:
    return w.tokens is None and w.n == 1 and w.start == -1 and w.sample and not w.drafts and not w.prompt_logits
