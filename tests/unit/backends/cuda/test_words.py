"""Four-bit matrices in tiles of words: their packing, and the products with them, against numbers written out in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from quire.backends.cuda.kernels.grouped import add_shares
from quire.backends.cuda.kernels.grouped_words import Block, block_of, grouped_words
from quire.backends.cuda.kernels.route import place
from quire.backends.cuda.kernels.skinny import Shape
from quire.backends.cuda.kernels.words_product import words_product
from quire.backends.torch.words import IntWords, MxWords
from tests.unit.backends.cuda.paged import error

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def on(w: Any, device: str) -> Any:
    moved = {f.name: getattr(w, f.name) for f in fields(w)}
    return replace(w, **{name: t.to(device) for name, t in moved.items() if isinstance(t, torch.Tensor)})


def mx(n: int, k: int, seed: int = 0, around: int = 120) -> tuple[MxWords, torch.Tensor]:
    """A matrix of every code, and its numbers."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    exponents = torch.randint(around - 4, around + 5, (n, k // 32), generator=g).to(torch.uint8)
    w = MxWords.empty(n, k, torch.device("cpu"))
    w.keep(codes, exponents)
    return w, VALUES[codes.long()] * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)


def integers(n: int, k: int, group: int, seed: int = 0) -> tuple[IntWords, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    scale = (torch.rand(n, k // group, generator=g) * 0.1 + 0.01).half()
    zero = (-8.0 * scale.float() + torch.randn(n, k // group, generator=g) * 0.05).half()
    w = IntWords.empty(n, k, group, torch.device("cpu"))
    w.keep(codes, scale, zero)
    wide = (t.double().repeat_interleave(group, 1) for t in (scale, zero))
    return w, codes.double() * next(wide) + next(wide)


@pytest.mark.parametrize("k", [32, 128, 160, 256])
def test_what_is_packed_comes_back(k: int):
    ids = torch.tensor([127, 0, 64, 3, 3])
    w, dense = mx(128, k, around=64)
    assert torch.equal(w.dequantize().double(), dense) and torch.equal(w.take(ids).double(), dense[ids])
    assert torch.equal(w.rows(64, 128).dequantize().double(), dense[64:])
    assert w.shape == (128, k)
    for group in (32, 64, 128) if k % 128 == 0 else ():
        w, dense = integers(128, k, group)
        near = dense.float()
        assert torch.allclose(w.dequantize(), near, rtol=1e-6, atol=1e-6) and w.shape == (128, k)
        assert torch.equal(w.take(ids), w.dequantize()[ids])
        assert torch.equal(w.rows(64, 128).dequantize(), w.dequantize()[64:])


def test_the_largest_and_the_smallest_exponent():
    w = MxWords.empty(64, 64, torch.device("cpu"))
    codes = torch.arange(64 * 64).view(64, 64).remainder(16).to(torch.uint8)
    exponents = torch.tensor([[1, 192]], dtype=torch.uint8).expand(64, 2)
    w.keep(codes, exponents)
    want = VALUES[codes.long()] * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(w.dequantize().double(), want)
    w.keep(codes, torch.full_like(exponents, 255))
    assert not w.dequantize()[:, 1].isfinite().any()


def test_numbers_become_the_nearest():
    g = torch.Generator().manual_seed(5)
    w = torch.randn(64, 96, generator=g) * 0.02
    w[0] = 0.0
    held = MxWords.empty(64, 96, torch.device("cpu"))
    held.fill(w)
    peak = w.view(64, 3, 32).abs().amax(-1).clamp(min=1e-30).double()
    step = torch.exp2(torch.floor(torch.log2(peak)) - 2).repeat_interleave(32, 1)
    away = (w.double()[..., None] / step[..., None] - VALUES).abs()
    assert torch.allclose((w.double() - held.dequantize().double()).abs() / step, away.amin(-1), atol=1e-6)
    whole = IntWords.empty(64, 128, 64, torch.device("cpu"))
    w = torch.randn(64, 128, generator=g)
    whole.fill(w)
    spread = (w.view(64, 2, 64).amax(-1) - w.view(64, 2, 64).amin(-1)) / 15
    assert ((whole.dequantize() - w).abs() <= spread.repeat_interleave(64, 1) * 0.51 + 2e-3).all()


def test_rows_are_whole_tiles():
    with pytest.raises(ValueError, match="whole tiles"):
        mx(128, 32)[0].rows(0, 32)


@pytest.mark.parametrize(
    "m, n, k, group", [(1, 64, 256, 128), (5, 128, 128, 32), (19, 192, 256, 64), (40, 64, 384, 128)]
)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_product_with_integers(m: int, n: int, k: int, group: int, splits: int, half: torch.dtype, device: str):
    w, dense = integers(n, k, group)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(half)
    residual, bias = (torch.randn(s, generator=torch.Generator().manual_seed(2)).to(half) for s in ((m, n), (n,)))
    want = x.double() @ dense.T
    w, x, residual, bias, want = on(w, device), x.to(device), residual.to(device), bias.to(device), want.to(device)
    part = torch.full((splits, m, n), float("nan"), device=device)
    shape = Shape(64, 0, 4, 2, splits=splits)
    y = torch.full((m, n), float("nan"), dtype=half, device=device)
    words_product(x, w, y, shape, rows=16, part=part)
    assert error(y, want) < 5e-3
    words_product(x, w, y, shape, rows=16, part=part, residual=residual, bias=bias)
    assert error(y, want + residual.double() + bias.double()) < 5e-3


@pytest.mark.parametrize("gelu", [False, True])
def test_gate_and_up_in_one_product(gelu: bool, half: torch.dtype, device: str):
    w, dense = integers(128 + 128, 128, 128)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).to(half).to(device)
    y = torch.full((3, 128), float("nan"), dtype=half, device=device)
    words_product(x, on(w, device), y, Shape(64, 0, 4, 2), rows=16, act="geglu" if gelu else "swiglu")
    gate, up = (x.double() @ dense.T.to(device)).chunk(2, 1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * torch.sigmoid(gate)
    assert error(y, act * up) < 1e-2


def experts(ids: list[int], count: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = torch.tensor(ids, dtype=torch.int32, device=device)
    order, starts = torch.empty_like(chosen), torch.empty(count + 1, dtype=torch.int32, device=device)
    place(chosen, order, starts)
    return chosen.long(), order, starts


@pytest.mark.parametrize("block", [Block(16, 64, 4, 2), Block(16, 128, 4, 2), Block(16, 64, 4, 2, splits=3)], ids=str)
@pytest.mark.parametrize("k, biased", [(256, False), (160, True)])
def test_pairs_and_their_experts(block: Block, k: int, biased: bool, half: torch.dtype, device: str):
    """One expert has more than a block holds, one has none; the last tile of k is cut off, as is the last of 192 channels."""
    n, ids = 192, [1] * 20 + [0, 3, 3]
    w, dense = mx(4 * n, k)
    bias = torch.randn(4, n, generator=torch.Generator().manual_seed(3)).to(device) if biased else None
    chosen, order, starts = experts(ids, 4, device)
    x = torch.randn(len(ids), k, generator=torch.Generator().manual_seed(1)).to(half).to(device)
    want = torch.einsum("pk,pnk->pn", x.double(), dense.to(device).view(4, n, k)[chosen])
    want = want if bias is None else want + bias.double()[chosen]
    shape = (len(ids), n) if block.splits == 1 else (block.splits, len(ids), n)
    kind = half if block.splits == 1 else torch.float32
    y = torch.full(shape, float("nan"), dtype=kind, device=device)
    grouped_words(x[order.long()], on(w, device), y, order, starts, bias=bias, block=block)
    assert error(y if block.splits == 1 else y.sum(0), want) < 5e-3
    if block.splits == 1:
        grouped_words(x, on(w, device), y, order, starts, top=1, bias=bias, block=block)
        assert error(y, want[order.long()]) < 5e-3
    else:
        out = torch.empty(len(ids), n, dtype=half, device=device)
        add_shares(y, torch.full((len(ids), 1), 0.5, device=device), out)
        assert error(out, want / 2) < 5e-3


@pytest.mark.parametrize("limit", [None, 1.5])
def test_gated_experts(limit: float | None, half: torch.dtype, device: str):
    n, k = 128, 160
    w, dense = mx(3 * 2 * n, k, around=123)
    bias = torch.randn(3, 2 * n, generator=torch.Generator().manual_seed(3)).to(device)
    chosen, order, starts = experts([2, 0, 0, 2], 3, device)
    x = torch.randn(2, k, generator=torch.Generator().manual_seed(1)).to(half).to(device)
    y = torch.full((4, n), float("nan"), dtype=half, device=device)
    grouped_words(
        x, on(w, device), y, order, starts, top=2, gated=True, limit=limit, bias=bias, block=Block(16, 64, 4, 2)
    )
    both = torch.einsum("pk,pnk->pn", x.double().repeat_interleave(2, 0), dense.to(device).view(3, 2 * n, k)[chosen])
    gate, up = (both + bias.double()[chosen]).chunk(2, 1)
    if limit is None:
        want = gate * torch.sigmoid(gate) * up
    else:
        gate = gate.clamp(max=limit)
        want = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-limit, limit) + 1)
    assert error(y, want[order.long()]) < 1e-2


def test_blocks_and_operands(device: str, half: torch.dtype):
    assert [block_of(p, 32, 4).rows for p in (4, 64, 256, 1024, 4096, 32768)] == [8, 8, 16, 32, 64, 128]
    assert [block_of(p, 32, 4).splits for p in (4, 16, 20)] == [4, 4, 1] and block_of(4, 32, 4, gated=True).splits == 1
    few = Block(16, 64, 4, 2)
    w = on(mx(128, 128)[0], device)
    x, y = torch.zeros(2, 128, dtype=half, device=device), torch.zeros(2, 64, dtype=half, device=device)
    _, order, starts = experts([0, 1], 2, device)
    with pytest.raises(ValueError, match="into"):
        grouped_words(x, w, y[:1], order, starts, top=1, block=few)
    with pytest.raises(ValueError, match="pairs"):
        grouped_words(x, w, y, order, starts, top=2, block=few)
    with pytest.raises(ValueError, match="parts"):
        grouped_words(x, w, y, order, starts, block=Block(16, 64, 4, 2, splits=2))
    with pytest.raises(ValueError, match="into"):
        words_product(x, on(integers(64, 256, 128)[0], device), y, Shape(64, 0, 4, 2), rows=16)
