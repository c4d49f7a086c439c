"""Whether a model fits, before anything is allocated: weights, KV pool, working memory and a little, against what there is.

Pure arithmetic over what a backend estimates and the machine says; the sentences carry the numbers. What is counted is
memory that only we can give back. The model file's own pages are page cache, taken back by the system when it needs
them: they are not counted as needed, and count as available.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.backends.ops import Needs
from quire.config import PAGE_SIZE
from quire.machine import Memory
from quire.observe.errors import NotEnoughMemory

OVERHEAD = 48 << 20  # the interpreter's growth from here on: tokenizer, requests, sampling


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory there is, and what everything but the KV pool takes of it."""

    memory: Memory
    needs: Needs

    @property
    def fixed(self) -> int:
        return self.needs.weights + self.needs.working + OVERHEAD

    @property
    def room(self) -> int:
        """Bytes left for the KV pool. Refuses when not even a page's worth could be."""
        return max(0, self.memory.available - self.fixed)

    def check(self, kv_bytes: int, page_bytes: int) -> None:
        """Raises NotEnoughMemory, with every number, when the pool does not fit beside the rest."""
        if kv_bytes <= self.room:
            return
        tokens = kv_bytes // page_bytes * PAGE_SIZE
        if self.room >= page_bytes:
            cure = (
                f"ask for at most {size(self.room)} of KV memory (--kv-memory), which holds "
                f"{self.room // page_bytes * PAGE_SIZE} tokens, or free some memory"
            )
        else:
            cure = "use a smaller model or a smaller quantization of it, free some memory, or lower max_batch_tokens"
        raise NotEnoughMemory(
            f"the model needs {size(self.fixed + kv_bytes)}: weights {size(self.needs.weights)}, "
            f"KV pool {size(kv_bytes)} ({tokens} tokens), working memory {size(self.needs.working)}, "
            f"{size(OVERHEAD)} for the rest; {size(self.memory.available)} are available ({self.memory.bound})",
            cure=cure,
        )

    def line(self, kv_bytes: int) -> str:
        """The decision, for people."""
        return (
            f"memory: {size(self.fixed + kv_bytes)} of {size(self.memory.available)} available ({self.memory.bound}): "
            f"weights {size(self.needs.weights)}, KV pool {size(kv_bytes)}, working memory {size(self.needs.working)}, "
            f"{size(OVERHEAD)} for the rest; the file's pages are page cache and not counted"
        )


def size(n: int) -> str:
    """'3.4 GiB' or '212 MiB'; never zero for something."""
    return f"{n / 2**30:.1f} GiB" if n >= 1 << 30 else f"{-(-n // 2**20)} MiB"
