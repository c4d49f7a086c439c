"""Adapters on the GPU: room for all slots of a site at once, at addresses that never change, so that captured steps meet them.

    a [slots, sites * r, k], b [slots, n, r], ranks [sites, slots]     r is the largest rank that may be loaded, in sixteens

Sites that add to one product lie together, in a `Bundle`: n are the channels of all of them. An adapter is loaded by writing
into its slot; what is captured reads ranks where it runs, so it pays for the ranks that are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.backends.adapters import Pair, Site
from quire.backends.cuda.kernels.lora import BLOCK_N, RANK, Pairs
from quire.backends.torch.adapters import Stack, Stacks, numbers


class FixedStack(Stack):
    """The pairs of one site: a part of a bundle. `pairs` are those of this site alone, `bundle` those of all."""

    def __init__(self, site: Site, pairs: Pairs, bundle: Bundle):
        self.site = site
        self.rank = pairs.rank
        self.a, self.b, self.ranks = pairs.a, pairs.b, pairs.ranks[0]
        self.pairs = pairs
        self.bundle = bundle

    def set(self, slot: int, pair: Pair | None) -> None:
        self.check(slot, pair)
        if pair is not None and pair.rank > self.rank:
            raise ValueError(f"{self.site.name}: a pair of rank {pair.rank}, and room for {self.rank}")
        self.ranks[slot] = 0 if pair is None else pair.rank
        self.a[slot] = 0
        self.b[slot] = 0
        if pair is not None:
            self.a[slot, : pair.rank] = numbers(pair.a).to(self.a)
            self.b[slot, :, : pair.rank] = (numbers(pair.b) * pair.scale).to(self.b)


class Bundle:
    """The pairs of sites that add to columns of one product, in their order."""

    def __init__(self, sites: Sequence[Site], device: torch.device, dtype: torch.dtype):
        first = sites[0]
        rank = -(-max(site.rank for site in sites) // RANK) * RANK
        widths = [site.n for site in sites]
        a = torch.zeros(first.slots, len(sites) * rank, first.k, dtype=dtype, device=device)
        b = torch.zeros(first.slots, sum(widths), rank, dtype=dtype, device=device)
        ranks = torch.zeros(len(sites), first.slots, dtype=torch.int32, device=device)
        self.pairs = Pairs(a, b, ranks, _blocks(widths, device))
        self.stacks: dict[Site, FixedStack] = {}
        end = 0
        for i, site in enumerate(sites):
            own = Pairs(
                a[:, i * rank : (i + 1) * rank], b[:, end : end + site.n], ranks[i : i + 1], _blocks([site.n], device)
            )
            self.stacks[site] = FixedStack(site, own, self)
            end += site.n


class FixedStacks(Stacks):
    """Those of one program."""

    def __init__(self, groups: Sequence[Sequence[Site]], device: torch.device, dtype: torch.dtype):
        self.by_site: dict[Site, Stack] = {}
        for sites in groups:
            new = [site for site in dict.fromkeys(sites) if site not in self.by_site]
            if new:
                self.by_site |= Bundle(new, device, dtype).stacks


def _blocks(widths: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [blocks, 3]: the site, the first channel and the end of each piece of channels; none has two sites."""
    found: list[tuple[int, int, int]] = []
    end = 0
    for i, n in enumerate(widths):
        found += [(i, at, end + n) for at in range(end, end + n, BLOCK_N)]
        end += n
    return torch.tensor(found, dtype=torch.int32, device=device)
