"""The parts of a conformance case: programs, steps, ragged batches, random numbers, and how large an error may be.

The bound of a product is what the op table allows: rounding of float32 sums, and for quantized weights the rounding of
activations to int8, which is computed, not guessed: |error| <= sum over groups of (half a step of the activation) * (sum of
|w| in the group). For f16 weights, which may be integers of 14 bits with a scale for 32 columns, and the activations of 16, it is the
rounding of both and the product of what is below their upper bytes, which may be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quire.backends.batch import Batch
from quire.backends.ops import KV, Forward
from quire.layouts import Affine, Dense, Floats, Layout

NO_KV = KV(layers=1, pages=8, page_size=16, kv_heads=1, head_dim=16)
Bound = Callable[[Floats], npt.NDArray[np.floating] | float]  # allowed error, from the expected output
MakeWeight = Callable[[int, int, np.random.Generator], Layout]
ROUND = float(np.finfo(np.float32).eps)


@dataclass(slots=True)
class Step:
    """One run of a program: its batch, its inputs, and the absolute error allowed for each element of the output."""

    batch: Batch
    inputs: dict[str, Floats]
    bound: Bound


@dataclass(slots=True)
class Case:
    """A program with the steps to run it over."""

    name: str
    forward: Forward
    steps: list[Step]
    widths: dict[str, int] = field(default_factory=dict)
    kv: KV = NO_KV


def single(tokens: int, ids: np.ndarray | None = None, start: int = 0) -> Batch:
    """A batch of one sequence of that many tokens, all of whose rows are wanted, in page 0 onward."""
    pages = -(-(start + tokens) // 16)
    return ragged([(start, tokens, list(range(pages)))], ids=ids)


def ragged(rows: list[tuple[int, int, list[int]]], ids: np.ndarray | None = None) -> Batch:
    """A batch of (first position, tokens, page row) sequences."""
    pos = np.concatenate([np.arange(start, start + n) for start, n, _ in rows]).astype(np.int32)
    write = np.concatenate(
        [np.array([row[p // 16] * 16 + p % 16 for p in range(start, start + n)]) for start, n, row in rows]
    ).astype(np.int32)
    table = np.full((len(rows), max(len(row) for _, _, row in rows)), -1, np.int32)
    for b, (_, _, row) in enumerate(rows):
        table[b, : len(row)] = row
    total = pos.size
    return Batch(
        ids=np.zeros(total, np.int32) if ids is None else ids.astype(np.int32),
        pos=pos,
        q_start=np.cumsum([0] + [n for _, n, _ in rows]).astype(np.int32),
        kv_len=np.array([start + n for start, n, _ in rows], np.int32),
        pages=table,
        write=write,
        logit_rows=np.arange(total, dtype=np.int32),
    )


def floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Floats:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def linear_bound(weight: Layout, x: Floats) -> Bound:
    """The error a product may show: float32 sums, and what integers lose where the weight may be made of them."""
    w = np.abs(weight.dequantize().astype(np.float64))
    error = (np.abs(x).astype(np.float64) @ w.T) * (4 * np.sqrt(x.shape[1]) * ROUND)
    if isinstance(weight, Affine):
        grouped = np.abs(x.reshape(x.shape[0], -1, 32)).max(axis=-1) / 127.0  # [M, groups], one step of x
        sums = w.reshape(w.shape[0], -1, 32).sum(axis=-1)  # [N, groups]
        error = error + (grouped.astype(np.float64) * 0.5001) @ sums.T
    elif fourteen_bits(weight):
        groups = np.abs(x.astype(np.float64)).reshape(x.shape[0], -1, 32)
        step, steps = groups.max(axis=-1) / 127.0, w.reshape(w.shape[0], -1, 32).max(axis=-1) / 63.0  # of upper bytes
        sums = w.reshape(w.shape[0], -1, 32).sum(axis=-1)
        error = error + (step / 255) @ sums.T + groups.sum(axis=-1) @ (steps.T / 127) + 8.1 * step @ steps.T
    return lambda _: (error + 1e-6).astype(np.float32)


def fourteen_bits(weight: Layout) -> bool:
    """Whether a backend may keep it as integers of 14 bits with a scale, a power of two, for each 32 columns."""
    return isinstance(weight, Dense) and weight.dtype == "f16" and weight.shape[-1] % 32 == 0


def embed_bound(table: Layout, ids: np.ndarray) -> npt.NDArray[np.floating]:
    """What rows of a table may be off: nothing; of 14 bits, half a step, which is at most an 8,064th of the largest of 32."""
    rows = table.dequantize()[ids]
    if not fourteen_bits(table):
        return np.zeros_like(rows)
    return np.repeat(np.abs(rows).reshape(len(ids), -1, 32).max(axis=-1), 32, axis=1) / 8064


def attention_bound(kv: KV) -> float:
    """The error attention may show for unit inputs. Beside keys of 16 bits with a scale, queries and weights may be rounded to as
    many, and the products of both lower bytes left out: a score is then off by some 1e-4, of which weights are powers."""
    return 1e-3 if kv.dtype == "int16" else 2e-5


def relative(tolerance: float) -> Bound:
    """Allowed error in proportion to each value, with a floor for values near zero."""
    return lambda expected: tolerance * np.abs(expected) + tolerance * 1e-2
