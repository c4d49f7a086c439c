"""Adapters on the GPU: room for all slots of a site at once, at addresses that never change, so that captured steps meet them.

    a [slots, r, k], b [slots, n, r], ranks [slots]     r is the largest rank that may be loaded, in sixteens

An adapter is loaded by writing into its slot; what is captured reads ranks where it runs, so it pays for the ranks that are there.
"""

from __future__ import annotations

import torch

from quire.backends.adapters import Pair, Site
from quire.backends.cuda.kernels.lora import RANK
from quire.backends.torch.adapters import Stack, numbers


class FixedStack(Stack):
    """The pairs of one site."""

    def __init__(self, site: Site, device: torch.device, dtype: torch.dtype):
        super().__init__(site, device, dtype)
        self.rank = -(-site.rank // RANK) * RANK
        self.a = torch.zeros(site.slots, self.rank, site.k, dtype=dtype, device=device)
        self.b = torch.zeros(site.slots, site.n, self.rank, dtype=dtype, device=device)
        self.ranks = torch.zeros(site.slots, dtype=torch.int32, device=device)

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
