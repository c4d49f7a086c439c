"""A forward over weights that adapters may add to. Models know nothing of adapters: this is how they come in.

`adaptable` wraps a forward so that every `linear` over a weight that is a target is followed by `adapt`. Everything else goes
through untouched, and a model without targets is the model as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from quire.backends.adapters import Target
from quire.backends.batch import Batch
from quire.backends.ops import Forward, Ops, Tensor
from quire.layouts import Dense, Layout


def adaptable(forward: Forward, targets: Mapping[int, Target]) -> Forward:
    """`forward`, with `adapt` after each linear whose weight is a target. `targets` has them by the weight's id."""

    def run(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return forward(cast(Ops, _Adapting(ops, batch, targets)), batch, inputs)

    return run


class _Adapting:
    """Ops that add adapters to products."""

    def __init__(self, ops: Ops, batch: Batch, targets: Mapping[int, Target]):
        self._ops = ops
        self._batch = batch
        self._targets = targets
        self._rows: Tensor = batch.adapters  # of the rows that are being computed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: Layout, bias: Dense | None = None) -> Tensor:
        y = self._ops.linear(x, weight, bias)
        target = self._targets.get(id(weight))
        return y if target is None else self._ops.adapt(y, x, self._rows, target)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        self._rows = self._batch.taken_adapters
        return self._ops.take(x, rows)
