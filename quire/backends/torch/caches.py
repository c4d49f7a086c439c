"""Where K and V lie on a torch device: a cache for every layer, of the pool of its group.

K and V lie in pages, [pages, page_size, kv_heads, head_dim] a layer, so that a flat index addresses [pages * page_size,
kv_heads, head_dim]; one page more than the pool has takes what padding rows write, and stands in a page table for pages that are not
there. Where they are codes, the scales of a page lie beside it, [pages, kv_heads, page_size]. Knows shapes, not what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.backends.ops import KV
from quire.backends.torch.quantized import E4M3


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's. `kv` is the pool that it is of; `group` says whose page table addresses it."""

    group: int
    kv: KV
    keys: torch.Tensor
    values: torch.Tensor | None  # None where they are a part of the keys (kv.latent)
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    @property
    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that are apart."""
        assert self.values is not None  # the recorder lets no plain attention have a latent pool
        return self.keys, self.values

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        """What the codes are multiplied with, as kernels call it."""
        return {"k_scale": self.key_scale, "v_scale": self.value_scale}


def kv_dtype(kv: KV, dtype: torch.dtype) -> torch.dtype:
    """What K and V are kept as where `dtype` is computed in: float16 unless that is bfloat16, or codes."""
    halves = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    return {"f16": halves, "int8": torch.int8, "fp8": E4M3}[kv.dtype]


def caches(kv: KV, dtype: torch.dtype, device: torch.device) -> list[list[Cache]]:
    """Every layer of every group, with nothing in it."""
    return [[_cache(g, own, dtype, device) for _ in range(own.layers)] for g, own in enumerate(kv.groups)]


def _cache(group: int, kv: KV, dtype: torch.dtype, device: torch.device) -> Cache:
    def pages() -> torch.Tensor:
        shape = kv.pages + 1, kv.page_size, kv.kv_heads, kv.head_dim
        return torch.zeros(shape, dtype=kv_dtype(kv, dtype), device=device)

    def scales() -> torch.Tensor | None:
        if kv.dtype == "f16":
            return None
        return torch.zeros(kv.pages + 1, kv.kv_heads, kv.page_size, dtype=torch.float32, device=device)

    apart = not kv.latent
    return Cache(group, kv, pages(), pages() if apart else None, scales(), scales() if apart else None)
