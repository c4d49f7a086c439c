"""Several transfers at once: a few threads, one progress bar for all of them, and a stop that keeps every byte that came.

The first failure stops the others where they stand, at a chunk's end: what they have is on disk. An interrupt does the same. Threads
are daemons: one that hangs in a dead connection does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from quire.weights.download.progress import Progress

THREADS = 6
PATIENCE = 3.0  # seconds that a stop waits for a thread to notice
T = TypeVar("T")


class Stopped(Exception):
    """Another transfer failed, or the user interrupted: this one ends too."""


class Shared:
    """One Progress for several transfers. `done` bytes of `total` are here before any starts."""

    def __init__(self, progress: Progress, total: int | None, label: str, done: int = 0):
        self._progress = progress
        self._lock = threading.Lock()
        self.stop = threading.Event()
        progress.start(total, label, done)

    def slice(self, done: int = 0) -> Slice:
        """What one transfer tells; `done` of its bytes were counted at the start."""
        return Slice(self, done)

    def add(self, n: int) -> None:
        if self.stop.is_set():
            raise Stopped
        with self._lock:
            self._progress.advance(n)

    def note(self, text: str) -> None:
        with self._lock:
            self._progress.note(text)


class Slice:
    """The Progress of one transfer, added to the others'."""

    def __init__(self, shared: Shared, done: int):
        self._shared = shared
        self._done = done

    def start(self, total: int | None, label: str, done: int = 0) -> None:
        change, self._done = done - self._done, done
        if change:  # it went back to the start, or an earlier run left more than was counted
            self._shared.add(change)

    def advance(self, n: int) -> None:
        self._done += n
        self._shared.add(n)

    def finish(self) -> None: ...

    def note(self, text: str) -> None:
        self._shared.note(text)


def run_all(jobs: Sequence[Callable[[], T]], stop: threading.Event, threads: int = THREADS) -> list[T]:
    """The results of all jobs, in their order. Raises the first failure once the others have stopped."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in range(len(jobs)):
        left.put(i)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def work() -> None:
        while not stop.is_set():
            try:
                i = left.get_nowait()
            except queue.Empty:
                return
            try:
                results[i] = jobs[i]()
            except Stopped:
                return
            except BaseException as e:
                failures.append(e)
                stop.set()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(jobs)))]
    for w in workers:
        w.start()
    try:
        for w in workers:
            while w.is_alive():
                w.join(0.2)  # a wait that an interrupt can end
                if stop.is_set():
                    w.join(PATIENCE)
                    break
    except BaseException:
        stop.set()
        for w in workers:
            w.join(PATIENCE)
        raise
    if failures:
        raise failures[0]
    return [results[i] for i in range(len(jobs))]
