"""A model's view of its weights: shapes are checked, parts are views, and pages go back when nobody waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from quire.formats import q4_0
from quire.layouts import Affine, Bytes, Dense, Layout
from quire.observe.errors import BadModelFile
from quire.weights.tensors import Tensors


@dataclass
class Kept:
    """A checkpoint that remembers what was given back."""

    tensors: dict[str, Layout]
    released: list[str] = field(default_factory=list)

    def tensor(self, name: str) -> Layout:
        return self.tensors[name]

    def octets(self, name: str) -> Bytes:
        layout = self.tensors[name]
        assert isinstance(layout, Dense)
        return layout.data.view(np.uint8)

    def release(self, name: str) -> None:
        self.released.append(name)

    def file_of(self, name: str) -> str:
        return "some.file"


def dense(*shape: int) -> Dense:
    return Dense(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), "f32")


@pytest.fixture
def kept() -> Kept:
    blocks = np.random.default_rng(0).integers(0, 256, (3, 4, 2 * q4_0.NBYTES), np.uint8)
    return Kept(
        {"a": dense(6, 8), "e": dense(3, 4, 8), "q": Affine(blocks, q4_0.CODEC), "b": dense(3, 5), "v": dense(8)}
    )


def test_a_stack_is_a_view_per_matrix(kept: Kept) -> None:
    t = Tensors(kept)
    for name, k in (("e", 8), ("q", 64)):
        parts, whole = t.stack(name, 3, 4, k), kept.tensors[name]
        assert [p.shape for p in parts] == [(4, k)] * 3
        assert all(np.shares_memory(p.data, whole.data) for p in parts)
        np.testing.assert_array_equal(np.stack([p.dequantize() for p in parts]), whole.dequantize())
        assert all(
            x is y for x, y in zip(parts, t.stack(name, 3, 4, k), strict=True)
        )  # a backend knows them by identity


def test_pages_go_back_with_the_last_part_and_not_before(kept: Kept) -> None:
    t = Tensors(kept)
    first, second, third = t.stack("e", 3, 4, 8)
    t.release(first), t.release(first), t.release(third)
    assert kept.released == []
    t.release(second)
    assert kept.released == ["e"]
    t.release(t.matrix("a", 6, 8))
    assert kept.released == ["e", "a"]
    t.release(dense(2, 2))  # of nobody
    assert kept.released == ["e", "a"]


def test_splits_rows_and_vectors(kept: Kept) -> None:
    t = Tensors(kept)
    top, rest = t.split("a", (2, 4), 8)
    assert top.shape == (2, 8) and rest.shape == (4, 8) and np.shares_memory(rest.data, kept.tensors["a"].data)
    np.testing.assert_array_equal(rest.dequantize(), kept.tensors["a"].dequantize()[2:])
    assert [v.shape for v in t.vectors("b", 3, 5)] == [(5,)] * 3
    assert t.row("v", 8).shape == (1, 8)  # a vector in the file
    t.release(rest), t.release(t.row("v", 8))
    assert kept.released == ["v"]
    t.release(top)
    assert kept.released == ["v", "a"]


def test_what_is_made_of_two_tensors_gives_both_back(kept: Kept) -> None:
    t = Tensors(kept)
    codes = t.octets("b", (3, 5))
    made = (Dense(codes[:, :4].view(np.float32), "f32"), Dense(codes[:, 4:8].view(np.float32), "f32"))
    t.octets("v", (8,))
    t.made(made, "b", "v")
    t.release(made[0])
    assert kept.released == []
    t.release(made[1])
    assert kept.released == ["b", "v"] and t.leftover() == ["a", "e", "q"]


def test_lies_are_errors_with_names_and_numbers(kept: Kept) -> None:
    t = Tensors(kept)
    with pytest.raises(
        BadModelFile, match=r"tensor 'e' has shape 3x4x8, but the configuration says 4x4x8 \(in some.file\)"
    ):
        t.stack("e", 4, 4, 8)
    with pytest.raises(BadModelFile, match=r"'x' of shape 3x4x8 is missing from some.file"):
        t.stack("x", 3, 4, 8)
    with pytest.raises(BadModelFile, match="'v' has shape 8, but the configuration says 9"):
        t.row("v", 9)
    with pytest.raises(BadModelFile, match="quantized vector"):
        Tensors(Kept({"q": Affine(np.zeros((2, 18), np.uint8), q4_0.CODEC)})).vectors("q", 2, 32)
    assert t.leftover() == ["a", "e", "q", "b", "v"]
