"""Kernels whose rows do not depend on their batch: equal bits over numbers of rows, places, chunks and ways to split.

In the interpreter numpy multiplies, and chooses its own order of sums by the shape of a tile: there, bits are compared
between launches of one tile. Between tiles they are compared where there is a GPU, by tests/gpu/test_deterministic.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.backends.cuda.kernels import attention as paged_attention
from quire.backends.cuda.kernels import combine
from quire.backends.cuda.kernels import product as module
from quire.backends.cuda.kernels.attention import attention, workspace
from quire.backends.cuda.kernels.product import Tile, product
from tests.unit.backends.cuda.paged import Paged, error, exact, paged

TILES = [Tile(16, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2)]


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter does not load ahead: it would only do more."""
    monkeypatch.setattr(combine, "_AHEAD", 1)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments so short that a small k has several, and a device so small that one tile of channels fills it."""
    monkeypatch.setattr(module, "SEGMENT", 128)


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(m + n + k)
    x, w, bias, residual = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k), n, (m, n)))
    return tuple(torch.from_numpy(a).to(dtype).to(device) for a in (x, w / np.float32(k**0.5), bias, residual))


@pytest.mark.parametrize("n, k", [(96, 128), (70, 300), pytest.param(130, 1000, marks=pytest.mark.large), (8, 40)])
@pytest.mark.parametrize("kind", ["float32", "half"])
def test_products_are_products(n: int, k: int, kind: str, short: None, device: str, half: torch.dtype):
    dtype = half if kind == "half" else torch.float32
    for m in (1, 5, 17, 130):
        x, w, bias, residual = operands(m, n, k, dtype, device)
        wide = x.double().cpu().numpy() @ w.double().cpu().numpy().T
        for options in ({}, {"bias": bias}, {"bias": bias, "residual": residual}):
            y = torch.full((m, n), float("nan"), dtype=torch.float32, device=device)
            product(x, w, y, **options)
            want = wide + sum(t.double().cpu().numpy() for t in options.values())
            assert np.linalg.norm(y.cpu().numpy() - want) / np.linalg.norm(want) < 1e-5
    grown = residual.clone()
    product(x, w, grown, residual=grown)
    assert error(grown, torch.from_numpy(wide).to(device) + residual.double()) < (1e-2 if kind == "half" else 1e-5)


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.channels}")
def test_a_row_has_the_same_bits_in_any_company(tile: Tile, short: None, device: str, half: torch.dtype):
    x, w, _, residual = operands(150, 200, 700, half, device)

    def run(rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        y = torch.empty(rows.shape[0], 200, dtype=torch.float32, device=device)
        product(rows.contiguous(), w, y, residual=more.contiguous(), tile=tile)
        return y

    whole = run(x, residual)
    for rows in ([0], [149], [70, 3], list(range(20, 37)), list(range(149, 20, -1))):
        assert torch.equal(run(x[rows], residual[rows]), whole[rows]), rows


@pytest.mark.parametrize("rows", [16, 64])
def test_who_adds_the_segments_does_not_matter(rows: int, short: None, device: str, half: torch.dtype):
    for n, k, m in ((200, 700, 5), (64, 128, 16), (70, 129, 1)):
        x, w, bias, _ = operands(m, n, k, half, device)
        found = []
        for apart in (False, True):
            y = torch.full((m, n), float("nan"), dtype=torch.float32, device=device)  # rounding would hide a difference
            product(x, w, y, bias=bias, tile=Tile(rows, 64, 4, 2, apart=apart))
            found.append(y)
        assert torch.equal(*found)


def test_operands_that_do_not_fit_are_refused(device: str):
    x, w, y = torch.zeros(2, 8, device=device), torch.zeros(4, 8, device=device), torch.zeros(2, 4, device=device)
    for bad in ((x, w[:, :7], y), (x, w, y.T), (x.half(), w, y)):
        with pytest.raises(ValueError, match="a product of"):
            product(*bad)


def attend(p: Paged, *, apart: bool, split_len: int = 64, max_q: int | None = None, **options) -> torch.Tensor:
    out = torch.full(
        p.q.shape, float("nan"), dtype=torch.float32, device=p.q.device
    )  # rounding would hide a difference
    tokens, heads, dim = p.q.shape
    splits = -(-int(p.kv_len.max()) // split_len)
    space = workspace(tokens, heads, dim, splits, p.q.device, sums=True) if apart else None
    longest = int((p.q_start[1:] - p.q_start[:-1]).max())
    attention(
        p.q, p.k_cache, p.v_cache, out, **p.arrays, scale=0.125, max_q=max_q or longest, splits=splits,
        split_len=split_len, space=space, **options,
    )  # fmt: skip
    return out


def part(p: Paged, rows: slice) -> Paged:
    """Some of one sequence's rows, as a chunk that ends where they end."""
    q, pos = p.q[rows], p.pos[rows]
    start = torch.tensor([0, q.shape[0]], dtype=torch.int32, device=q.device)
    length = pos[-1:] + 1
    return Paged(q, p.k_cache, p.v_cache, p.table, start, length, pos.contiguous(), p.write, p.keys, p.values)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.large)])
def test_attention_at_fixed_positions_is_attention(apart: bool, device: str):
    p = paged([10, 1, 17, 3, 1], [10, 33, 250, 128, 1], heads=4, kv_heads=2, dim=64, device=device)
    sinks = torch.randn(4, device=device)
    for options in ({}, {"window": 33}, {"softcap": 2.0}, {"sinks": sinks}):
        assert error(attend(p, apart=apart, **options), exact(p, 0.125, **options)) < 2e-3, options


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"sinks": True}], ids=["plain", "window", "sinks"])
def test_attention_has_the_same_bits_for_a_row_however_it_comes(options: dict, device: str, half: torch.dtype):
    """A whole prompt, its chunks, its last row alone, among others; parts walked by one program or by many."""
    if "sinks" in options:
        options = {"sinks": torch.randn(2, device=device)}
    p = paged([210], [210], heads=2, kv_heads=1, dim=64, dtype=half, device=device)
    whole = attend(p, apart=False, **options)
    for rows in (slice(209, 210), slice(64, 65), slice(63, 64), slice(100, 137)):
        for max_q in (None, 210):  # the tile of few rows, and of many
            for apart in (False, True):
                found = attend(part(p, rows), apart=apart, max_q=max_q, **options)
                assert torch.equal(found, whole[rows]), (apart, rows, max_q)
    assert torch.equal(attend(part(p, slice(3, 150)), apart=False, **options), whole[3:150])


def test_batch_mates_do_not_matter_to_attention(device: str, half: torch.dtype):
    p = paged([1, 37, 1, 5], [190, 90, 64, 129], heads=2, kv_heads=1, dim=64, dtype=half, device=device)
    together = {apart: attend(p, apart=apart) for apart in (False, True)}
    assert torch.equal(*together.values())
    for b in range(4):
        rows = slice(int(p.q_start[b]), int(p.q_start[b + 1]))
        alone = Paged(
            p.q[rows], p.k_cache, p.v_cache, p.table[b : b + 1], p.q_start[b : b + 2] - p.q_start[b], p.kv_len[b : b + 1],
            p.pos[rows].contiguous(), p.write, p.keys, p.values,
        )  # fmt: skip
        for apart in (False, True):
            assert torch.equal(attend(alone, apart=apart), together[False][rows]), (b, apart)


def test_parts_must_be_whole_blocks(device: str):
    p = paged([1], [20], heads=4, kv_heads=2, dim=64, device=device)
    with pytest.raises(ValueError, match="whole blocks"):
        attend(p, apart=False, split_len=40)
    with pytest.raises(ValueError, match="with sums"):
        space = workspace(1, 4, 64, 1, p.q.device)
        attention(
            p.q, p.k_cache, p.v_cache, p.q, **p.arrays, scale=1.0, max_q=1, split_len=paged_attention.INVARIANT.block_n,
            space=space,
        )  # fmt: skip
