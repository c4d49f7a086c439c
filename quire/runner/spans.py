"""Spans: stretches of a prompt that are no text, such as a picture. Their rows are given instead of looked up in the embedding.

A `Span` is what a request says of one stretch; it crosses processes. `SlotSpans` is the same for a running sequence, as arrays:
the batch builder asks it which rows of a chunk are given, and where the chunk's tokens are. Chunks may cut a span anywhere.

  tokens     T T T I I I I I I T T      T: text, I: a span of 6 tokens whose `advance` is 3
  positions  0 1 2 3 3 3 4 4 4 6 7      along one axis; `positions` of the span are 0 0 0 1 1 1, counted from its start

Outside of spans all axes agree. Nothing here knows what a row means or who made it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from quire.backends.batch import I32
from quire.layouts import Floats


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of `length` prompt tokens, from `start` on, that is no text. What the prompt has for ids there does not matter."""

    start: int
    length: int
    kind: str  # for instance "image"; two kinds never share pages
    digest: bytes  # of the content: who gives the same digest twice vouches that the rows are the same
    rows: bytes = b""  # float32, little-endian, [length, width]: these stand where the embedding's rows would
    positions: bytes = (
        b""  # int32, little-endian, [axes, length]: from the position of `start`; empty: one after another
    )
    advance: int = 0  # positions that the span takes up; 0: as many as tokens

    @property
    def end(self) -> int:
        """The index of the token behind its last one."""
        return self.start + self.length

    @property
    def shift(self) -> int:
        """By how much it moves the positions of the tokens after it."""
        return self.advance - self.length if self.advance else 0


class SlotSpans:
    """The spans of one sequence. They must have been checked: in order, apart, and with rows of one width."""

    __slots__ = ("_before", "_ends", "_positions", "_rows", "_starts", "axes")

    def __init__(self, spans: Sequence[Span]):
        self._starts = [span.start for span in spans]
        self._ends = [span.end for span in spans]
        self._rows = [np.frombuffer(span.rows, "<f4").reshape(span.length, -1) for span in spans]
        self._positions = [
            np.frombuffer(span.positions, "<i4").reshape(-1, span.length) if span.positions else None for span in spans
        ]
        # What all spans before each, and before the end, have moved positions by.
        self._before = np.cumsum([0, *(span.shift for span in spans)])
        self.axes = max((own.shape[0] for own in self._positions if own is not None), default=1)

    @property
    def shifts(self) -> bool:
        """Whether some token is elsewhere than its index says."""
        return any(own is not None for own in self._positions) or bool(self._before.any())

    def _within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Each span that has tokens from `start` up to `end`: which one, and the first and the end of these tokens."""
        for i in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[i] >= end:
                return
            yield i, max(start, self._starts[i]), min(end, self._ends[i])

    def blanked(self, tokens: Sequence[int], blank: int, start: int = 0) -> list[int]:
        """The tokens, which begin at index `start`, with `blank` for those that are no text."""
        made = list(tokens)
        for _, first, end in self._within(start, start + len(made)):
            made[first - start : end - start] = [blank] * (end - first)
        return made

    def given(self, start: int, end: int) -> Iterator[tuple[int, Floats]]:
        """The rows given for tokens from `start` up to `end`: how far from `start` they begin, and themselves."""
        for i, first, last in self._within(start, end):
            yield first - start, self._rows[i][first - self._starts[i] : last - self._starts[i]]

    def coords(self, start: int, end: int) -> I32:
        """Where these tokens are along each axis: [axes, end - start]."""
        index = np.arange(start, end)
        flat = index + self._before[np.searchsorted(self._ends, index, side="right")]
        made = np.tile(flat.astype(np.int32), (self.axes, 1))
        for i, first, last in self._within(start, end):
            own = self._positions[i]
            if own is not None:
                at = self._starts[i] + self._before[i]
                made[:, first - start : last - start] = at + own[:, first - self._starts[i] : last - self._starts[i]]
        return made
