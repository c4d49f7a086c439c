"""Writers of quantized matrices as folders keep them, from the formats' public descriptions: plain loops, nothing shared with the readers.

Each takes float32 weights [n, k] and gives the tensors (numpy; bfloat16 and e4m3 as torch) and the weights that they stand for,
computed in float64 from the numbers that were written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def _groups(k: int, group: int) -> list[tuple[int, int]]:
    size = k if group == -1 else group
    return [(first, min(first + size, k)) for first in range(0, k, size)]


def _quantize(
    w: np.ndarray, bits: int, group: int, sym: bool, dtype: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes [n, k], zeros [n, groups], scales [n, groups] of dtype, and the weights they mean."""
    n, k = w.shape
    spans, top = _groups(k, group), 2**bits - 1
    codes, zeros = np.zeros((n, k), np.int64), np.zeros((n, len(spans)), np.int64)
    scales, means = np.zeros((n, len(spans)), dtype), np.zeros((n, k))
    for g, (a, b) in enumerate(spans):
        low, high = np.minimum(w[:, a:b].min(1), 0), np.maximum(w[:, a:b].max(1), 0)
        step = 2 * np.maximum(high, -low) / top if sym else (high - low) / top
        scales[:, g] = step
        own = scales[:, g].astype(np.float64)
        zeros[:, g] = 2 ** (bits - 1) if sym else np.clip(np.rint(-low / own), 1, top)
        codes[:, a:b] = np.clip(np.rint(w[:, a:b] / own[:, None]) + zeros[:, g, None], 0, top)
        means[:, a:b] = own[:, None] * (codes[:, a:b] - zeros[:, g, None])
    return codes, zeros, scales, means


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """[r, c] along the last axis into words, the lowest bits first; padded with zeros."""
    per = 32 // bits
    out = np.zeros((codes.shape[0], -(-codes.shape[1] // per)), np.uint32)
    for j in range(codes.shape[1]):
        out[:, j // per] |= codes[:, j].astype(np.uint32) << np.uint32(bits * (j % per))
    return out.view(np.int32)


def gptq(
    w: np.ndarray,
    *,
    bits: int = 4,
    group: int = 128,
    sym: bool = True,
    v2: bool = False,
    order: bool = True,
    moved: bool = False,
    dtype: Any = np.float16,
) -> tuple[dict[str, Any], np.ndarray]:
    """moved: columns are quantized in another order than they lie in, as desc_act does."""
    at = np.random.default_rng(w.shape[1]).permutation(w.shape[1]) if moved else np.arange(w.shape[1])
    codes, zeros, scales, means = _quantize(w[:, at], bits, group, sym, dtype)
    back = np.argsort(at)
    codes, means = codes[:, back], np.ascontiguousarray(means[:, back])
    size = w.shape[1] if group == -1 else group
    made: dict[str, Any] = {
        "qweight": _pack(codes, bits).T.copy(),
        "qzeros": _pack((zeros if v2 else zeros - 1).T, bits),
        "scales": scales.T.copy(),
    }
    if order:
        made["g_idx"] = (np.arange(w.shape[1]) // size)[back].astype(np.int32)
    return made, means


def awq(w: np.ndarray, *, group: int = 128, dtype: Any = np.float16) -> tuple[dict[str, Any], np.ndarray]:
    codes, zeros, scales, means = _quantize(w, 4, group, False, dtype)

    def pack(rows: np.ndarray) -> np.ndarray:  # [columns, n] -> [columns, n / 8]
        out = np.zeros((rows.shape[0], rows.shape[1] // 8), np.uint32)
        for word in range(out.shape[1]):
            for i in range(8):
                out[:, word] |= rows[:, 8 * word + AWQ_ORDER[i]].astype(np.uint32) << np.uint32(4 * i)
        return out.view(np.int32)

    return {"qweight": pack(codes.T), "qzeros": pack(zeros.T), "scales": scales.T.copy()}, means


def compressed(
    w: np.ndarray, *, bits: int = 4, group: int = 128, sym: bool = True, old: bool = False, bfloat: bool = False
) -> tuple[dict[str, Any], np.ndarray]:
    """pack-quantized. old: zeros are not packed; bfloat: scales are bfloat16."""
    import torch

    codes, zeros, scales, means = _quantize(w, bits, group, sym, np.float32)
    kept: Any = scales
    if bfloat:
        kept = torch.from_numpy(scales).bfloat16()
        spans = _groups(w.shape[1], group)
        for g, (a, b) in enumerate(spans):
            means[:, a:b] = kept.double().numpy()[:, g, None] * (codes[:, a:b] - zeros[:, g, None])
    made = {"weight_packed": _pack(codes, bits), "weight_scale": kept, "weight_shape": np.array(w.shape, np.int64)}
    if not sym:
        half = 2 ** (bits - 1)
        made["weight_zero_point"] = (zeros - half).astype(np.int8) if old else _pack(zeros.T, bits).T.copy()
    return made, means


def int_quantized(w: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    scale = (np.abs(w).max(1, keepdims=True) / 127).astype(np.float32)
    codes = np.clip(np.rint(w / scale), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float64) * scale


def fp8(
    w: np.ndarray, *, tile: tuple[int, int] | None, name: str, flat: bool = False
) -> tuple[dict[str, Any], np.ndarray]:
    """tile (0, 0): one scale for all; None: one for each row; flat: without the axis of one."""
    import torch

    n, k = w.shape
    rows, columns = (1, k) if tile is None else (n, k) if tile == (0, 0) else tile
    scale = np.zeros((-(-n // rows), -(-k // columns)), np.float32)
    codes = torch.zeros(n, k, dtype=torch.float8_e4m3fn)
    means = np.zeros((n, k))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = np.abs(w[at]).max() / 448
            codes[at] = torch.from_numpy(w[at] / scale[i, j]).to(torch.float8_e4m3fn)
            means[at] = codes[at].double().numpy() * np.float64(scale[i, j])
    return {"weight": codes, name: scale.reshape(-1) if flat else scale}, means
