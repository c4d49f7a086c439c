"""Rows of a matrix in another order, or a selection of them. They are gathered when they are read, so no second copy of a model is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from quire.layouts import Layout

Index = npt.NDArray[np.intp]


class Picked:
    """An array like source[index], which is read only when it is used."""

    def __init__(self, source: Any, index: Index):
        self._source = source  # [N, …], an array or what becomes one
        self._index = index
        self.shape = (index.size, *source.shape[1:])
        self.ndim = len(self.shape)
        self.size = index.size * (source.size // max(1, source.shape[0]))
        self.nbytes = index.size * (source.nbytes // max(1, source.shape[0]))

    def __len__(self) -> int:
        return self._index.size

    def __getitem__(self, at: slice) -> Picked:
        return Picked(self._source, self._index[at])

    def reshape(self, *shape: int) -> npt.NDArray[Any]:
        return self._array().reshape(*shape)

    def astype(self, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return self._array().astype(dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("rows are put together when they are read: there is no array to share")
        whole = self._array()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _array(self) -> npt.NDArray[Any]:
        if not self._index.size:
            return np.asarray(self._source[:0])
        first = int(self._index.min())  # a source may be made where it is read: no more of it than is needed
        return np.asarray(self._source[first : int(self._index.max()) + 1])[self._index - first]


def pick(w: Layout, index: Index) -> Layout:
    """The matrix of these rows."""
    return replace(w, data=cast(Any, Picked(w.data, index)))
