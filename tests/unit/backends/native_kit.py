"""What the native backend's tests share: random weights of every codec, ragged batches, and a small model of every op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire import formats
from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Affine, Codec, Dense, Layout, Rope

# What blocks of codebooks are expanded to, by the bits of their codes and the width of their groups; and ternary ones.
EXPANDED = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "IQ4_XS", "TQ2_0")
QUANTIZED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def codec(name: str) -> Codec:
    return formats.load(name).CODEC  # type: ignore[attr-defined]


def affine(name: str, n: int, k: int, seed: int = 0) -> Affine:
    """Random codes and scale codes, with factors of a sensible size."""
    c = codec(name)
    rng = np.random.default_rng([seed, n, k, *name.encode()])
    blocks = rng.integers(0, 256, (n, k // c.block, c.nbytes), np.uint8)
    for factor in (c.scale, c.bias):
        if factor is not None:
            values = rng.standard_normal((n, k // c.block, 1)) * 0.01 / (1 if factor.codes is None else 32)
            bits = values.astype("<f4" if factor.wide else "<f2").view(np.uint8)
            blocks[..., factor.at : factor.at + bits.shape[-1]] = bits
    return Affine(blocks.reshape(n, -1), c)


def dense(dtype: str, *shape: int, seed: int = 0, scale: float = 0.1) -> Dense:
    values = (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)
    if dtype == "bf16":
        return Dense((values.view(np.uint32) >> 16).astype(np.uint16), "bf16")
    return Dense(values.astype(np.float16 if dtype == "f16" else np.float32), dtype)


def weight(name: str, n: int, k: int, seed: int = 0) -> Layout:
    """A matrix of that format: a quantized one, or F32, F16 or BF16."""
    return affine(name, n, k, seed) if name in (*QUANTIZED, *EXPANDED) else dense(name.lower(), n, k, seed=seed)


def fourteen_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float16 weights [n, k] as the backend keeps them: upper bytes and lower six bits [n, k / 32, 32], and scales [n, k / 32]."""
    groups = numbers.astype(np.float64).reshape(len(numbers), -1, 32)
    most = np.abs(groups).max(-1)
    scale = 2.0 ** np.maximum(np.frexp(most)[1] - 7, -18)
    scale = np.where(np.rint(most / scale * 64) > 127 * 64 + 31, 2 * scale, scale)
    codes = np.rint(groups / scale[..., None] * 64)
    lower = (codes + 32) % 64 - 32
    return (codes - lower) / 64, lower, scale


def fourteen_bit_product(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """x [m, k] times float16 weights, to the bit: a sum of integers for each group, and float32 additions of those."""
    upper, lower, scale = fourteen_bits(numbers)
    groups = x.astype(np.float32).reshape(len(x), -1, 32)
    most = np.abs(groups).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        steps = np.where(most < 1e-36, np.float32(0), np.float32(127) / most)
    own = ((most / np.float32(127)).view(np.uint32) & ~np.uint32(3)).view(np.float32) * (steps > 0)
    times = groups * steps[..., None]
    q = np.clip(np.rint(times), -127, 127).astype(np.float64)
    rest = np.clip(np.rint((times - np.rint(times)) * 256), -127, 127).astype(np.float64)
    low = np.einsum("mgk,ngk->gmn", rest, upper) + 4 * np.einsum("mgk,ngk->gmn", q, lower)
    sums = (256 * np.einsum("mgk,ngk->gmn", q, upper) + low).astype(np.float32)
    out = np.zeros((len(x), len(numbers)), np.float32)
    for g in range(groups.shape[1]):  # a product with a power of two is exact: a sum is all that is rounded
        out = out + scale[:, g].astype(np.float32) * (own[:, g, None] * (sums[g] / 256))
    return out


def i32(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.ascontiguousarray(values, np.int32)


def ragged(parts: Sequence[tuple[Sequence[int], int, Sequence[int]]], rows: str = "all", table: int = 8) -> Batch:
    """(ids, first position, pages) of each sequence, as a batch. rows: which logits are wanted, "all" or "last"."""
    ids, pos, q_start, kv_len, pages, write, wanted = [], [], [0], [], [], [], []
    for tokens, start, own in parts:
        where = np.arange(start, start + len(tokens))
        ids += list(tokens)
        pos += list(where)
        write += list(np.asarray(own)[where // 16] * 16 + where % 16)
        kv_len.append(start + len(tokens))
        pages.append([*own, *[-1] * (table - len(own))])
        wanted += list(range(q_start[-1], len(ids))) if rows == "all" else [len(ids) - 1]
        q_start.append(len(ids))
    return Batch(i32(ids), i32(pos), i32(q_start), i32(kv_len), i32(pages), i32(write), i32(wanted))


def rows_batch(n: int, pages: int = 4) -> Batch:
    """n tokens with ids 0 .. n - 1 of one sequence that fits `pages` pages; for programs without attention."""
    return Batch(
        i32(np.arange(n)), i32(np.zeros(n)), i32([0, n]), i32([1]), i32([[0]]), i32(np.zeros(n)), i32(np.arange(n))
    )


class TinyModel:
    """Two layers with every op in the shape that real models have, and every kind of weight somewhere."""

    width, heads, kv_heads, head_dim, ffn, vocabulary = 256, 8, 2, 32, 512, 96

    def __init__(self, names: Sequence[str] = ("Q4_1", "Q8_0", "Q6_K", "Q4_K"), pairs: bool = True, bias: bool = True):
        d, f, h = self.width, self.ffn, self.head_dim
        self.kv = KV(layers=2, pages=32, page_size=16, kv_heads=self.kv_heads, head_dim=h)
        self.rope = Rope((1.0 / 10000 ** (np.arange(0, h, 2) / h)).astype(np.float32), h, pairs)
        self.table: Layout = weight(names[1 % len(names)], self.vocabulary, d)
        self.norms = [Dense(1 + 0.1 * dense("f32", d, seed=i).data.astype(np.float32), "f32") for i in range(5)]
        self.layers: list[dict[str, Layout]] = []
        for i in range(2):

            def of(n: int, k: int, j: int, i: int = i) -> Layout:
                return weight(names[(i + j) % len(names)], n, k, seed=10 * i + j)

            kv = self.kv_heads * h
            w = {"q": of(d, d, 0), "k": of(kv, d, 0), "v": of(kv, d, 1), "o": of(d, d, 2)}
            self.layers.append(w | {"gate": of(f, d, 3), "up": of(f, d, 3), "down": of(d, f, 2)})
        if bias:
            self.layers[0]["v"] = dense("f16", self.kv_heads * h, d)
            self.layers[1]["up"] = dense("bf16", f, d)
        self.bias = dense("f32", d, seed=3) if bias else None

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        x = ops.embed(batch.ids, self.table)
        for i, w in enumerate(self.layers):
            h = ops.rms_norm(x, self.norms[2 * i], 1e-5)
            q = ops.rope(ops.linear(h, w["q"], self.bias), batch.pos, self.rope, self.heads)
            k = ops.rope(ops.linear(h, w["k"]), batch.pos, self.rope, self.kv_heads)
            v = ops.linear(h, w["v"])
            a = ops.attention(q, k, v, batch, layer=i, heads=self.heads, scale=self.head_dim**-0.5)
            x = ops.add(x, ops.linear(a, w["o"], self.bias))
            h = ops.rms_norm(x, self.norms[2 * i + 1], 1e-5)
            x = ops.add(x, ops.linear(ops.swiglu(ops.linear(h, w["gate"]), ops.linear(h, w["up"])), w["down"]))
        return ops.linear(ops.rms_norm(ops.take(x, batch.logit_rows), self.norms[4], 1e-5), self.table)
