"""The shape of a program's KV pools: which groups of layers there are, how many pages each has, and what a page takes.

Layers whose keys and values (or states) are kept for different lengths of time fall into groups; each group has a pool and a
page table of its own. This file knows numbers alone: no array, no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

KV_DTYPES: dict[str, tuple[int, int]] = {"f16": (2, 0), "int16": (2, 4), "int8": (1, 4), "fp8": (1, 4)}
"""What K and V may be kept as: bytes of a number, and bytes beside each token and head.

f16 rounds to two bytes: float16 on the CPU, what it computes in on a torch device. int8 keeps round(x * 127 / amax) of the
head's columns and a float32 scale amax / 127, for K and for V; int16 the same with 32639 for 127; fp8 the nearest e4m3 to x * 448 / amax,
and amax / 448.
"""


@dataclass(frozen=True, slots=True)
class KV:
    """The KV pool of one program: K and V of every layer, in pages.

    Layers whose KV is kept for different lengths of time fall into groups, each with a pool and a page table of its own:
    this is the first group, and `more` are the others, which have its page size and dtype.
    """

    layers: int
    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: str = "f16"  # see KV_DTYPES
    latent: int = 0  # when set, only keys are kept, and a token's values are the first `latent` columns of its key
    window: int = 0  # when set, no layer looks back further, and what lies before may be missing from the page table
    state: int = 0  # when set, layers keep no K and V: a page is so many float32 numbers for each layer, see Ops.conv
    more: tuple[KV, ...] = ()  # further groups

    @property
    def groups(self) -> tuple[KV, ...]:
        """The groups of a pool, this one first."""
        return (self, *self.more)

    @property
    def forgets(self) -> bool:
        """Whether a sequence stops needing some of its pages as it grows."""
        return bool(self.window or self.state)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers; a state has none of any one token."""
        number, beside = KV_DTYPES[self.dtype]
        return self.layers * (1 if self.latent else 2) * self.kv_heads * (self.head_dim * number + beside)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layers * self.state * 4 if self.state else self.page_size * self.token_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(kv.pages * kv.page_bytes for kv in self.groups)

    def sized(self, pages: Sequence[int], dtype: str | None = None) -> KV:
        """The same groups with so many pages each."""
        first, *rest = [
            replace(kv, pages=n, dtype=dtype or kv.dtype, more=()) for kv, n in zip(self.groups, pages, strict=True)
        ]
        return replace(first, more=tuple(rest))
