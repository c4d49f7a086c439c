"""Special tokens in text: cuts a string at the tokens that stand for themselves, before anything is merged.

Leftmost first, longest first, as the `tokenizers` library matches added tokens. Works for thousands of them without a
pattern of thousands of branches: a small expression finds the places where one may start (its first two characters),
a table lookup per possible length decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator


class Splitter:
    """Cuts text at some tokens. `swallow` holds the tokens that take the whitespace after them along."""

    def __init__(self, texts: Iterable[tuple[str, int]], swallow: frozenset[int] = frozenset()):
        self.ids = dict(texts)
        self._swallow = swallow
        lengths: dict[str, set[int]] = {}
        for text in self.ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        starts = sorted(self._lengths, key=len, reverse=True)
        self._start = re.compile("|".join(map(re.escape, starts))) if starts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Pieces of text and token ids, in order; no piece is empty."""
        if self._start is None:
            if text:
                yield text
            return
        done = at = 0
        while match := self._start.search(text, at):
            at = match.start()
            found = self._longest(text, at)
            if found is None:
                at += 1
                continue
            token, length = found
            if at > done:
                yield text[done:at]
            yield token
            at += length
            if token in self._swallow:
                while at < len(text) and text[at].isspace():
                    at += 1
            done = at
        if done < len(text):
            yield text[done:]

    def _longest(self, text: str, at: int) -> tuple[int, int] | None:
        for start in (text[at : at + 2], text[at : at + 1]):
            for length in self._lengths.get(start, ()):
                token = self.ids.get(text[at : at + length])
                if token is not None:
                    return token, min(length, len(text) - at)
        return None
