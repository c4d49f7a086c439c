"""Tensors: a model's view of its weights. Every tensor is asked for by name and shape, and every answer is checked.

A model that lies about itself (more layers than weights, shapes that do not fit the configuration) is found here, with
the file, the tensor and the numbers in the message, before any memory is spent on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from quire.layouts import Affine, Dense, Layout
from quire.observe.errors import BadModelFile
from quire.weights.checkpoint import Checkpoint


class Tensors:
    """Checked access to the tensors of one checkpoint; remembers which were taken."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._taken: dict[str, Layout] = {}
        self._views: dict[str, tuple[Layout, ...]] = {}  # of a tensor that is used in parts
        self._names: dict[int, str] = {}  # id of a layout that was handed out -> its tensor
        self._waiting: dict[str, set[int]] = {}  # parts of a tensor that nobody has taken over yet

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def matrix(self, name: str, n: int, k: int) -> Layout:
        """A weight of n rows and k columns, in whatever format the file holds."""
        return self._take(name, (n, k))

    def vector(self, name: str, n: int) -> Dense:
        """n plain numbers."""
        layout = self._take(name, (n,))
        if isinstance(layout, Affine):
            raise BadModelFile(f"tensor {name!r} is a quantized vector: expected {n} plain numbers")
        return layout

    def optional_vector(self, name: str, n: int) -> Dense | None:
        return self.vector(name, n) if self.has(name) else None

    def split(self, name: str, sizes: tuple[int, ...], k: int) -> tuple[Layout, ...]:
        """A matrix of sum(sizes) rows as one of so many rows for each of sizes: views, nothing is copied."""
        whole = self._take(name, (sum(sizes), k))
        ends = list(accumulate(sizes))
        return self._parts(name, whole, [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)])

    def stack(self, name: str, count: int, n: int, k: int) -> tuple[Layout, ...]:
        """A stack of `count` matrices of n rows and k columns, as views of each."""
        return self._parts(name, self._take(name, (count, n, k)), list(range(count)))

    def _parts(self, name: str, whole: Layout, where: Sequence[slice | int]) -> tuple[Layout, ...]:
        if name not in self._views:
            views = tuple(replace(whole, data=whole.data[part]) for part in where)
            self._views[name] = views
            self._waiting[name] = {id(view) for view in views}
            self._names.update({id(view): name for view in views})
        return self._views[name]

    def _take(self, name: str, shape: tuple[int, ...]) -> Layout:
        if name not in self._taken:
            info = self._checkpoint.tensors.get(name)
            if info is None:
                where = self._checkpoint.file_of(name)
                raise BadModelFile(f"tensor {name!r} of shape {_text(shape)} is missing from {where}")
            if tuple(info.shape) != shape:
                raise BadModelFile(
                    f"tensor {name!r} has shape {_text(info.shape)}, but the configuration says {_text(shape)} "
                    f"(in {self._checkpoint.file_of(name)})"
                )
            self._taken[name] = self._checkpoint.tensor(name)
            self._names[id(self._taken[name])] = name
        return self._taken[name]

    def release(self, layout: Layout) -> None:
        """Give back the file pages of a tensor that a backend has taken over; of one used in parts, with the last of them."""
        name = self._names.get(id(layout))
        if name is None:
            return  # made of a tensor's numbers, and no view of the file
        waiting = self._waiting.get(name)
        if waiting is not None:
            waiting.discard(id(layout))
        if not waiting:
            self._checkpoint.release(name)

    def leftover(self) -> list[str]:
        """Tensors of the checkpoint that the model did not ask for."""
        return [name for name in self._checkpoint.tensors if name not in self._taken]


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
