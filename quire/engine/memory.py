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
    """The memory there is, and what everything but the KV pool takes of it.

    `needs` is None where a backend cannot say beforehand, or where the memory was measured with the model in it already
    (`own`: a device's, all of which may be taken).
    """

    memory: Memory
    needs: Needs | None = None
    own: bool = False

    @property
    def fixed(self) -> int:
        return 0 if self.needs is None else self.needs.weights + self.needs.working + OVERHEAD

    @property
    def room(self) -> int:
        """Bytes left for the KV pool."""
        return max(0, self.memory.available - self.fixed)

    def check(self, kv_bytes: int, page_bytes: int) -> None:
        """Raises NotEnoughMemory, with every number, when the pool does not fit beside the rest."""
        if kv_bytes <= self.room:
            return
        if self.room >= page_bytes:
            cure = (
                f"ask for at most {size(self.room // page_bytes * page_bytes)} of KV memory (--kv-memory), which holds "
                f"{self.room // page_bytes * PAGE_SIZE} tokens, or free some memory"
            )
        else:
            cure = "use a smaller model or a smaller quantization of it, free some memory, or lower max_batch_tokens"
        pool = f"KV pool {size(kv_bytes)} ({kv_bytes // page_bytes * PAGE_SIZE} tokens)"
        raise NotEnoughMemory(
            f"the model needs {size(self.fixed + kv_bytes)}: {self._parts(pool)}; "
            f"{size(self.memory.available)} are available ({self.memory.bound})",
            cure=cure,
        )

    def line(self, kv_bytes: int) -> str:
        """The decision, for people."""
        return (
            f"memory: {size(self.fixed + kv_bytes)} of {size(self.memory.available)} available ({self.memory.bound}): "
            f"{self._parts(f'KV pool {size(kv_bytes)}')}; the file's pages are page cache and not counted"
        )

    def _parts(self, pool: str) -> str:
        if self.needs is None:
            return pool
        return (
            f"weights {size(self.needs.weights)}, {pool}, working memory {size(self.needs.working)}, "
            f"{size(OVERHEAD)} for the rest"
        )


def size(n: int) -> str:
    """'3.4 GiB' or '212 MiB'; never zero for something."""
    return f"{n / 2**30:.1f} GiB" if n >= 1 << 30 else f"{-(-n // 2**20)} MiB"
