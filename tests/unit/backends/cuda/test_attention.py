"""Paged attention against its definition in float64: ragged mixes, head sizes, window, soft cap, sinks, splits, fp8."""

from __future__ import annotations

import pytest
import torch

from quire.backends.cuda.kernels import attention as module
from quire.backends.cuda.kernels.attention import attention, choose_splits, workspace
from quire.backends.torch.quantized import encode
from tests.unit.backends.cuda.paged import Paged, error, exact, paged


def run(p: Paged, scale: float, *, max_q: int, splits: int = 1, **options) -> torch.Tensor:
    out = torch.full_like(p.q, float("nan"))
    space = workspace(p.q.shape[0], p.q.shape[1], p.q.shape[2], splits, p.q.device) if splits > 1 else None
    attention(
        p.q, p.k_cache, p.v_cache, out, **p.arrays, scale=scale, max_q=max_q, splits=splits, space=space, **options
    )
    return out


@pytest.mark.parametrize("heads, kv_heads, dim", [(8, 2, 64), (4, 4, 128), (6, 2, 96), (2, 1, 256)])
def test_decode(heads: int, kv_heads: int, dim: int, device: str):
    p = paged([1, 1, 1, 1], [1, 16, 77, 200], heads=heads, kv_heads=kv_heads, dim=dim, device=device)
    for splits in (1, 3):
        assert error(run(p, dim**-0.5, max_q=1, splits=splits), exact(p, dim**-0.5)) < 2e-3


@pytest.mark.parametrize("splits", [1, 4])
def test_a_mix_of_prompts_chunks_decode_and_verification(splits: int, device: str):
    p = paged([40, 1, 70, 3, 1, 5], [40, 33, 150, 20, 1, 90], heads=8, kv_heads=2, dim=64, device=device)
    assert error(run(p, 0.125, max_q=70, splits=splits), exact(p, 0.125)) < 2e-3


@pytest.mark.parametrize("rows", [1, 4, 30])
def test_window_softcap_and_sinks(rows: int, device: str):
    lens = [rows, 130, 70]
    p = paged([rows] * 3, lens, heads=4, kv_heads=1, dim=64, device=device)
    p.q *= 3.0  # so that the cap is felt
    sinks = torch.randn(4, device=device)
    together = {"window": 33, "softcap": 5.0, "sinks": sinks}
    for splits, options in (
        *((1, o) for o in ({"window": 20}, {"softcap": 2.0}, {"sinks": sinks}, together)),
        (3, together),
    ):
        found = run(p, 0.125, max_q=rows, splits=splits, **options)
        assert error(found, exact(p, 0.125, **options)) < 2e-3, (options, splits)


@pytest.mark.parametrize("split_len", [0, 64])
@pytest.mark.parametrize("rows, splits", [(1, 1), (1, 3), (20, 1)])
def test_pages_before_a_window_may_be_gone(rows: int, splits: int, split_len: int, device: str):
    """Their entries are -1: what lies before the first page is no number here, and must not be looked at."""
    p = paged([rows, rows], [150, 90], heads=4, kv_heads=2, dim=64, device=device)
    want = exact(p, 0.125, window=24)
    for b in range(2):
        first = int(p.pos[p.q_start[b]]) - 24 + 1
        p.table[b, : first // 16] = -1
    for name in ("k_cache", "v_cache"):
        cache = getattr(p, name)
        setattr(p, name, torch.cat([torch.full_like(cache[:1], float("nan")), cache])[1:])
    out = torch.full_like(p.q, float("nan"))
    parts = -(-150 // split_len) if split_len and splits > 1 else splits
    space = workspace(2 * rows, 4, 64, parts, device, sums=split_len > 0) if parts > 1 else None
    attention(
        p.q, p.k_cache, p.v_cache, out, **p.arrays, scale=0.125, max_q=rows, splits=parts, split_len=split_len,
        space=space, window=24,
    )  # fmt: skip
    assert error(out, want) < 2e-3


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 64), (3, 3, 8)])
def test_encode(heads: int, kv_heads: int, dim: int, device: str):
    """Rows see all rows of their own sequence, whether keys and values lie side by side or not."""
    lengths = [1, 70, 5]
    g = torch.Generator().manual_seed(3)
    qkv = torch.randn(76, (heads + 2 * kv_heads) * dim, generator=g).to(device)
    q, k, v = (x.unflatten(-1, (-1, dim)) for x in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    want, first = torch.empty(76, heads, dim, dtype=torch.float64, device=device), 0
    for n in lengths:
        own = slice(first, first + n)
        wide = [x[own].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
        weights = torch.softmax(torch.einsum("thd,shd->hts", q[own].double(), wide[0]) * 0.3, -1)
        want[own] = torch.einsum("hts,shd->thd", weights, wide[1])
        first += n
    q_start = torch.tensor([0, 1, 71, 76], dtype=torch.int32, device=device)
    counts, table = module.rows_as_pages(q_start, 70)
    for values in (v, v.contiguous()):
        out = torch.full((76, heads, dim), float("nan"), device=device)
        module.encode(q, k, values, out, q_start=q_start, lengths=counts, table=table, scale=0.3)
        assert error(out, want) < 2e-3


def test_half_precision_and_strided_rows(device: str, half: torch.dtype):
    p = paged([1, 20], [50, 64], heads=8, kv_heads=2, dim=64, dtype=half, device=device)
    wide = torch.zeros(p.q.shape[0], 12 * 64, dtype=p.q.dtype, device=device)  # q as a part of a fused projection
    wide[:, : 8 * 64] = p.q.reshape(p.q.shape[0], -1)
    p.q = wide[:, : 8 * 64].view(p.q.shape[0], 8, 64)
    out = torch.empty(p.q.shape, dtype=p.q.dtype, device=device)
    attention(p.q, p.k_cache, p.v_cache, out, **p.arrays, scale=0.125, max_q=20)
    assert error(out, exact(p, 0.125)) < 1e-2


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 3.0}])
def test_a_cache_of_codes(code: torch.dtype, splits: int, options: dict, device: str, half: torch.dtype):
    """A scale for each token and head; what nobody wrote holds scales that are no numbers."""
    p = paged([1, 6, 33], [50, 40, 47], heads=6, kv_heads=3, dim=64, dtype=half, device=device)
    for cache in (p.k_cache, p.v_cache):
        sizes = torch.rand(cache.shape[:3], generator=torch.Generator().manual_seed(4)) * 3 + 0.01
        cache *= sizes[..., None].to(device).to(half)
    (k8, ks), (v8, vs) = encode(p.k_cache, code), encode(p.v_cache, code)
    for b, length in enumerate(p.kv_len.tolist()):
        where = torch.arange(length)
        page = p.table[b].cpu()[where // 16].long()
        for codes, scale, into in ((k8, ks, p.keys), (v8, vs, p.values)):
            into[b] = codes[page, where % 16].float() * scale[page, where % 16][..., None]
    scales = {"k_scale": ks.transpose(1, 2).contiguous(), "v_scale": vs.transpose(1, 2).contiguous()}
    out = torch.empty_like(p.q)
    space = workspace(p.q.shape[0], 6, 64, splits, device) if splits > 1 else None
    attention(
        p.q, k8, v8, out, **p.arrays, scale=0.125, max_q=33, splits=splits, space=space, **scales, **options
    )  # fmt: skip
    assert error(out, exact(p, 0.125, **options)) < 3e-3 if half == torch.float16 else 1e-2
    with pytest.raises(ValueError, match="scales"):
        attention(p.q, k8, v8, out, **p.arrays, scale=0.125, max_q=33, k_scale=ks, v_scale=vs)
    with pytest.raises(ValueError, match="needs scales"):
        attention(p.q, k8, v8, out, **p.arrays, scale=0.125, max_q=33)


def test_splits_cover_bounds():
    assert choose_splits(1, 8, 512) == 8 and choose_splits(256, 8, 8192) == 1 and choose_splits(1, 8, 63) == 1


def test_a_tile_that_cannot_hold_the_rows_is_refused(device: str):
    p = paged([9], [20], heads=4, kv_heads=2, dim=64, device=device)
    with pytest.raises(ValueError, match="cannot hold"):
        module.attend(p.q, p.k_cache, p.v_cache, p.q, **p.arrays, scale=1.0, tile=module.Tile(16, 16, 1, 1), max_rows=9)
