"""Cases of attention over several pools, as an engine fills them: pages behind a window are gone, and soon others'."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from quire.backends.batch import Batch, Table
from quire.backends.cases.kit import Case, Step, attention_bound, floats, ragged
from quire.backends.kv import KV_DTYPES
from quire.backends.ops import KV, Ops, Tensor

Turn = Mapping[str, int]  # tokens of each sequence in a step, by its name
TURNS: tuple[Turn, ...] = (
    {"a": 100}, {"a": 128}, {"a": 7}, {"a": 1, "b": 90}, {"a": 20, "b": 1, "c": 17}, {"c": 30, "b": 64},
    *({"a": 1, "b": 1, "c": 1},) * 5,
)  # fmt: skip
FEW: tuple[Turn, ...] = ({"a": 40}, {"a": 3, "b": 20}, {"a": 1, "b": 30}, *({"a": 1, "b": 1},) * 2)  # for slow machines


def group_cases(rng: np.random.Generator) -> Iterator[Case]:
    """Attention over several pools."""
    for dtypes in ([name for name in KV_DTYPES if name != "int16"], ["int16"]):
        for windows in ((0, 40), (24, 100), (33,), (0, 0, 17)):
            for dtype in dtypes:
                yield grouped(windows, dtype, rng)


def grouped(
    windows: tuple[int, ...],
    dtype: str,
    rng: np.random.Generator,
    turns: Sequence[Turn] = TURNS,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
) -> Case:
    """A layer in each of several groups (window 0: everything is kept), added up. Pages behind a window are gone from the
    table and soon hold something else; groups have different numbers of pages, and the same page numbers for other tokens."""
    first, *more = [KV(2, 96 if w == 0 else 56, 16, kv_heads, dim, dtype, window=w) for w in windows]
    kv = KV(2, first.pages, 16, kv_heads, dim, dtype, window=first.window, more=tuple(more))

    def forward(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        total: Tensor = None
        for g, window in enumerate(windows):
            q, k, v = (inputs[f"{name}{g}"] for name in "qkv")
            a = ops.attention(q, k, v, batch, layer=1, heads=heads, scale=dim**-0.5, window=window or None, group=g)
            total = a if total is None else ops.add(total, a)
        return total

    widths = {f"{name}{g}": (heads if name == "q" else kv_heads) * dim for g in range(len(windows)) for name in "qkv"}
    steps = []
    for batch in batches(kv, turns, rng):
        inputs = {
            name: floats(rng, batch.tokens, w, scale=2.0 if name[0] == "q" else 1.0) for name, w in widths.items()
        }
        steps.append(Step(batch, inputs, lambda _: attention_bound(kv) * len(windows)))
    return Case(f"attention-groups-{'-'.join(map(str, windows))}-{dtype}", forward, steps, widths, kv)


def batches(kv: KV, turns: Sequence[Turn], rng: np.random.Generator) -> Iterator[Batch]:
    """The turns of some sequences, with a page table for each group; what a window has left behind is taken again at once."""
    free = [[int(p) for p in rng.permutation(group.pages)] for group in kv.groups]
    held: list[dict[str, dict[int, int]]] = [{} for _ in kv.groups]  # by sequence, by place in the row
    lengths: dict[str, int] = {}
    for turn in turns:
        tables = []
        for g, group in enumerate(kv.groups):
            rows = []
            for name, n in turn.items():
                start, own = lengths.get(name, 0), held[g].setdefault(name, {})
                low = max(0, start - group.window + 1) // 16 if group.window else 0
                free[g][:0] = [own.pop(i) for i in sorted(own) if i < low]
                own |= {i: free[g].pop(0) for i in range(-(-(start + n) // 16)) if i >= low and i not in own}
                rows.append((start, n, [own.get(i, -1) for i in range(-(-(start + n) // 16))]))
            tables.append(ragged(rows))
        for name, n in turn.items():
            lengths[name] = lengths.get(name, 0) + n
        batch = tables[0]
        batch.more = tuple(Table(t.pages, t.write) for t in tables[1:])
        yield batch
