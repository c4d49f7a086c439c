"""Latent attention against its definition: one key for all heads, whose front is the value; parts, codes and equal bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.backends import cases
from quire.backends.choose import open_backend
from quire.backends.cuda.kernels import combine
from quire.backends.cuda.kernels import latent as module
from quire.backends.cuda.kernels.attention import workspace
from quire.backends.cuda.kernels.latent import latent_attention, latent_splits
from quire.backends.torch.quantized import encode
from tests.unit.backends.cuda.paged import Paged, error, paged
from tests.unit.backends.cuda.test_deterministic import part

GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not load ahead: it would only do more."""
    monkeypatch.setattr(combine, "_AHEAD", 1)


def exact(p: Paged, latent: int, scale: float) -> torch.Tensor:
    out = torch.empty(*p.q.shape[:2], latent, dtype=torch.float64, device=p.q.device)
    for b in range(p.kv_len.shape[0]):
        rows, k = slice(int(p.q_start[b]), int(p.q_start[b + 1])), p.keys[b][:, 0].double()
        score = torch.einsum("thd,sd->hts", p.q[rows].double(), k) * scale
        hidden = torch.arange(k.shape[0], device=k.device)[None] > p.pos[rows, None]
        weights = torch.softmax(score.masked_fill(hidden, float("-inf")), -1)
        out[rows] = torch.einsum("hts,sd->thd", weights, k[:, :latent])
    return out


def run(p: Paged, latent: int, scale: float, *, splits: int = 1, split_len: int = 0, **options) -> torch.Tensor:
    tokens, heads, _ = p.q.shape
    out = torch.full((tokens, heads, latent), float("nan"), device=p.q.device)
    space = workspace(tokens, heads, latent, splits, p.q.device, sums=split_len > 0) if splits > 1 else None
    longest = int((p.q_start[1:] - p.q_start[:-1]).max())
    told = {"scale": scale, "max_q": longest, "splits": splits, "split_len": split_len, "space": space}
    latent_attention(p.q, p.k_cache, out, **p.arrays, **told, **options)
    return out


@pytest.mark.parametrize("heads, dim, latent", [(8, 40, 32), (5, 72, 64), (3, 24, 24)])
def test_decode_and_chunks(heads: int, dim: int, latent: int, device: str):
    for rows, lens in (([1, 1, 1], [1, 33, 150]), ([9, 1, 3], [9, 40, 20])):
        p = paged(rows, lens, heads=heads, kv_heads=1, dim=dim, device=device)
        want = exact(p, latent, dim**-0.5)
        for splits in (1, 3) if len(rows) == rows.count(1) else (1,):
            assert error(run(p, latent, dim**-0.5, splits=splits), want) < 2e-3


def test_half_floats_of_many_heads(device: str, half: torch.dtype):
    """More heads than a tile holds, and rows that share a tile: the tile of many rows."""
    p = paged([3, 1], [80, 40], heads=72, kv_heads=1, dim=48, dtype=half, device=device)
    assert module.tile_of(half, 72, 3) is module.MANY
    assert error(run(p, 32, 0.1), exact(p, 32, 0.1)) < 1e-2
    few = paged([5], [70], heads=8, kv_heads=1, dim=48, dtype=half, device=device)
    assert module.tile_of(half, 8, 5) is module.MANY and module.tile_of(half, 8, 2) is module.FEW
    assert error(run(few, 32, 0.1), exact(few, 32, 0.1)) < 1e-2


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8])
def test_keys_of_codes(code: torch.dtype, device: str, half: torch.dtype):
    p = paged([1, 4], [50, 40], heads=4, kv_heads=1, dim=40, dtype=half, device=device)
    sizes = torch.rand(p.k_cache.shape[:3], generator=torch.Generator().manual_seed(4)) * 3 + 0.01
    p.k_cache *= sizes[..., None].to(device).to(half)
    codes, scale = encode(p.k_cache, code)
    for b, length in enumerate(p.kv_len.tolist()):
        where = torch.arange(length)
        page = p.table[b].cpu()[where // 16].long()
        p.keys[b] = codes[page, where % 16].float() * scale[page, where % 16][..., None]
    p.k_cache = codes
    scales = scale.transpose(1, 2).contiguous()
    for splits in (1, 2):
        assert error(run(p, 32, 0.15, splits=splits, k_scale=scales), exact(p, 32, 0.15)) < 1e-2
    with pytest.raises(ValueError, match="need scales"):
        run(p, 32, 0.15)


def test_a_row_has_the_same_bits_however_it_comes(device: str, half: torch.dtype):
    """A prompt, its rows alone, a chunk; parts walked by one program or by many."""
    p = paged([140], [140], heads=2, kv_heads=1, dim=40, dtype=half, device=device)
    whole = run(p, 32, 0.15, split_len=64)
    assert error(whole, exact(p, 32, 0.15)) < 1e-2
    for rows in (slice(139, 140), slice(64, 65), slice(63, 64), slice(100, 117)):
        for splits in (1, 3):
            assert torch.equal(run(part(p, rows), 32, 0.15, split_len=64, splits=splits), whole[rows]), (rows, splits)


def test_parts_and_shapes():
    assert latent_splits(1, 16, 8192, 132) == 64 and latent_splits(300, 16, 8192, 132) == 1
    assert latent_splits(1, 128, 100, 132) == 1 and latent_splits(4, 128, 8192, 132) == 33
    p = paged([1], [20], heads=2, kv_heads=1, dim=40)
    with pytest.raises(ValueError, match="whole blocks"):
        run(p, 32, 1.0, split_len=40)
    with pytest.raises(ValueError, match="needs a workspace"):
        latent_attention(p.q, p.k_cache, p.q, **p.arrays, scale=1.0, max_q=1, splits=2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_the_backend(deterministic: bool):
    """Pages shuffled, prompts and decode mixed, from the op to the pool that has no values."""
    kv, heads = cases.KV(2, 12, 16, 1, 40, latent=32), 4

    def forward(ops, batch, inputs):
        return ops.latent_attention(inputs["q"], inputs["k"], batch, layer=1, heads=heads, scale=0.15)

    limits = {"kv": kv, "max_tokens": 64, "max_rows": 64, "inputs": {"q": heads * 40, "k": 40}}
    oracle = open_backend("reference").compile(forward, **limits)
    cuda = open_backend("cuda", device="cuda" if GPU else "cpu", dtype="float32", deterministic=deterministic)
    program = cuda.compile(forward, **limits)
    (layers,) = program.kernels.caches
    assert len(layers) == 2 and all(cache.values is None for cache in layers)
    rng, a, b = np.random.default_rng(5), [7, 2, 9], [4, 1]
    for rows in ([(0, 37, a), (0, 1, b)], [(37, 1, a), (1, 9, b)], [(38, 1, a), (10, 1, b)]):
        batch = cases.ragged(rows)
        inputs = {name: cases.floats(rng, batch.tokens, n) for name, n in limits["inputs"].items()}
        want, got = oracle.run(batch, inputs), program.run(batch, inputs)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 2e-3
