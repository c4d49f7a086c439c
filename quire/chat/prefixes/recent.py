"""The token ids of recent prompts and their answers, kept to compare later prompts with. Bounded in entries and in bytes.

A space is a namespace and an adapter, as the prefix tree has them: entries of one space are never compared with, and so never
quoted to, another. Ids alone are kept, four bytes each; texts are made of them when somebody asks.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

ENTRIES = 32  # of a space
SPACES = 256
BYTES = 16 << 20  # of all spaces together
STRIDE = 256  # tokens compared at once
IDS = "i"  # array's name for 32 bits

Space: TypeAlias = tuple[str, str]


@dataclass(slots=True, eq=False)
class Entry:
    """One prompt, and behind it what was generated once that is known."""

    serial: int
    space: Space
    agent: str
    ids: array[int]
    prompt: int  # tokens of the prompt; what follows was generated
    ended: int | None = None  # the newest serial when its answer ended; None: it is under way
    evictions: int = 0  # the engine's count when it ended
    restarts: int = 0  # times the engine had been started again then

    @property
    def nbytes(self) -> int:
        """Bytes that the entry counts for: its ids, and a bit for the objects around them."""
        return len(self.ids) * self.ids.itemsize + 512


class Recent:
    """Entries by space, the newest last. The oldest of all go where bytes run out."""

    def __init__(self, entries: int = ENTRIES, spaces: int = SPACES, nbytes: int = BYTES):
        self._entries, self._most_spaces, self._most_bytes = entries, spaces, nbytes
        self._spaces: dict[Space, deque[Entry]] = {}
        self.nbytes = 0
        self.serial = 0

    def add(self, space: Space, agent: str, prompt: Iterable[int]) -> Entry:
        """A new entry, kept unless it alone is over the bound."""
        self.serial += 1
        ids = array(IDS, prompt)
        entry = Entry(self.serial, space, agent, ids, len(ids))
        if entry.nbytes > self._most_bytes:
            return entry
        held = self._spaces.setdefault(space, deque())
        held.append(entry)
        self.nbytes += entry.nbytes
        if len(held) > self._entries:
            self._drop(held[0])
        self._shrink()
        return entry

    def grow(self, entry: Entry, more: Iterable[int]) -> None:
        """Put what was generated behind an entry's prompt."""
        before = entry.nbytes
        entry.ids.extend(more)
        if self._has(entry):
            self.nbytes += entry.nbytes - before
            self._shrink()

    def before(self, entry: Entry) -> list[Entry]:
        """Entries of the same space that came before, the newest first."""
        held = self._spaces.get(entry.space, ())
        return [other for other in reversed(held) if other.serial < entry.serial]

    def supersede(self, entry: Entry) -> None:
        """Drop entries that this one begins with: they tell nothing that it does not."""
        for other in self.before(entry):
            n = len(other.ids)
            if other.ended is not None and n <= len(entry.ids) and common(other.ids, entry.ids) == n:
                self._drop(other)

    def __len__(self) -> int:
        return sum(map(len, self._spaces.values()))

    def _has(self, entry: Entry) -> bool:
        return any(other is entry for other in self._spaces.get(entry.space, ()))

    def _shrink(self) -> None:
        while self.nbytes > self._most_bytes or len(self._spaces) > self._most_spaces:
            self._drop(min((held[0] for held in self._spaces.values()), key=lambda entry: entry.serial))

    def _drop(self, entry: Entry) -> None:
        held = self._spaces[entry.space]
        held.remove(entry)
        self.nbytes -= entry.nbytes
        if not held:
            del self._spaces[entry.space]


def common(a: array[int], b: array[int]) -> int:
    """Tokens that two arrays begin with alike."""
    most, at = min(len(a), len(b)), 0
    while at < most and a[at : at + STRIDE] == b[at : at + STRIDE]:
        at += STRIDE
    if at >= most:
        return most
    while at < most and a[at] == b[at]:
        at += 1
    return at
