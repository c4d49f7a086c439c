"""Stop strings over a stream of text: nothing that is part of a match gets out, nothing else waits longer than it must.

The match is the one that is complete first; of several complete at the same character, the longest. So the answer does
not depend on how the text was cut into pieces. Only the longest end of the text that some stop string begins with is
held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """One stream of text. After a match, `matched` is set and nothing more comes out."""

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops = tuple(dict.fromkeys(s for s in stops if s))
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that may go out now."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        best: tuple[int, int, str] | None = None  # end, start, stop string
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = at + len(stop), at, stop
        if best is not None:
            end, start, self.matched = best
            self._held = ""
            return text[:end] if self._include else text[:start]
        keep = self._prefix_at_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _prefix_at_end(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < len(text) - longest:
                if stop.startswith(text[at:]):
                    longest = len(text) - at
                    break
                at = text.find(stop[0], at + 1)
        return longest
