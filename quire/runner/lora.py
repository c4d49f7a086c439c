"""Adapters that are resident in a runner: which of the program's slots holds which, by the keys that plans name them by.

Used in the runner's own order of work: a change takes place between two steps, after every step that was given before it. So a
sequence that is still in flight never meets a slot that changed under it. Knows no files and no names of adapters.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.backends.adapters import Adapts, Pair, Target


class Loras:
    """The slots of one program."""

    def __init__(self, program: Adapts, slots: int):
        self._program = program
        self._free = list(range(slots - 1, -1, -1))
        self._held: dict[str, int] = {}

    @property
    def room(self) -> int:
        """Slots that are free."""
        return len(self._free)

    def put(self, key: str, pairs: Mapping[Target, Pair]) -> None:
        """Take a slot; there must be one. What fails leaves everything as it was."""
        if key in self._held or not self._free:
            raise ValueError(f"adapter {key!r}: it is there already, or no slot is free ({len(self._held)} are held)")
        slot = self._free[-1]
        self._program.place(slot, pairs)
        self._held[key] = self._free.pop()

    def drop(self, key: str) -> None:
        """Clear its slot."""
        slot = self._held.pop(key)
        self._program.place(slot, {})
        self._free.append(slot)

    def slot_of(self, key: str) -> int:
        """-1 for no adapter."""
        if not key:
            return -1
        if key not in self._held:
            raise ValueError(f"the adapter {key!r} is not loaded any more")
        return self._held[key]
