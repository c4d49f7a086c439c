"""Places for the tensors of a program: one block of memory, where tensors that never live at the same time share bytes.

First fit by lifetime, largest first. Inputs live from the start and the output to the end, so both can be read outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.backends.recorder import Instruction, Value


@dataclass(slots=True, eq=False)
class Room(Value):
    """Memory that one instruction uses while it runs, and nobody else meanwhile: written among its results, never read."""

    nbytes: int = 0


@dataclass(slots=True)
class _Life:
    value: Value
    start: int
    end: int
    size: int
    offset: int = -1


def lay_out(
    program: list[Instruction], inputs: Iterable[Value], output: Value, size: Callable[[Value], int]
) -> tuple[dict[Value, int], int]:
    """The offset of every value, and the bytes needed in all. `size` must give multiples of 64."""
    lives: dict[Value, _Life] = {v: _Life(v, -1, -1, size(v)) for v in inputs}
    for at, i in enumerate(program):
        for v in i.writes():
            lives[v] = _Life(v, at, at, size(v))
        for v in i.reads():
            lives[v].end = at
    lives[output].end = len(program)
    placed: list[_Life] = []
    for life in sorted(lives.values(), key=lambda x: (-x.size, x.start)):
        at = 0
        for other in sorted((p for p in placed if p.start <= life.end and life.start <= p.end), key=lambda p: p.offset):
            if at + life.size <= other.offset:
                break
            at = max(at, other.offset + other.size)
        life.offset = at
        placed.append(life)
    total = max((p.offset + p.size for p in placed), default=0)
    return {p.value: p.offset for p in placed}, total
