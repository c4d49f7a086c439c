"""Norm, SwiGLU, RoPE with the cache write, and fp8 quantization, against float64 and the reference backend."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.backends.cuda.kernels.fp8 import E4M3, dequantize_weight, quantize_rows, quantize_weight
from quire.backends.cuda.kernels.gates import gated_rows
from quire.backends.cuda.kernels.norm import rms_norm
from quire.backends.cuda.kernels.rope import angle_table, rope_write
from quire.backends.ops import KV
from quire.backends.reference.backend import ReferenceBackend, ReferenceOps
from quire.layouts import Rope
from tests.unit.backends.cuda.paged import error


def rounded(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor) -> bool:
    """Whether each number is within half a step of e4m3: an eighth of a power of two, or of the smallest.

    The interpreter drops the carry when it rounds up to a power of two, so there a few may be off by half.
    """
    off = (found - wanted).abs() - 2.0**-10 * scale * 1.001
    if found.is_cuda:
        return bool((off <= 2.0**-4 * 1.001 * wanted.abs()).all())
    return float((off <= 2.0**-4 * 1.001 * wanted.abs()).double().mean()) > 0.95 and bool(
        (off <= 0.51 * wanted.abs()).all()
    )


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("width", [64, 100, 1536])
def test_rms_norm(width: int, half: torch.dtype, device: str):
    g = torch.Generator().manual_seed(width)
    x, weight = (
        torch.randn(5, width, generator=g).to(half).to(device),
        torch.rand(width, generator=g).to(half).to(device),
    )
    residual = torch.randn(5, width, generator=g).to(half).to(device)
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, 1e-5, out)
    assert error(out, exact_norm(x, weight, 1e-5)) < 5e-3
    summed = (x.float() + residual.float()).to(half)
    rms_norm(x, weight, 1e-5, out, residual=residual)
    assert torch.equal(residual, summed)
    want = exact_norm(summed, weight, 1e-5)
    assert error(out, want) < 5e-3
    parts = torch.randn(3, 5, width, generator=g).to(device)
    added = parts[0] + parts[1] + parts[2] + summed.float()
    rms_norm(parts, weight, 1e-5, out, residual=residual)
    assert torch.equal(residual, added.to(half))
    assert error(out, exact_norm(residual, weight, 1e-5)) < 5e-3
    out8, scales = torch.empty(5, width, dtype=E4M3, device=device), torch.empty(5, device=device)
    rms_norm(summed, weight, 1e-5, out8, scales=scales)
    back = out8.double() * scales.double()[:, None]
    assert rounded(back, want, scales.double()[:, None])


@pytest.mark.parametrize("width", [48, 1100])
def test_swiglu(width: int, half: torch.dtype, device: str):
    x = torch.randn(3, 2 * width, generator=torch.Generator().manual_seed(1)).to(half).to(device)
    gate, up = x.double().chunk(2, 1)
    want = gate * torch.sigmoid(gate) * up
    out = torch.full((3, width), float("nan"), dtype=half, device=device)
    gated_rows(x, out, "swiglu")
    assert error(out, want) < 5e-3
    out8, scales = torch.empty(3, width, dtype=E4M3, device=device), torch.empty(3, device=device)
    gated_rows(x, out8, "swiglu", scales=scales)
    back = out8.double() * scales.double()[:, None]
    assert rounded(back, want, scales.double()[:, None])


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dim, rotated", [(64, 64), (48, 48), (64, 32)])
def test_rope_and_cache_write(pairs: bool, dim: int, rotated: int, device: str):
    heads, kv_heads, tokens = 4, 2, 6
    g = torch.Generator().manual_seed(dim)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, generator=g)
    rope = Rope((10000.0 ** -(np.arange(rotated // 2) / (rotated / 2))).astype(np.float32), rotated, pairs, 1.25)
    pos = torch.tensor([0, 5, 99, 3000, 1, 2], dtype=torch.int32)
    write = torch.tensor([17, 3, 40, 0, -1, 63], dtype=torch.int32)  # row 4 only pads
    caches = [torch.full((4, 16, kv_heads, dim), 7.0, device=device) for _ in range(2)]
    q_out = torch.full((tokens, heads, dim), float("nan"), device=device)
    angles = angle_table(torch.from_numpy(rope.frequencies), 4000, rope.magnitude).to(device)
    on = qkv.to(device)
    rope_write(on, q_out, *caches, angles=angles, pos=pos.to(device), write=write.to(device), pairs=pairs)
    ops = ReferenceOps(ReferenceBackend(), KV(1, 4, 16, kv_heads, dim))
    q, k, v = (t.numpy() for t in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1))
    want_q = ops.rope(q, pos.numpy(), rope, heads)
    want_k = ops.rope(k, pos.numpy(), rope, kv_heads)
    np.testing.assert_allclose(q_out.cpu().reshape(tokens, -1).numpy(), want_q, atol=4e-6)
    real = write >= 0
    for cache, want in zip(caches, (want_k, v), strict=True):
        flat = cache.cpu().view(64, -1)
        np.testing.assert_allclose(flat[write[real].long()].numpy(), want[real.numpy()], atol=4e-6)
        others = torch.ones(64, dtype=torch.bool)
        others[write[real].long()] = False
        assert (flat[others] == 7.0).all()
    in_place = on.clone()
    view = in_place[:, : heads * dim].view(tokens, heads, dim)
    rope_write(in_place, view, *caches, angles=angles, pos=pos.to(device), write=write.to(device), pairs=pairs)
    assert torch.equal(view, q_out)
    parts, again = torch.stack([on - 1.0, torch.ones_like(on)]), torch.empty_like(q_out)
    rope_write(parts, again, *caches, angles=angles, pos=pos.to(device), write=write.to(device), pairs=pairs)
    assert torch.allclose(again, q_out, atol=1e-5)


@pytest.mark.parametrize("code", [E4M3, torch.int8])
@pytest.mark.parametrize("rotated", [32, 16])
def test_rope_with_head_norm_and_a_cache_of_codes(code: torch.dtype, rotated: int, half: torch.dtype, device: str):
    g = torch.Generator().manual_seed(3)
    qkv = (torch.randn(5, 8 * 32, generator=g) * 4).to(half).to(device)
    qkv[3, -32:] = 0.0
    qkv[4, -40], qkv[4, -3] = float("nan"), float("inf")
    q_norm, k_norm = (torch.rand(32, generator=g) + 0.5).to(device), (torch.rand(32, generator=g) + 0.5).to(device)
    freq = torch.tensor([0.5**i for i in range(rotated // 2)])
    angles = angle_table(freq, 8).to(device)
    pos = torch.tensor([0, 3, 7, 2, 1]).int().to(device)
    write = torch.tensor([5, 6, 20, 17, 31]).int().to(device)
    q_out = torch.empty(5, 4, 32, dtype=half, device=device)
    k8, v8 = (torch.zeros(2, 16, 2, 32, device=device).to(code) for _ in range(2))
    ks, vs = (torch.full((2, 2, 16), 7.0, device=device) for _ in range(2))
    rope_write(
        qkv, q_out, k8, v8, angles=angles, pos=pos, write=write, pairs=False, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
        k_scale=ks, v_scale=vs,
    )  # fmt: skip
    wide = qkv.double().view(5, 8, 32)
    normed = wide / (wide.square().mean(2, keepdim=True) + 1e-6).sqrt()
    cos, sin = (t.double()[:, None, :] for t in angles[pos.long()].split(rotated // 2, 1))

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x.split([rotated // 2, rotated // 2, 32 - rotated], 2)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], 2)

    assert error(q_out, turn(normed[:, :4] * q_norm.double())) < 5e-3
    largest = 448.0 if code == E4M3 else 127.0
    for cache, beside, want in ((k8, ks, turn(normed[:, 4:6] * k_norm.double())), (v8, vs, wide[:, 6:])):
        scale = beside[write.long() // 16, :, write.long() % 16].double()
        got = cache.view(torch.uint8).view(32, 2, 32)[write.long()].view(code).double() * scale[..., None]
        peak = want.abs().amax(2)
        fine = peak.isfinite()
        assert torch.allclose(scale[fine], (peak / largest)[fine].clamp(min=1e-30 / largest), rtol=1e-5)
        assert got[~fine].isnan().all() and int((~fine).sum()) == (2 if cache is v8 else 0)
        if code == E4M3:
            assert rounded(got[fine], want[fine], scale[fine][:, None])
        else:
            assert ((got - want)[fine].abs() <= scale[fine][:, None] * 0.501).all()
        others = torch.ones(2, 2, 16, dtype=torch.bool, device=device)
        others[write.long() // 16, :, write.long() % 16] = False
        assert (beside[others] == 7.0).all()


@pytest.mark.parametrize("kind", ["tensor", "channel", "block"])
def test_fp8_weights(kind: str, device: str):
    w = torch.randn(200, 300, generator=torch.Generator().manual_seed(4)).to(device)
    w[7] *= 100.0
    codes, scale = quantize_weight(w, kind)
    assert scale.shape == {"tensor": (1,), "channel": (200,), "block": (2, 3)}[kind]
    back = dequantize_weight(codes, scale)
    worst = scale.max() * 2.0**-9
    assert ((back - w).abs() <= 2.0**-4 * w.abs() + worst).all()
    assert float((back - w).norm() / w.norm()) < 0.04
    with pytest.raises(ValueError, match="fp8 scales"):
        quantize_weight(w, "row")


def test_fp8_rows(half: torch.dtype, device: str):
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(5)).to(half).to(device)
    x[2] = 0.0
    out, scales = torch.empty(4, 300, dtype=E4M3, device=device), torch.empty(4, device=device)
    quantize_rows(x, out, scales)
    back = out.double() * scales.double()[:, None]
    assert rounded(back, x.double(), scales.double()[:, None])
    assert (back[2] == 0.0).all()
