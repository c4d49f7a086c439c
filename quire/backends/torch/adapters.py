"""Adapters on a torch device: the pairs of all slots of a target in two matrices, and a program without them.

    a [slots * r, k], b [n, slots * r]     y + where(mine, x a^T, 0) b^T,  mine [T, slots * r]: columns of the row's own slot

So rows of any mixture of adapters are two products and no loop; b has the scales in it. r is the largest rank that was
loaded for the target, in sixteens: memory is taken when an adapter needs it. What others computed for a row is thrown away,
not multiplied by zero, so numbers that are none stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from quire.backends.adapters import Pair, Target
from quire.backends.recorder import Instruction, Recording, Value
from quire.backends.torch.batch import DeviceBatch
from quire.layouts import Dense


class Stack:
    """The pairs of one target."""

    def __init__(self, target: Target, device: torch.device, dtype: torch.dtype):
        self.target = target
        self.rank = 0  # columns of a slot
        self.a = torch.empty(0, target.k, dtype=dtype, device=device)
        self.b = torch.empty(target.n, 0, dtype=dtype, device=device)

    def set(self, slot: int, pair: Pair | None) -> None:
        """Put a pair into a slot, or clear it."""
        self.check(slot, pair)
        if pair is not None:
            self._grow(-(-pair.rank // 16) * 16)
        if not self.rank:
            return
        own = slice(slot * self.rank, (slot + 1) * self.rank)
        self.a[own] = 0
        self.b[:, own] = 0
        if pair is not None:
            used = slice(own.start, own.start + pair.rank)
            self.a[used] = numbers(pair.a).to(self.a)
            self.b[:, used] = (numbers(pair.b) * pair.scale).to(self.b)

    def check(self, slot: int, pair: Pair | None) -> None:
        """Raises ValueError where there is no such slot, or the pair is not one of this target."""
        if not 0 <= slot < self.target.slots:
            raise ValueError(f"slot {slot} of {self.target.slots} for adapters")
        if pair is not None and (pair.a.shape, pair.b.shape) != (
            (pair.rank, self.target.k),
            (self.target.n, pair.rank),
        ):
            raise ValueError(f"{self.target.name}: a pair of {pair.a.shape} and {pair.b.shape}")

    def _grow(self, rank: int) -> None:
        if rank <= self.rank:
            return
        slots, old = self.target.slots, self.rank
        a, b = self.a.new_zeros(slots, rank, self.target.k), self.b.new_zeros(self.target.n, slots, rank)
        if old:
            a[:, :old] = self.a.view(slots, old, -1)
            b[:, :, :old] = self.b.view(-1, slots, old)
        self.a, self.b, self.rank = a.flatten(0, 1), b.flatten(1, 2), rank

    def mine(self, batch: DeviceBatch, taken: bool) -> torch.Tensor:
        """The columns that each row keeps; computed once a step for all targets of that rank."""

        def make() -> torch.Tensor:
            rows = slots_of(batch, taken)
            owner = torch.arange(self.target.slots, device=rows.device, dtype=rows.dtype).repeat_interleave(self.rank)
            return rows[:, None] == owner

        return batch.once(("adapters", taken, self.target.slots, self.rank), make)


class Stacks:
    """The stacks of one program, by target. `groups` are targets that add to columns of one product."""

    def __init__(self, groups: Sequence[Sequence[Target]], device: torch.device, dtype: torch.dtype):
        self.by_target = {target: Stack(target, device, dtype) for targets in groups for target in targets}

    def place(self, slot: int, pairs: Mapping[Target, Pair]) -> None:
        """Place pairs in a slot: see Adapts.place."""
        unknown = [target.name for target in pairs if target not in self.by_target]
        if unknown:
            raise ValueError(f"the program has no target {unknown[0]!r}")
        for target, stack in self.by_target.items():
            stack.set(slot, pairs.get(target))


def slots_of(batch: DeviceBatch, taken: bool) -> torch.Tensor:
    """The slot of each row, or of each row that was taken."""
    own = batch.adapters
    assert own is not None
    return batch.once("taken adapters", lambda: own.index_select(0, batch.logit_rows)) if taken else own


def without(recording: Recording) -> Recording:
    """The recording without its adapters, for rows that have none. Changes the recording's instructions."""
    same: dict[Value, Value] = {}
    kept: list[Instruction] = []
    for i in recording.instructions:
        i.inputs = [same.get(v, v) for v in i.inputs]
        for s in i.segments:
            s.x = same.get(s.x, s.x)
        if i.op == "adapt":
            same[i.outputs[0]] = i.inputs[0]
        else:
            kept.append(i)
    return replace(recording, instructions=kept, output=same.get(recording.output, recording.output))


def numbers(w: Dense) -> torch.Tensor:
    """A half of a pair, float32."""
    return torch.from_numpy(w.dequantize())
