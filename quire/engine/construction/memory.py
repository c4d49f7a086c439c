"""Whether a model fits, before anything is allocated: weights, KV pool, working memory and a little, against what there is.

Pure arithmetic over what a backend estimates and the machine says; the sentences carry the numbers. Pools of layers that
forget are as large as their windows or states ask for; what is left goes to those that keep the whole context. What is
counted is memory that only we can give back: the model file's own pages are page cache, taken back by the system when it
needs them, so they are not counted as needed, and count as available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.backends.ops import KV, Needs
from quire.cache.groups import STATE_EVERY, Full, Group, State, Window
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
    share: float = 1.0  # of what is left beside the weights: other models of the same process take the rest

    @property
    def fixed(self) -> int:
        return 0 if self.needs is None else self.needs.weights + self.needs.working + OVERHEAD

    @property
    def room(self) -> int:
        """Bytes left for the KV pool."""
        return int(max(0, self.memory.available - self.fixed) * self.share)

    def check(self, kv_bytes: int, page_bytes: int, windows: int = 0) -> None:
        """Raises NotEnoughMemory, with every number, when the pools do not fit beside the rest.

        `page_bytes` is what a page of the whole context takes, `windows` what the layers that forget take at least.
        """
        if kv_bytes <= self.room:
            return

        def tokens(nbytes: int) -> int:
            return (nbytes - windows) // page_bytes * PAGE_SIZE if page_bytes else 0

        if self.room >= windows + page_bytes:
            most = windows + tokens(self.room) // PAGE_SIZE * page_bytes
            cure = (
                f"ask for at most {size(most)} of KV memory (--kv-memory), which holds "
                f"{tokens(self.room)} tokens, or free some memory"
            )
        else:
            cure = "use a smaller model or a smaller quantization of it, free some memory, or lower max_batch_tokens"
        if self.share < 1:
            cure += "; or serve fewer models together"
        held = f"{tokens(kv_bytes)} tokens" + (f", {size(windows)} of it for windows or states" if windows else "")
        pool = f"KV pool {size(kv_bytes)} ({held})"
        raise NotEnoughMemory(
            f"the model needs {size(self.fixed + kv_bytes)}: {self._parts(pool)}; "
            f"{size(self.memory.available)} are available ({self.memory.bound}){self._shared()}",
            cure=cure,
        )

    def line(self, kv_bytes: int) -> str:
        """The decision, for people."""
        return (
            f"memory: {size(self.fixed + kv_bytes)} of {size(self.memory.available)} available ({self.memory.bound}): "
            f"{self._parts(f'KV pool {size(kv_bytes)}')}; the file's pages are page cache and not counted"
        )

    def _shared(self) -> str:
        """How much of the memory that is left this model may take, where several models share it."""
        return "" if self.share == 1 else f", and 1/{1 / self.share:.0f} of what its weights leave is for this model"

    def _parts(self, pool: str) -> str:
        if self.needs is None:
            return pool
        return (
            f"weights {size(self.needs.weights)}, {pool}, working memory {size(self.needs.working)}, "
            f"{size(OVERHEAD)} for the rest"
        )


def group_of(kv: KV) -> Group:
    """The rule that a pool's pages live by."""
    if kv.state:
        return State()
    return Window(kv.window) if kv.window else Full()


def alone(kv: KV, context: int, step: int) -> int:
    """Bytes that one sequence needs in the pools of layers that forget."""
    return sum(group_of(k).most(context, step, PAGE_SIZE) * k.page_bytes for k in kv.groups if k.forgets)


def window_pools(
    kv: KV, room: int, context: int, seqs: int, step: int, flight: int
) -> tuple[dict[int, int], list[str]]:
    """Pages for each group that forgets, by its place in kv.groups, and the sentences that say why.

    They hold a window for every sequence, what `flight` tokens in flight need, and a quarter more for cached prefixes; of
    states, the two that every sequence needs and as many to resume from. At most half of `room` where other layers keep the
    whole context, but never less than one sequence alone needs.
    """
    forgetful = {g: k for g, k in enumerate(kv.groups) if k.forgets}
    most = seqs * -(-context // PAGE_SIZE)
    wanted = {}
    for g, k in forgetful.items():
        every = seqs * group_of(k).most(context, 2, PAGE_SIZE)
        if k.state:
            wanted[g] = 2 * every
            continue
        every += -(-flight // PAGE_SIZE)
        wanted[g] = min(every + every // 4, most)
    cost, least = sum(n * kv.groups[g].page_bytes for g, n in wanted.items()), alone(kv, context, step)
    share = room if len(forgetful) == len(kv.groups) else room // 2
    pages, lines = {}, []
    for g, k in forgetful.items():
        pages[g] = n = wanted[g]
        why = f"a window for each of {seqs} sequences, tokens in flight, and a quarter more for cached prefixes"
        if n == most:
            why = f"the whole context of {seqs} sequences"
        if k.state:
            why = f"two for each of {seqs} sequences, and as many to resume from: one every {STATE_EVERY} tokens, where prompts end"
        if cost > share:
            one = group_of(k).most(context, step, PAGE_SIZE)
            pages[g] = n = one + (wanted[g] - one) * max(0, share - least) // (cost - least)
            each = "four states" if k.state else "a window"
            why = f"{wanted[g]} pages would be {each} for each of {seqs} sequences: there is no room for more"
        sort = "that carry a state" if k.state else f"that see {k.window} tokens"
        lines.append(
            f"{'state' if k.state else 'KV'} pool of {k.layers} layers {sort}: {n} {'states' if k.state else 'pages'}, "
            f"{n * k.page_bytes / 2**20:.0f} MiB ({why})"
        )
    return pages, lines


def holds(kv: KV, pages: Sequence[int], step: int) -> int | None:
    """Tokens of the longest sequence that fits alone. None: any."""
    bounds = [
        n * PAGE_SIZE for k, n in zip(kv.groups, pages, strict=True) if group_of(k).most(1 << 60, step, PAGE_SIZE) > n
    ]
    return min(bounds, default=None)


def size(n: int) -> str:
    """'3.4 GiB' or '212 MiB'; never zero for something."""
    return f"{n / 2**30:.1f} GiB" if n >= 1 << 30 else f"{-(-n // 2**20)} MiB"
