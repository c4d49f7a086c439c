"""What is told of a step of an engine: who rode in it, how many tokens, how long it took, and what held others back.

An engine keeps the newest `KEPT` of these. They hold numbers and the ids of requests, never their tokens.
"""

from __future__ import annotations

import msgspec

KEPT = 256  # steps that an engine keeps

# Why a sequence computes less in a step than it could, or nothing. What limits add to these is theirs: see engine/limits.py.
TOKENS = "tokens"  # the step is full
STEP_TIME = "step_time"  # more of its prompt would take longer than those who write an answer can wait
SLOTS = "slots"  # as many sequences run as may
LOADING = "loading"  # cached pages of it are on their way from somewhere else
PAGES = "pages"  # no KV pages are left for it, or it gave way to another one for that reason


class StepInfo(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One step."""

    step: int
    seconds: (
        float  # from the completion of the step before it (or its own start, if that was later) to its own completion
    )
    ended: float  # when it was complete, in seconds of the engine's clock
    rows: list[tuple[str, int]]  # who rode in it: the id of a request, and how many of its tokens
    waiting: int = 0  # requests without a slot when it was planned
    held: dict[str, int] = {}  # sequences that computed less than they could, or nothing, by the reason

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return sum(n for _, n in self.rows)
