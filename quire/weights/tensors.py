"""Tensors: a model's view of its weights. Every tensor is asked for by name and shape, and every answer is checked.

A model that lies about itself (more layers than weights, shapes that do not fit the configuration) is found here, with
the file, the tensor and the numbers in the message, before any memory is spent on it. A tensor's pages are given back once
everything that was made of it has been taken over by a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from quire.layouts import Bytes, Dense, Layout
from quire.observe.errors import BadModelFile
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor, and the rows of it, that a matrix is."""

    name: str
    first: int  # row
    rows: int  # of the whole tensor


class Tensors:
    """Checked access to the tensors of one checkpoint; remembers which were taken, and what was made of each."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint
        self._taken: dict[str, Layout] = {}  # as the file has them
        self._parts: dict[str, tuple[Layout, ...]] = {}  # what a tensor was cut into
        self._made_of: dict[int, tuple[Layout, tuple[str, ...]]] = {}  # the layout is kept so that its id stays its own
        self._waiting: dict[str, set[int]] = {}  # what was made of a tensor and is not taken over yet
        self._seen: set[str] = set()
        self._origin: dict[int, Origin] = {}  # by the id of a layout that is rows of a tensor

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def matrix(self, name: str, n: int, k: int) -> Layout:
        """A weight of n rows and k columns, in whatever format the file holds."""
        layout = self._whole(name, (n, k))
        self._origin[id(layout)] = Origin(name, 0, n)
        return layout

    def vector(self, name: str, n: int) -> Dense:
        """n plain numbers."""
        return _numbers(name, self._whole(name, (n,)))

    def optional_vector(self, name: str, n: int) -> Dense | None:
        return self.vector(name, n) if self.has(name) else None

    def row(self, name: str, k: int) -> Layout:
        """A matrix of one row, which some files write as a vector."""
        info = self._checkpoint.tensors.get(name)
        if info is None or len(info.shape) != 1:
            return self.matrix(name, 1, k)
        return self.cut(name, (k,), lambda w: (replace(w, data=w.data[None]),))[0]

    def split(self, name: str, sizes: tuple[int, ...], k: int) -> tuple[Layout, ...]:
        """A matrix of sum(sizes) rows as one of so many rows for each of sizes: views of it."""
        ends = list(accumulate(sizes))
        rows = [slice(end - n, end) for n, end in zip(sizes, ends, strict=True)]
        parts = self.cut(name, (sum(sizes), k), lambda w: tuple(replace(w, data=w.data[at]) for at in rows))
        self._origin |= {id(part): Origin(name, at.start, sum(sizes)) for part, at in zip(parts, rows, strict=True)}
        return parts

    def stack(self, name: str, count: int, n: int, k: int) -> tuple[Layout, ...]:
        """`count` matrices of n rows and k columns that lie in one tensor: a view of each."""
        return self.cut(name, (count, n, k), lambda w: tuple(replace(w, data=part) for part in w.data))

    def vectors(self, name: str, count: int, n: int) -> tuple[Dense, ...]:
        """`count` vectors of n plain numbers that lie in one tensor: a view of each."""
        parts = self.cut(name, (count, n), lambda w: tuple(replace(w, data=part) for part in w.data))
        return tuple(_numbers(name, part) for part in parts)

    def cut(self, name: str, shape: tuple[int, ...], by: Callable[[Layout], tuple[Layout, ...]]) -> tuple[Layout, ...]:
        """The parts that `by` makes of a tensor, views or copies; the same ones whenever it is asked for."""
        if name not in self._parts:
            self._parts[name] = by(self._take(name, shape))
            self.made(self._parts[name], name)
        return self._parts[name]

    def octets(self, name: str, shape: tuple[int, ...]) -> Bytes:
        """A tensor of bytes that are no numbers by themselves. What is made of them must be told to `made`."""
        self._check(name, shape)
        return self._checkpoint.octets(name)

    def made(self, layouts: Iterable[Layout], *names: str) -> None:
        """Note that those layouts were made of those tensors, so that `release` knows which pages they need."""
        for layout in layouts:
            self._made_of[id(layout)] = (layout, names)
            for name in names:
                self._waiting.setdefault(name, set()).add(id(layout))

    def release(self, layout: Layout) -> None:
        """A backend has taken a layout over: give back the file pages of the tensors that nobody waits for any more."""
        _, names = self._made_of.get(id(layout), (None, ()))
        for name in names:
            self._waiting[name].discard(id(layout))
            if not self._waiting[name]:
                self._checkpoint.release(name)

    def origins(self) -> Iterator[tuple[Layout, Origin]]:
        """Every matrix that is rows of one tensor as they are, and which."""
        for at, origin in self._origin.items():
            yield self._made_of[at][0], origin

    def leftover(self) -> list[str]:
        """Tensors of the checkpoint that the model did not ask for."""
        return [name for name in self._checkpoint.tensors if name not in self._seen]

    def _whole(self, name: str, shape: tuple[int, ...]) -> Layout:
        layout = self._take(name, shape)
        if id(layout) not in self._made_of:
            self.made((layout,), name)
        return layout

    def _take(self, name: str, shape: tuple[int, ...]) -> Layout:
        if name not in self._taken:
            self._check(name, shape)
            self._taken[name] = self._checkpoint.tensor(name)
        return self._taken[name]

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        info = self._checkpoint.tensors.get(name)
        if info is None:
            where = self._checkpoint.file_of(name)
            raise BadModelFile(f"tensor {name!r} of shape {_text(shape)} is missing from {where}")
        if tuple(info.shape) != shape:
            raise BadModelFile(
                f"tensor {name!r} has shape {_text(info.shape)}, but the configuration says {_text(shape)} "
                f"(in {self._checkpoint.file_of(name)})"
            )
        self._seen.add(name)


def _numbers(name: str, layout: Layout) -> Dense:
    if not isinstance(layout, Dense):
        raise BadModelFile(f"tensor {name!r} is a quantized vector: expected {layout.shape[-1]} plain numbers")
    return layout


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
