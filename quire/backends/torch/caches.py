"""The KV cache on a torch device: a pool for each group of layers, and a cache for every layer of it.

K and V lie in pages, [pages, page_size, kv_heads, head_dim] a layer, so that a flat index addresses [pages * page_size,
kv_heads, head_dim]; one page more than the pool has takes what padding rows write, and stands in a page table for pages that are not
there. Where they are codes, the scales of a page lie beside it, [pages, kv_heads, page_size]. All layers of a group are one tensor
(and one of scales), so that a page of all of them is gathered at once. Knows shapes, not what is in them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.backends.ops import KV
from quire.backends.torch.quantized import E4M3


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache of one layer. `kv` is the pool that it is of; `group` says whose page table addresses it."""

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
        """The scales of the codes, as kernels take them."""
        return {"k_scale": self.key_scale, "v_scale": self.value_scale}


def kv_dtype(kv: KV, dtype: torch.dtype) -> torch.dtype:
    """The type of K and V where `dtype` is computed in: float16 unless that is bfloat16, or codes."""
    halves = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    return {"f16": halves, "int8": torch.int8, "fp8": E4M3}[kv.dtype]


@dataclass(frozen=True, slots=True)
class Pool:
    """A group's K and V, with nothing in them at first. Parts are keys, and values where they are apart."""

    group: int
    kv: KV
    numbers: torch.Tensor  # [layers, parts, pages + 1, page_size, kv_heads, head_dim]
    scales: torch.Tensor | None  # float32 [layers, parts, pages + 1, kv_heads, page_size]

    @classmethod
    def of(cls, group: int, kv: KV, dtype: torch.dtype, device: torch.device) -> Pool:
        parts = kv.layers, 1 if kv.latent else 2, kv.pages + 1
        numbers = torch.zeros(
            (*parts, kv.page_size, kv.kv_heads, kv.head_dim), dtype=kv_dtype(kv, dtype), device=device
        )
        scales = None
        if kv.dtype != "f16":
            scales = torch.zeros((*parts, kv.kv_heads, kv.page_size), dtype=torch.float32, device=device)
        return cls(group, kv, numbers, scales)

    def cache(self, layer: int) -> Cache:
        """What a layer's attention is given."""
        own, scales = self.numbers[layer], None if self.scales is None else self.scales[layer]
        last = len(own) - 1  # the values, or keys that are values, too
        return Cache(
            self.group,
            self.kv,
            own[0],
            own[1] if last else None,
            None if scales is None else scales[0],
            scales[1] if last and scales is not None else None,
        )

    @property
    def words(self) -> list[torch.Tensor]:
        """The same memory as whole numbers, [layers, parts, pages + 1, words]."""
        held = [self.numbers] if self.scales is None else [self.numbers, self.scales]
        return [x.flatten(3).view(torch.int64) for x in held]
