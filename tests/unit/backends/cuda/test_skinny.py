"""Skinny products against float64: rows, odd shapes, splits, prologue and epilogues, fp8 weights."""

from __future__ import annotations

import pytest
import torch

from quire.backends.cuda.kernels.skinny import Shape, skinny
from tests.unit.backends.cuda.paged import error

DOT = Shape(16, 32, 1, 2)
SWAP = Shape(64, 32, 1, 2, swap=True)
SPLIT = Shape(16, 32, 1, 2, splits=3)
ROW = Shape(8, 64, 1, 1, dot=False)
AHEAD = Shape(8, 64, 1, 1, dot=False, ahead=True)
EARLY = Shape(64, 32, 4, 2, splits=3, swap=True, early=64)


def weights(n: int, k: int, m: int, half: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n * k + m)
    x, w = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g) * k**-0.5
    return x.to(half).to(device), w.to(half).to(device)


@pytest.mark.parametrize("shape", [DOT, SWAP, SPLIT, ROW, AHEAD])
@pytest.mark.parametrize("m, n, k", [(1, 40, 128), (1, 33, 100), (5, 48, 96), (16, 70, 130)])
def test_product_bias_and_residual(shape: Shape, m: int, n: int, k: int, half: torch.dtype, device: str):
    if not shape.dot and m > 1:
        with pytest.raises(ValueError, match="one row"):
            skinny(torch.zeros(m, k), torch.zeros(n, k), torch.zeros(m, n), shape)
        return
    x, w = weights(n, k, m, half, device)
    bias, residual = torch.randn(n, device=device).to(half), torch.randn(m, n, device=device).to(half)
    part = torch.empty(shape.splits, m, n, device=device)
    y = torch.full((m, n), float("nan"), dtype=half, device=device)
    skinny(x, w, y, shape, part=part)
    want = x.double() @ w.double().T
    assert error(y, want) < 5e-3
    skinny(x, w, y, shape, bias=bias, residual=residual, part=part)
    assert error(y, want + bias.double() + residual.double()) < 5e-3
    skinny(x, w, residual, shape, residual=residual, part=part)  # in place
    assert error(residual, y.double() - bias.double()) < 1e-2


@pytest.mark.parametrize("m, n", [(1, 64), (5, 70), (16, 130)])
def test_columns_loaded_early_are_in_the_sum(m: int, n: int, half: torch.dtype, device: str):
    x, w = weights(n, 384, m, half, device)  # parts of 128: 64 of them in steps, 64 early
    part = torch.empty(3, m, n, device=device)
    skinny(x, w, torch.empty(m, n, dtype=half, device=device), EARLY, part=part, add_parts=False)
    for i in range(3):
        own = slice(128 * i, 128 * (i + 1))
        assert error(part[i], x[:, own].double() @ w[:, own].double().T) < 1e-5
    bias, residual = torch.randn(n, device=device).to(half), torch.randn(m, n, device=device).to(half)
    y = torch.full((m, n), float("nan"), dtype=half, device=device)
    skinny(x, w, y, EARLY, bias=bias, residual=residual, part=part)
    assert error(y, x.double() @ w.double().T + bias.double() + residual.double()) < 5e-3


@pytest.mark.parametrize("shape, m", [(DOT, 7), (SWAP, 7), (SWAP, 1), (ROW, 1), (Shape(4, 32, 1, 1, dot=False), 1)])
def test_swiglu_and_norm(shape: Shape, m: int, half: torch.dtype, device: str):
    x, w = weights(2 * 24, 160, m, half, device)
    y = torch.full((m, 24), float("nan"), dtype=half, device=device)
    skinny(x, w, y, shape, act="swiglu")
    gate, up = (x.double() @ w.double().T).chunk(2, 1)
    assert error(y, gate * torch.sigmoid(gate) * up) < 1e-2
    x *= 5.0
    gain = (torch.rand(160, device=device) + 0.5).to(half)
    if shape.dot:
        with pytest.raises(ValueError, match="normalize first"):
            skinny(x, w, y, shape, norm=gain, eps=1e-5, act="swiglu")
        return
    skinny(x, w, y, shape, norm=gain, eps=1e-5, act="swiglu")
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    gate, up = (normed @ w.double().T).chunk(2, 1)
    assert error(y, gate * torch.sigmoid(gate) * up) < 1e-2


@pytest.mark.parametrize("k", [64, 192, 160])  # one step, several, and one that ends within
@pytest.mark.parametrize("shape", [ROW, AHEAD])
def test_norm_on_the_way_in(shape: Shape, k: int, half: torch.dtype, device: str):
    x, w = weights(20, k, 1, half, device)
    x, gain = 5.0 * x, torch.rand(k, device=device) + 0.5  # float32, as models have it
    y = torch.full((1, 20), float("nan"), dtype=half, device=device)
    skinny(x, w, y, shape, norm=gain, eps=1e-5)
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    assert error(y, normed @ w.double().T) < 1e-2


def test_parts_can_be_left_to_the_reader(half: torch.dtype, device: str):
    x, w = weights(40, 192, 3, half, device)
    part = torch.full((3, 3, 40), float("nan"), device=device)
    y = torch.full((3, 40), 9.0, dtype=half, device=device)
    skinny(x, w, y, SPLIT, part=part, add_parts=False)
    assert (y == 9.0).all() and error(part.sum(0), x.double() @ w.double().T) < 1e-3


@pytest.mark.parametrize("shape", [DOT, SWAP, SPLIT, ROW, AHEAD])
def test_fp8_weights(shape: Shape, half: torch.dtype, device: str):
    x, w = weights(40, 128, 1, half, device)
    scale = w.float().abs().amax(1) / 448.0
    w8 = (w.float() / scale[:, None]).to(torch.float8_e4m3fn)
    y = torch.full((1, 40), float("nan"), dtype=half, device=device)
    skinny(x, w8, y, shape, w_scale=scale, part=torch.empty(3, 1, 40, device=device))
    assert error(y, x.double() @ (w8.double() * scale.double()[:, None]).T) < 5e-3


@pytest.mark.parametrize("shape", [DOT, SWAP, SPLIT])
def test_fp8_weights_and_rows(shape: Shape, half: torch.dtype, device: str):
    x, w = weights(40, 192, 5, half, device)
    xs, ws = x.float().abs().amax(1) / 448.0, w.float().abs().amax(1) / 448.0
    x8, w8 = (x.float() / xs[:, None]).to(torch.float8_e4m3fn), (w.float() / ws[:, None]).to(torch.float8_e4m3fn)
    y = torch.full((5, 40), float("nan"), dtype=half, device=device)
    skinny(x8, w8, y, shape, w_scale=ws, x_scale=xs, part=torch.empty(3, 5, 40, device=device))
    assert error(y, (x8.double() * xs.double()[:, None]) @ (w8.double() * ws.double()[:, None]).T) < 5e-3


def test_fp8_swiglu_scales_both_halves(half: torch.dtype, device: str):
    x, w = weights(2 * 20, 64, 1, half, device)
    scale = torch.rand(40, device=device) + 0.5
    w8 = w.float().to(torch.float8_e4m3fn)
    gate, up = (x.double() @ (w8.double() * scale.double()[:, None]).T).chunk(2, 1)
    for shape in (DOT, ROW):
        y = torch.empty(1, 20, dtype=half, device=device)
        skinny(x, w8, y, shape, w_scale=scale, act="swiglu")
        assert error(y, gate * torch.sigmoid(gate) * up) < 1e-2


def test_a_row_is_the_same_in_any_company(half: torch.dtype, device: str):
    x, w = weights(40, 384, 9, half, device)
    for shape in (DOT, SPLIT, EARLY):
        part = torch.empty(3, 9, 40, device=device)
        whole, one = torch.empty(9, 40, dtype=half, device=device), torch.empty(1, 40, dtype=half, device=device)
        skinny(x, w, whole, shape, part=part)
        skinny(x[4:5], w, one, shape, part=part)
        assert torch.equal(whole[4:5], one)


def test_what_cannot_be_done_is_refused(half: torch.dtype):
    x, w, y = torch.zeros(2, 64), torch.zeros(32, 64), torch.zeros(2, 32)
    with pytest.raises(ValueError, match="skinny product"):
        skinny(x, w, torch.zeros(2, 31), DOT)
    with pytest.raises(ValueError, match="ahead for one row"):
        skinny(x[:1], w, torch.zeros(1, 16), AHEAD, act="swiglu")
    with pytest.raises(ValueError, match="split sum"):
        skinny(x, w, y, SPLIT)
    early = Shape(64, 32, 4, 2, splits=2, swap=True, early=64)
    for k in (257, 128, 160):  # parts that differ, nothing left for the steps, half a step
        with pytest.raises(ValueError, match="loaded early"):
            skinny(torch.zeros(2, k), torch.zeros(32, k), y, early, part=torch.zeros(2, 2, 32))
