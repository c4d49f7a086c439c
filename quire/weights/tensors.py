"""Tensors: a model's view of its weight file. Every tensor is asked for by name and shape, and every answer is checked.

A model that lies about itself (more layers than weights, shapes that do not fit the configuration) is found here, with
the tensor and the numbers in the message, before any memory is spent on it.
"""

from __future__ import annotations

from quire.layouts import Affine, Dense, Layout
from quire.observe.errors import BadModelFile
from quire.weights.gguf import GGUF


class Tensors:
    """Checked access to the tensors of one GGUF file; remembers which were taken."""

    def __init__(self, gguf: GGUF):
        self._gguf = gguf
        self._taken: dict[str, Layout] = {}

    def has(self, name: str) -> bool:
        return name in self._gguf.tensors

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

    def _take(self, name: str, shape: tuple[int, ...]) -> Layout:
        if name not in self._taken:
            info = self._gguf.tensors.get(name)
            if info is None:
                raise BadModelFile(f"tensor {name!r} of shape {_text(shape)} is missing from the file")
            if tuple(info.shape) != shape:
                raise BadModelFile(
                    f"tensor {name!r} has shape {_text(info.shape)}, but the configuration says {_text(shape)}"
                )
            self._taken[name] = self._gguf.tensor(name)
        return self._taken[name]

    def release(self, layout: Layout) -> None:
        """Give back the file pages of a tensor that a backend has taken over."""
        for name, taken in self._taken.items():
            if taken is layout:
                self._gguf.release(name)
                return

    def leftover(self) -> list[str]:
        """Tensors in the file that the model did not ask for."""
        return [name for name in self._gguf.tensors if name not in self._taken]


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
