"""4-bit affine products against float64, and the packing against itself."""

from __future__ import annotations

import pytest
import torch

from quire.backends.cuda.kernels.int4 import int4_product, pack, unpack
from quire.backends.cuda.kernels.skinny import Shape
from quire.backends.torch.quantized import Int4
from tests.unit.backends.cuda.paged import error


def quantized(n: int, k: int, group: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    scale = torch.rand(k // group, n, generator=g) * 0.1 + 0.01
    zero = -8.0 * scale + torch.randn(k // group, n, generator=g) * 0.05
    dense = codes.double() * scale.T.repeat_interleave(group, 1).double() + zero.T.repeat_interleave(group, 1).double()
    return codes.to(device), scale.to(device), zero.to(device), dense.to(device)


@pytest.mark.parametrize("m, n, k, group", [(1, 40, 256, 32), (5, 33, 128, 64), (16, 64, 512, 128)])
@pytest.mark.parametrize("splits, swap", [(1, False), (2, False), (1, True)])
def test_product(m: int, n: int, k: int, group: int, splits: int, swap: bool, half: torch.dtype, device: str):
    codes, scale, zero, dense = quantized(n, k, group, device)
    packed = pack(codes, group)
    assert torch.equal(unpack(packed, group), codes)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(half).to(device)
    residual = torch.randn(m, n, device=device).to(half)
    want = x.double() @ dense.T
    y = torch.full((m, n), float("nan"), dtype=half, device=device)
    shape, part = Shape(16, 0, 1, 1, splits=splits, swap=swap), torch.empty(splits, m, n, device=device)
    int4_product(x, packed, scale, zero, y, shape, group=group, part=part)
    assert error(y, want) < 5e-3
    int4_product(x, packed, scale, zero, y, shape, group=group, part=part, residual=residual)
    assert error(y, want + residual.double()) < 5e-3


def test_swiglu(half: torch.dtype, device: str):
    codes, scale, zero, dense = quantized(2 * 24, 128, 32, device)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).to(half).to(device)
    y = torch.empty(3, 24, dtype=half, device=device)
    int4_product(x, pack(codes, 32), scale, zero, y, Shape(16, 0, 1, 1), group=32, act="swiglu")
    gate, up = (x.double() @ dense.T).chunk(2, 1)
    assert error(y, gate * torch.sigmoid(gate) * up) < 1e-2


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="whole pairs"):
        pack(torch.zeros(4, 96, dtype=torch.uint8), 32)
    with pytest.raises(ValueError, match="int4 product"):
        int4_product(
            torch.zeros(1, 128), torch.zeros(8, 64, dtype=torch.uint8), torch.zeros(8, 4), torch.zeros(8, 4),
            torch.zeros(1, 8), Shape(16, 0, 1, 1), group=32,
        )  # fmt: skip


def test_rows_of_a_larger_matrix(device: str, half: torch.dtype):
    """A part of several that lie together: its scales are columns of theirs."""
    whole = Int4.empty(96, 64, 32, torch.device(device))
    whole.fill(torch.randn(96, 64, device=device))
    part, x = whole.rows(32, 80), torch.randn(3, 64, device=device).to(half)
    y = torch.empty(3, 48, dtype=torch.float32, device=device)
    int4_product(x, part.packed, part.scale, part.zero, y, Shape(64, 0, 4, 2, swap=True), group=32)
    want = x.float() @ part.dequantize().T
    assert float((y - want).norm() / want.norm()) < 2e-3
