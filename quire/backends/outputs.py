"""Hidden rows that a program gives beside its result: rows of a model's residual stream, between layers that it marks.

A model says where such rows are (`Ops.mark`), and whoever compiles it says which to keep. Drafters read rows of some layers,
pooling reads those of the last; generation goes on from the same run. Where nothing is kept a mark leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Rows = TypeVar("Rows")
FINAL = -1  # in place of a number of layers: behind the last norm, where the head reads


@dataclass(frozen=True, slots=True)
class Hidden:
    """Rows that a program is to keep.

    `layer`: how many layers are behind them; 0 for the embeddings as the first layer reads them, FINAL for what the head
    reads. Numbers are those of transformers' `output_hidden_states`, whose last entry is FINAL.
    """

    layer: int
    taken: bool = False  # the rows of batch.logit_rows alone; otherwise a row for every token of the step

    def __str__(self) -> str:
        rows = "logit rows" if self.taken else "all rows"
        return f"{rows} {'behind the last norm' if self.layer == FINAL else f'after {self.layer} layers'}"


def check_keep(keep: Sequence[Hidden], marked: Collection[int]) -> None:
    """Raises ValueError where a model does not mark what is to be kept, or the same is asked for twice."""
    if len(set(keep)) != len(keep):
        raise ValueError("a program keeps the same rows once, not twice")
    for hidden in keep:
        if hidden.layer not in marked:
            known = sorted(layer for layer in marked if layer != FINAL)
            names = f"{known[0]} to {known[-1]}" if known else "none"
            final = ", and FINAL" if FINAL in marked else ""
            raise ValueError(f"{hidden} cannot be kept: the model marks {names}{final}")


def kept(rows: Mapping[Hidden, Rows], which: Hidden) -> Rows:
    """The hidden rows that a program kept of its last run. Raises ValueError where it keeps none of that kind, or has not run."""
    if which not in rows:
        have = "; ".join(map(str, rows)) or "nothing, or has not run"
        raise ValueError(f"the program does not keep {which}: it keeps {have}")
    return rows[which]
