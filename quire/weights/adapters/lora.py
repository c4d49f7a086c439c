"""A LoRA adapter as it was read, from either kind of file: pairs of matrices by module name.

Names are the file's own; which weight of a model they mean is for `models/adapter_targets.py`, which also checks every shape against that weight. Nothing here
knows a model. Matrices are views of the mapped file. Pickled adapters are never opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.layouts import Dense, Layout
from quire.observe.errors import BadModelFile

if TYPE_CHECKING:
    from quire.weights.gguf.file import GGUF
    from quire.weights.safetensors import Safetensors

MAX_MODULES = 1 << 16


@dataclass(frozen=True, slots=True)
class Lora:
    """The pair of matrices that an adapter adds to one module: scale * b a."""

    module: str  # as the file calls it, without what the format puts around it
    a: Dense  # [r, k]
    b: Dense  # [n, r]
    scale: float
    names: tuple[str, str]  # of the two tensors, for messages

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read and found consistent in itself."""

    path: str  # the file that holds the tensors, for messages
    kind: str  # "peft" or "gguf": whose names its modules have, and whose order of rows
    architecture: str  # as a GGUF says it; empty where the file does not
    modules: tuple[Lora, ...]
    digest: str  # of everything that it computes

    @property
    def rank(self) -> int:
        """The rank of its largest module."""
        return max(m.rank for m in self.modules)

    @property
    def nbytes(self) -> int:
        return sum(m.a.nbytes + m.b.nbytes for m in self.modules)


def pair_up(
    path: str,
    kind: str,
    architecture: str,
    file: Safetensors | GGUF,
    halves: dict[str, dict[str, str]],
    scale_of: dict[str, float],
) -> Adapter:
    """Tensors a and b of each module, checked against each other. `halves` has their names, by module and by "a" or "b"."""
    if not halves:
        raise BadModelFile(f"{path} has no adapter in it: none of its {len(file.tensors)} tensors is half of a pair")
    if len(halves) > MAX_MODULES:
        raise BadModelFile(f"{path} has {len(halves)} modules: at most {MAX_MODULES} are allowed")
    made: list[Lora] = []
    for module, names in halves.items():
        if names.keys() != {"a", "b"}:
            has, lacks = ("a", "b") if "a" in names else ("b", "a")
            raise BadModelFile(f"{path}: {module} has lora_{has} ({names[has]!r}) and no lora_{lacks}")
        a_shape, b_shape = file.tensors[names["a"]].shape, file.tensors[names["b"]].shape
        if len(a_shape) != 2 or len(b_shape) != 2 or a_shape[0] != b_shape[1] or not all((*a_shape, *b_shape)):
            raise BadModelFile(
                f"{path}: {names['a']!r} has shape {_text(a_shape)} and {names['b']!r} {_text(b_shape)}: "
                "they must be [rank, columns] and [rows, rank] of one rank"
            )
        a, b = (_dense(file.tensor(names[half])) for half in "ab")
        made.append(Lora(module, a, b, scale_of[module], (names["a"], names["b"])))
    return Adapter(path, kind, architecture, tuple(made), _digest(made))


def _dense(layout: Layout) -> Dense:
    """The layout as it is, or as float32 where it is quantized."""
    return layout if isinstance(layout, Dense) else Dense(layout.dequantize(), "f32")


def _digest(modules: Iterable[Lora]) -> str:
    made = hashlib.blake2b(digest_size=16)
    for m in sorted(modules, key=lambda m: m.module):
        made.update(f"{m.module} {m.scale!r} {m.a.shape} {m.a.dtype} {m.b.shape} {m.b.dtype};".encode())
        for half in (m.a, m.b):
            made.update(np.ascontiguousarray(half.data).view(np.uint8).reshape(-1).data)
    return made.hexdigest()


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "nothing"
