"""Ranges of one file, fetched side by side and handed over in their order.

The bytes handed over are always a beginning of the file: their writer can be stopped at any time, and loses only what
was on its way. Knows nothing of files or requests: `fetch` brings the bytes from `first` up to `end`, and calls `going` now and
then, which raises when they are not wanted any more. A failure is raised where its range would have been.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

SEGMENT = 8 << 20  # bytes of a range
LANES = 4  # ranges on their way at once

Fetch = Callable[[int, int, Callable[[], None]], bytes]


class NotWanted(Exception):
    """A range that the iteration needs no more: it was stopped."""


class Prefetch:
    """Iterate over it once; `stop` it in any case. At most `lanes` ranges are held."""

    def __init__(self, fetch: Fetch, first: int, end: int, *, lanes: int, segment: int):
        self._fetch = fetch
        self._spans = [(at, min(at + segment, end)) for at in range(first, end, segment)]
        self._lanes = lanes
        self._here: dict[int, bytes | Exception] = {}
        self._asked = self._given = 0
        self._stopped = False
        self._changed = threading.Condition()

    def __iter__(self) -> Iterator[bytes]:
        for _ in range(min(self._lanes, len(self._spans))):
            threading.Thread(target=self._work, daemon=True).start()
        for i in range(len(self._spans)):
            with self._changed:
                while i not in self._here:
                    self._changed.wait(1.0)  # not for ever: an interrupt is only noticed in between
                got = self._here.pop(i)
                self._given = i + 1
                self._changed.notify_all()
            if isinstance(got, Exception):
                raise got
            yield got

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _going(self) -> None:
        if self._stopped:
            raise NotWanted

    def _work(self) -> None:
        while (mine := self._next()) is not None:
            try:
                got: bytes | Exception = self._fetch(*self._spans[mine], self._going)
            except Exception as e:  # whatever it is: the one who waits for this range must hear of it
                got = e
            with self._changed:
                self._here[mine] = got
                self._changed.notify_all()
            if isinstance(got, Exception):
                return

    def _next(self) -> int | None:
        """The next range to fetch, once there is room for it; None when there is none."""
        with self._changed:
            while not self._stopped and self._asked < len(self._spans) and self._asked >= self._given + self._lanes:
                self._changed.wait()
            if self._stopped or self._asked == len(self._spans):
                return None
            self._asked += 1
            return self._asked - 1
