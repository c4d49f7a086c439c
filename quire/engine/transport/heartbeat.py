"""Finding out whether an engine process still works: it is asked now and then, and answers between steps.

A process that is silent and does nothing (stopped, deadlocked) is lost after `seconds`. One that is silent and works may
be in a long step: it is given the time that the longest step could take on a slow machine, which `patience` works out. Where
the system does not tell what a process does, that longer time is for all.

Silence is counted in ticks of our own clock, so that a client which was itself stopped or busy blames nobody for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from quire.engine.types import EngineInfo

TICKS = 4  # questions in the time after which silence means something
WORKS = 0.02  # of one core: less is what a process does that waits
LONGER = 10.0  # times `seconds`, for one that works; and beyond that ...
SLOWEST = 1e9  # ... its longest step: bytes of weights times tokens that the slowest machine does in a second


class Work(NamedTuple):
    """What a process has done so far."""

    cpu_seconds: float
    page_ins: int  # waiting for a disk is work, too

    @classmethod
    def of(cls, pid: int) -> Work | None:
        """What the process of that id has done. None where the system does not tell, or the process has gone."""
        try:
            with open(f"/proc/{pid}/stat") as f:
                fields = f.read().rpartition(")")[2].split()
            return cls((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(fields[9]))
        except (OSError, ValueError, IndexError):
            return None


def patience(info: EngineInfo, seconds: float) -> float:
    """How long an engine may work without answering: a step has at most `max_batch_tokens`, each of which meets every weight."""
    return LONGER * seconds + info.max_batch_tokens * info.weight_bytes / SLOWEST


class Heartbeat:
    """Watches one engine process. `ask` sends it a question; the client sets `heard` at every message that it gets from it."""

    def __init__(
        self,
        seconds: float,
        patience: float,
        ask: Callable[[], None],
        work: Callable[[], Work | None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self._tick = seconds / TICKS
        self._patience = patience
        self._ask = ask
        self._work = work
        self._sleep = sleep
        self.heard = True  # the process sent a message

    async def lost(self) -> str:
        """Returns when the process is to be given up, with the reason in words."""
        silent = idle = 0  # ticks without a message; of these, the last ones in which the process did no work
        before = self._work()
        while True:
            if self.heard:
                self.heard = False
                silent = idle = 0
                self._ask()
            await self._sleep(self._tick)
            now = self._work()
            if not self.heard:
                silent += 1
                idle = idle + 1 if _rested(before, now, self._tick) else 0
                if idle >= TICKS:
                    return f"did not answer for {silent * self._tick:.3g} s and did nothing"
                if silent * self._tick >= self._patience:
                    return f"did not answer for {silent * self._tick:.3g} s"
            before = now


def _rested(before: Work | None, now: Work | None, seconds: float) -> bool:
    """Whether the process did no work in between, as far as the system tells."""
    if before is None or now is None:
        return False
    return now.cpu_seconds - before.cpu_seconds <= WORKS * seconds and now.page_ins == before.page_ins
