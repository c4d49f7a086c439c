"""Clocks around the host's share of a step, set into an engine that is already there. Used by gpu.py and host.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

STEP = ("plan", "launch", "read", "commit")


class HostTimes:
    """Clocks around the host's share of an engine's steps: planning, launching, reading what came back, committing.

    `read` is what follows the wait for a device; a runner on the host has none.
    """

    def __init__(self, engine: Any):
        self.seconds: dict[str, list[float]] = {name: [] for name in STEP}
        scheduler, runner = engine._scheduler, engine._runner
        scheduler.plan = self._timed("plan", scheduler.plan)
        scheduler.commit = self._timed("commit", scheduler.commit)
        runner.forward = self._timed("launch", runner.forward)
        runner.sample = self._timed("launch", runner.sample)
        if answers := getattr(runner, "_answers", None):
            answers.read = self._timed("read", answers.read)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        times = self.seconds[name]

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            times.append(time.perf_counter() - start)
            return result

        return timed

    def clear(self) -> None:
        for times in self.seconds.values():
            times.clear()

    def milliseconds(self, steps: int) -> dict[str, float]:
        """Mean of each a step, over the newest steps."""
        calls = {"launch": 2 * steps}
        return {
            name: round(1e3 * sum(times[-calls.get(name, steps) :]) / max(1, steps), 3)
            for name, times in self.seconds.items()
        }

    def totals(self) -> dict[str, float]:
        """Seconds of each since `clear`."""
        return {name: round(sum(times), 3) for name, times in self.seconds.items()}
