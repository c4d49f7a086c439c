"""Adapters on the GPU: room for all slots of a target at once, at addresses that never change, so that captured steps meet them.

    a [slots, targets * r, k], b [slots, n, r], ranks [targets, slots]     r is the largest rank that may be loaded, in sixteens

Targets that add to one product lie together, in a `Bundle`: n are the channels of all of them. An adapter is loaded by writing
into its slot; what is captured reads ranks where it runs, so it pays for the ranks that are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.backends.adapters import Pair, Target
from quire.backends.cuda.kernels.lora import BLOCK_N, RANK, Pairs
from quire.backends.torch.adapters import Stack, Stacks, numbers


class FixedStack(Stack):
    """The pairs of one target: a part of a bundle. `pairs` are those of this target alone, `bundle` those of all."""

    def __init__(self, target: Target, pairs: Pairs, bundle: Bundle):
        self.target = target
        self.rank = pairs.rank
        self.a, self.b, self.ranks = pairs.a, pairs.b, pairs.ranks[0]
        self.pairs = pairs
        self.bundle = bundle

    def set(self, slot: int, pair: Pair | None) -> None:
        self.check(slot, pair)
        if pair is not None and pair.rank > self.rank:
            raise ValueError(f"{self.target.name}: a pair of rank {pair.rank}, and room for {self.rank}")
        self.ranks[slot] = 0 if pair is None else pair.rank
        self.a[slot] = 0
        self.b[slot] = 0
        if pair is not None:
            self.a[slot, : pair.rank] = numbers(pair.a).to(self.a)
            self.b[slot, :, : pair.rank] = (numbers(pair.b) * pair.scale).to(self.b)


class Bundle:
    """The pairs of targets that add to columns of one product, in their order."""

    def __init__(self, targets: Sequence[Target], device: torch.device, dtype: torch.dtype):
        first = targets[0]
        rank = -(-max(target.rank for target in targets) // RANK) * RANK
        widths = [target.n for target in targets]
        a = torch.zeros(first.slots, len(targets) * rank, first.k, dtype=dtype, device=device)
        b = torch.zeros(first.slots, sum(widths), rank, dtype=dtype, device=device)
        ranks = torch.zeros(len(targets), first.slots, dtype=torch.int32, device=device)
        self.pairs = Pairs(a, b, ranks, _blocks(widths, device))
        self.stacks: dict[Target, FixedStack] = {}
        end = 0
        for i, target in enumerate(targets):
            own = Pairs(
                a[:, i * rank : (i + 1) * rank],
                b[:, end : end + target.n],
                ranks[i : i + 1],
                _blocks([target.n], device),
            )
            self.stacks[target] = FixedStack(target, own, self)
            end += target.n


class FixedStacks(Stacks):
    """The stacks of one program, at addresses that never change."""

    def __init__(self, groups: Sequence[Sequence[Target]], device: torch.device, dtype: torch.dtype):
        self.by_target: dict[Target, Stack] = {}
        for targets in groups:
            new = [target for target in dict.fromkeys(targets) if target not in self.by_target]
            if new:
                self.by_target |= Bundle(new, device, dtype).stacks


def _blocks(widths: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [blocks, 3]: the target, the first channel and the end of each piece of channels; none has two targets."""
    found: list[tuple[int, int, int]] = []
    end = 0
    for i, n in enumerate(widths):
        found += [(i, at, end + n) for at in range(end, end + n, BLOCK_N)]
        end += n
    return torch.tensor(found, dtype=torch.int32, device=device)
