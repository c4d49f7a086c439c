"""A forward over weights that adapters may add to. Models know nothing of adapters: this is how they come in.

`adaptable` wraps a forward so that every `linear` over a weight with a site is followed by `adapt`. Everything else goes
through untouched, and a model without sites is the model as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from quire.backends.adapters import Site
from quire.backends.batch import Batch
from quire.backends.ops import Forward, Ops, Tensor
from quire.layouts import Dense, Layout


def adaptable(forward: Forward, sites: Mapping[int, Site]) -> Forward:
    """`forward`, with `adapt` after each linear whose weight has a site. Sites are by the weight's id."""

    def run(ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        return forward(cast(Ops, _Adapting(ops, batch, sites)), batch, inputs)

    return run


class _Adapting:
    """Ops that add adapters to products."""

    def __init__(self, ops: Ops, batch: Batch, sites: Mapping[int, Site]):
        self._ops = ops
        self._batch = batch
        self._sites = sites
        self._rows: Tensor = batch.adapters  # of the rows that are being computed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Tensor, weight: Layout, bias: Dense | None = None) -> Tensor:
        y = self._ops.linear(x, weight, bias)
        site = self._sites.get(id(weight))
        return y if site is None else self._ops.adapt(y, x, self._rows, site)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        self._rows = self._batch.taken_adapters
        return self._ops.take(x, rows)
