"""RoPE on queries and keys, and the write of keys and values into the cache, in one pass over a fused projection.

A row of `qkv` holds the query heads, then the key heads, then the value heads. Angles come from a table of cosines and
sines made once in float64 (a device's own cosine of a large angle is not to be trusted). Models that normalize each
query and key head (Qwen3) have that done on the way.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportPossiblyUnboundVariable=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPrivateImportUsage=false
# (kernels are in Triton's language, which only looks like Python to a type checker)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.backends.cuda.kernels.launch import Launcher
from quire.backends.torch.quantized import LARGEST


@triton.jit
def _head_norm(a, b, rest, weight, first, second, tail, half_keep, tail_keep, eps, D: tl.constexpr):
    """RMSNorm of heads given as rotated halves a, b [HEADS, HALF] and the columns that are not rotated."""
    total = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
    factor = (1.0 / tl.sqrt(total / D + eps))[:, None]
    a = a * factor * tl.load(weight + first, mask=half_keep, other=0.0).to(tl.float32)[None, :]
    b = b * factor * tl.load(weight + second, mask=half_keep, other=0.0).to(tl.float32)[None, :]
    rest = rest * factor * tl.load(weight + tail, mask=tail_keep, other=0.0).to(tl.float32)[None, :]
    return a, b, rest


@triton.jit
def _load(source, columns, keep, stride_p, PARTS: tl.constexpr):
    """Load those columns of the heads, from the parts of a split product, added in their order."""
    x = tl.load(source + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        x += tl.load(source + i * stride_p + columns[None, :], mask=keep, other=0.0).to(tl.float32)
    return x


@triton.jit
def _code(x, scale, WHOLE: tl.constexpr):
    x = x / scale[:, None]
    if WHOLE:
        x = tl.floor(x + 0.5)
    return x


@triton.jit
def _coded(a, b, rest, LARGEST: tl.constexpr, WHOLE: tl.constexpr):
    """The heads as codes, and their scales: the largest number of a head becomes the largest code."""
    peak = tl.maximum(tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)), tl.max(tl.abs(rest), 1))
    # Anything times zero is zero, unless it is not finite: then so is the sum, and the scale no number.
    off = tl.sum(a * 0.0, 1) + tl.sum(b * 0.0, 1) + tl.sum(rest * 0.0, 1)
    scale = tl.maximum(peak, 1e-30) / LARGEST + off
    return _code(a, scale, WHOLE), _code(b, scale, WHOLE), _code(rest, scale, WHOLE), scale


@triton.jit
def _store(target, first, second, tail, a, b, rest, own, half_keep, tail_keep, kind: tl.constexpr):
    """The columns of those heads that are `own`."""
    tl.store(target + first[None, :], a.to(kind), mask=own[:, None] & half_keep[None, :])
    tl.store(target + second[None, :], b.to(kind), mask=own[:, None] & half_keep[None, :])
    tl.store(target + tail[None, :], rest.to(kind), mask=own[:, None] & tail_keep[None, :])


@Launcher
@triton.jit(do_not_specialize_on_alignment=["pos", "write"])  # they lie anywhere in a copied buffer
def _rope(
    qkv, q_out, k_cache, v_cache, angles, pos, write, q_norm, k_norm, k_scale, v_scale, heads, kv_heads, eps,
    stride_p, stride_t, stride_qt, stride_qh, stride_slot, stride_kh, D: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr,
    TAIL: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, PAGE: tl.constexpr,
    LARGEST: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    half_keep = lane < DIM // 2
    if PAIRS:
        first = lane * 2
        second = lane * 2 + 1
    else:
        first = lane
        second = lane + DIM // 2
    tail = DIM + tl.arange(0, TAIL)  # columns past the rotated ones
    tail_keep = tail < D
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.load(pos + row).to(tl.int64) * DIM
    cos = tl.load(angles + at + lane, mask=half_keep, other=0.0)[None, :]
    sin = tl.load(angles + at + DIM // 2 + lane, mask=half_keep, other=0.0)[None, :]
    slot = tl.load(write + row).to(tl.int64)
    source = qkv + row * stride_t + head[:, None] * D
    known = (head < heads + 2 * kv_heads)[:, None]
    a = _load(source, first, known & half_keep[None, :], stride_p, PARTS)
    b = _load(source, second, known & half_keep[None, :], stride_p, PARTS)
    rest = _load(source, tail, known & tail_keep[None, :], stride_p, PARTS)
    is_q = head < heads
    is_k = (head >= heads) & (head < heads + kv_heads)
    is_v = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    if NORM:
        qa, qb, qr = _head_norm(a, b, rest, q_norm, first, second, tail, half_keep, tail_keep, eps, D)
        ka, kb, kr = _head_norm(a, b, rest, k_norm, first, second, tail, half_keep, tail_keep, eps, D)
        a = tl.where(is_q[:, None], qa, tl.where(is_k[:, None], ka, a))
        b = tl.where(is_q[:, None], qb, tl.where(is_k[:, None], kb, b))
        rest = tl.where(is_q[:, None], qr, tl.where(is_k[:, None], kr, rest))
    ra = tl.where(is_v[:, None], a, a * cos - b * sin)
    rb = tl.where(is_v[:, None], b, a * sin + b * cos)
    target = q_out + row * stride_qt + head[:, None] * stride_qh
    _store(target, first, second, tail, ra, rb, rest, is_q, half_keep, tail_keep, q_out.dtype.element_ty)
    if slot < 0:  # a row that only pads the batch
        return
    kind = k_cache.dtype.element_ty
    if LARGEST > 0:
        ra, rb, rest, scale = _coded(ra, rb, rest, LARGEST, kind == tl.int8)
    for values in tl.static_range(2):
        own = is_v if values else is_k
        index = tl.where(own, head - heads - values * kv_heads, 0)
        if LARGEST > 0:
            beside = (v_scale if values else k_scale) + (slot // PAGE * kv_heads + index) * PAGE + slot % PAGE
            tl.store(beside, scale, mask=own)
        place = (v_cache if values else k_cache) + slot * stride_slot + index[:, None] * stride_kh
        _store(place, first, second, tail, ra, rb, rest, own, half_keep, tail_keep, kind)


def angle_table(frequencies: torch.Tensor, positions: int, magnitude: float = 1.0) -> torch.Tensor:
    """[positions, dim] float32: cosines of pos * frequency, then sines. The angle is a float32 product."""
    place = torch.arange(positions, dtype=torch.float32, device=frequencies.device)
    angle = (place[:, None] * frequencies.float()[None, :]).double()
    return torch.cat([angle.cos() * magnitude, angle.sin() * magnitude], 1).float()


def rope_write(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    angles: torch.Tensor,
    pos: torch.Tensor,
    write: torch.Tensor,
    pairs: bool,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Rotate the query heads of qkv [T, (H + 2 Hk) D] into q_out [T, H, D], and keys and values into the cache.

    q_out may be a view of qkv. pairs=True rotates columns (0, 1), (2, 3), …; False (i, i + dim / 2). A row whose
    `write` is negative writes no cache. qkv may be [parts, T, ...], the parts of a split product, added in their
    order. Scales [pages, Hk, page] make the caches codes, fp8 or int8: each token's head is divided by a scale that
    makes its largest number the largest code.
    """
    tokens, heads, dim = q_out.shape
    kv_heads = k_cache.shape[2]
    rotated = angles.shape[1]
    if k_cache.stride() != v_cache.stride() or k_cache.stride(0) != k_cache.shape[1] * k_cache.stride(1):
        raise ValueError("the caches must have equal strides, and pages that follow one another")
    if (
        qkv.shape[-2:] != (tokens, (heads + 2 * kv_heads) * dim)
        or rotated > dim
        or (q_norm is None) != (k_norm is None)
    ):
        raise ValueError(f"RoPE of {list(qkv.shape)} into {list(q_out.shape)} with angles {list(angles.shape)}")
    if k_scale is not None and (k_scale.shape != (k_cache.shape[0], kv_heads, k_cache.shape[1])):
        raise ValueError(f"scales {list(k_scale.shape)} for a cache {list(k_cache.shape)}")
    block = 4 if tokens <= 256 else 8  # heads of a program: many rows fill the device anyway
    launch: dict[str, object] = {"launch_pdl": True} if pdl else {}
    _rope[(tokens, triton.cdiv(heads + 2 * kv_heads, block))](
        qkv, q_out, k_cache, v_cache, angles, pos, write, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, angles if k_scale is None else k_scale,
        angles if v_scale is None else v_scale, heads, kv_heads, eps, qkv.stride(0), qkv.stride(-2),
        q_out.stride(0), q_out.stride(1),
        k_cache.stride(1), k_cache.stride(2), D=dim, DIM=rotated, HALF=triton.next_power_of_2(rotated // 2),
        TAIL=triton.next_power_of_2(max(1, dim - rotated)), PAIRS=pairs, HEADS=block, NORM=q_norm is not None,
        PAGE=k_cache.shape[1], LARGEST=0.0 if k_scale is None else LARGEST[k_cache.dtype],
        PARTS=qkv.shape[0] if qkv.ndim == 3 else 1, PDL=pdl, num_warps=block // 2, **launch,
    )  # fmt: skip
