"""Products with quantized weights against float64: every kind, every class of row counts, and all that is fused with them.

The oracle multiplies the dequantized numbers, with rows rounded where a kernel rounds them; so what is left is the
rounding of sums and of the result, and bounds are those of half floats.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.backends.cases import NO_KV
from quire.backends.choose import open_backend
from quire.backends.cuda import products
from quire.backends.cuda.kernels.expand import expand
from quire.backends.cuda.kernels.int8 import int8_product
from quire.backends.cuda.ops import CudaKernels
from quire.backends.cuda.products import Rows, Unnormed, count
from quire.backends.elementwise import SWIGLU
from quire.backends.torch.quantized import E4M3, Mixed, Scaled, Weight, encode, tensors
from quire.backends.torch.weights import Weights
from quire.layouts import Layout
from quire.observe.errors import Unsupported
from tests.unit.backends.cuda.paged import error
from tests.unit.backends.test_conformance import WEIGHTS

KINDS = ("fp8", "int8", "int4", "keep")
ROWS = (1, 3, 17, 65)  # one of each path; tests/gpu has more, and larger


def kernels(half: torch.dtype, device: str) -> CudaKernels:
    return CudaKernels(NO_KV, torch.device(device), half)


def weight(kind: str, n: int, k: int, half: torch.dtype, device: str, seed: int = 0) -> Weight:
    rng = np.random.default_rng([n, k, seed])
    if kind == "mixed":  # as some files have it: four bits, and one matrix of a product in full
        layouts: list[Layout] = [WEIGHTS["q4_1"](n - n // 3, k, rng), WEIGHTS["q8_0"](n // 3, k, rng)]
    else:
        layouts = [WEIGHTS["q4_0" if kind == "keep" else "f32"](n, k, rng)]
    made = Weights(torch.device(device), half, quantize="keep" if kind == "mixed" else kind)
    made.load([layouts], products={id(w) for w in layouts})
    whole = made.joined(layouts)
    assert whole is not None and not isinstance(whole, torch.Tensor)
    return whole


def exact(weight: Weight) -> torch.Tensor:
    return (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).double()


def rows_of(m: int, k: int, half: torch.dtype, device: str) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))
    x[0, 1] = 9.0  # a row's largest number decides how the others are rounded
    return x.to(half).to(device)


def as_multiplied(x: torch.Tensor, kind: str, n: int) -> torch.Tensor:
    """Rows as the product of that kind sees them."""
    m, k = x.shape
    dtype = None
    if kind == "fp8" and (16 < m <= 64 or (m > 64 and n % 16 == k % 16 == 0)):
        dtype = E4M3
    if kind == "int8" and m > 64 and n % 8 == k % 8 == 0:
        dtype = torch.int8
    if dtype is None:
        return x.double()
    codes, scale = encode(x, dtype)
    return codes.double() * scale.double()[:, None]


def bound(half: torch.dtype) -> float:
    """Of ||error|| / ||result||: half a step of the result's type is the most, twice that is granted for the sums."""
    return 2.0 * torch.finfo(half).eps


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("m", ROWS)
def test_products(kind: str, m: int, half: torch.dtype, device: str):
    k = kernels(half, device)
    for n, width in ((80, 192), (50, 64)):  # the second is no matrix for a library
        w = weight(kind, n, width, half, device)
        assert isinstance(w, Mixed) == (kind == "mixed")
        x = rows_of(m, width, half, device)
        bias = torch.randn(n, device=device).to(half)
        want = as_multiplied(x, kind, n) @ exact(w).T
        got = k.linear(x, w, bias)
        assert got.shape == want.shape and got.dtype == half
        assert error(got, want + bias.double()) < bound(half), (n, width)
        wide = k.logits(x, w, None)
        assert wide.dtype == torch.float32 and error(wide, want) < bound(half)


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("m", ROWS)
def test_gates(kind: str, m: int, half: torch.dtype, device: str):
    k, n, width = kernels(half, device), 48, 128
    w = weight(kind, 2 * n, width, half, device)
    x, bias = rows_of(m, width, half, device), torch.randn(2 * n, device=device).to(half)
    seen = as_multiplied(x, kind, 2 * n) @ exact(w).T
    for b in (None, bias):
        gate, up = (seen if b is None else seen + b.double()).chunk(2, 1)
        want = gate * torch.sigmoid(gate) * up
        # Gate and up are each rounded before they meet where the product stands alone; both errors are the result's.
        assert error(k.gated(x, w, b, SWIGLU), want) < 2 * bound(half)
    reader = weight("fp8", 64, n, half, device)
    handed = k.gated(x, w, None, SWIGLU, soon=(reader,))
    gate, up = seen.chunk(2, 1)
    want = gate * torch.sigmoid(gate) * up
    if m > 64 or (m > 16 and kind == "mixed"):  # the gate is a kernel of its own
        assert isinstance(handed, Rows) and count(handed) == m
        assert fp8_of(handed, want)
        codes = handed.codes.double() * handed.scale.double()[:, None]
        assert error(k.linear(handed, reader, None), codes @ exact(reader).T) < bound(half)
    else:
        assert isinstance(handed, torch.Tensor) and error(handed, want) < 2 * bound(half)


def fp8_of(rows: Rows, want: torch.Tensor) -> bool:
    """Each number within half a step of e4m3, and a little for the rounding before it."""
    got = rows.codes.double() * rows.scale.double()[:, None]
    smallest = rows.scale.double()[:, None] * 2.0**-10
    slack = want.abs().amax(1, keepdim=True) * 4e-3
    return bool(((got - want).abs() <= want.abs() * 2.0**-4 + smallest + slack).all())


@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_residuals_and_norms(kind: str, m: int, biased: bool, half: torch.dtype, device: str):
    k, n, width = kernels(half, device), 96, 64
    w = weight(kind, n, width, half, device)
    x, residual = rows_of(m, width, half, device), rows_of(m, n, half, device)
    gain = torch.rand(n, device=device) + 0.5
    bias = torch.randn(n, device=device).to(half) if biased else None
    total = residual.double() + as_multiplied(x, kind, n) @ exact(w).T + (0.0 if bias is None else bias.double())
    want = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    kept, normed = k.linear_add_norm(x, w, bias, residual.clone(), gain, 1e-5)
    assert error(kept, total) < bound(half) and error(normed, want) < 2 * bound(half)
    reader = weight("fp8", 48, n, half, device)
    kept, normed = k.linear_add_norm(x, w, bias, residual.clone(), gain, 1e-5, soon=(reader,))
    assert error(kept, total) < bound(half)
    mixed_readers = k.linear_add_norm(x, w, bias, residual.clone(), gain, 1e-5, soon=(reader, w))[1]
    if m == 1 and isinstance(w, Scaled):  # the product that reads it takes the norm along
        assert isinstance(normed, Unnormed) and isinstance(mixed_readers, Unnormed)
        assert error(k.linear(normed, reader, None), want @ exact(reader).T) < 2 * bound(half)
    else:
        assert isinstance(normed, Rows) and fp8_of(normed, want)
        assert isinstance(mixed_readers, torch.Tensor if kind != "fp8" else Rows)


def test_a_gain_is_narrowed_only_where_that_is_exact(half: torch.dtype, device: str):
    k, x = kernels(half, device), rows_of(1, 64, half, device)
    reader = weight("fp8", 48, 64, half, device)
    gain = (torch.rand(64, device=device) + 0.5).to(half).float()
    made = k.rms_norm(x, gain, 1e-5, soon=(reader,))
    assert isinstance(made, Unnormed) and made.gain.dtype == half
    again = k.rms_norm(x, gain, 1e-5, soon=(reader,))
    assert isinstance(again, Unnormed) and again.gain is made.gain
    odd = gain.clone()
    odd[5] += 2.0**-20  # one number that half a float cannot hold
    kept = k.rms_norm(x, odd, 1e-5, soon=(reader,))
    assert isinstance(kept, Unnormed) and kept.gain is odd


@pytest.mark.parametrize("m", [1, 17, 65])
def test_a_norm_is_made_for_its_readers(m: int, half: torch.dtype, device: str):
    k, x = kernels(half, device), rows_of(m, 64, half, device) * 3
    gain = torch.rand(64, device=device) + 0.5
    want = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    eight = weight("fp8", 50, 64, half, device)  # 50: no library takes such a matrix, and the rows are fp8 already
    made = k.rms_norm(x, gain, 1e-5, soon=(eight, eight))
    if m == 1:
        assert isinstance(made, Unnormed)
        codes = want
    else:
        assert isinstance(made, Rows) and fp8_of(made, want)
        codes = made.codes.double() * made.scale.double()[:, None]
    for product in (k.linear(made, eight, None), k.logits(made, eight, None)):
        assert error(product, codes @ exact(eight).T) < 2 * bound(half)
    four = weight("int4", 48, 64, half, device)
    for soon in ((), (four,), (eight, four)):
        plain = k.rms_norm(x, gain, 1e-5, soon=soon)
        assert isinstance(plain, torch.Tensor) and error(plain, want) < bound(half)


def test_parts_are_left_to_attention(half: torch.dtype, device: str):
    k = kernels(half, device)
    for kind in KINDS:
        w = weight(kind, 80, 192, half, device)
        x = rows_of(5, 192, half, device)
        parts = k.linear(x, w, None, loose=True)
        assert parts.dim() == 3
        assert error(parts.double().sum(0), as_multiplied(x, kind, 80) @ exact(w).T) < bound(half)


def test_bf16_rows_meet_fp8_weights_as_half_floats(device: str):
    """A bf16 row may hold what float16 cannot; the interpreter knows no bf16 products, and needs none here."""
    k = kernels(torch.bfloat16, device)
    w = weight("fp8", 40, 128, torch.bfloat16, device)
    x = rows_of(4, 128, torch.bfloat16, device)
    x[1] *= 60_000.0  # 540,000 at its largest
    x[2] *= 1e-3
    want = x.double() @ exact(w).T
    out = torch.empty(4, 40, dtype=torch.float32, device=device)
    products.few_rows(k._place, x, w, None, out=out)  # type: ignore[arg-type]
    for row in (0, 1, 3):
        assert error(out[row], want[row]) < 1e-4
    assert error(out[2], want[2]) < 1e-2  # a sixteenth of a thousandth: half floats thin out there


@pytest.mark.parametrize("kind", KINDS)
def test_expand(kind: str, half: torch.dtype, device: str):
    w = weight(kind, 37, 192, half, device)
    assert not isinstance(w, torch.Tensor | Mixed)
    out = torch.empty(37, 192, dtype=half, device=device)
    expand(w, out)
    assert torch.equal(out, w.dequantize().to(half))
    part = w.rows(3, 20)
    expand(part, out[:17])
    assert torch.equal(out[:17], w.dequantize()[3:20].to(half))
    with pytest.raises(ValueError, match="into"):
        expand(w, out[:5])


def test_a_matrix_is_written_out_in_parts(half: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(products, "_SCRATCH", 13 * 192)
    k, w = kernels(half, device), weight("int4", 50, 192, half, device)
    x, bias = rows_of(70, 192, half, device), torch.randn(50, device=device).to(half)
    want = x.double() @ exact(w).T
    assert error(k.linear(x, w, bias), want + bias.double()) < bound(half)
    assert error(k.logits(x, w, None), want) < bound(half)


def test_int8_products_in_parts(half: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch):
    from quire.backends.cuda.kernels import int8

    monkeypatch.setattr(int8, "_ROWS", 32)
    w = weight("int8", 48, 64, half, device)
    x = rows_of(70, 64, half, device)
    y = torch.full((70, 96), 7.0, dtype=half, device=device)
    int8_product(x, *tensors(w), y[:, :48])  # into columns of a wider matrix
    assert error(y[:, :48], as_multiplied(x, "int8", 48) @ exact(w).T) < bound(half) and (y[:, 48:] == 7.0).all()
    x[3, 5] = float("nan")
    int8_product(x, *tensors(w), y[:, :48])
    assert y[3, :48].isnan().all() and not y[2, :48].isnan().any()
    with pytest.raises(ValueError, match="int8 product"):
        int8_product(x[:16], *tensors(w), y[:16, :48])


@pytest.mark.parametrize("m", [3, 17, 65])
def test_what_is_no_number_stays_none(m: int, half: torch.dtype, device: str):
    """Rounding rows must not hide what went wrong before it."""
    k = kernels(half, device)
    for kind in ("fp8", "int8", "int4"):
        w = weight(kind, 48, 64, half, device)
        x = rows_of(m, 64, half, device)
        x[1, 7] = float("nan")
        y = k.linear(k.rms_norm(x, torch.ones(64, device=device), 1e-5, soon=(w,)), w, None)
        assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any(), kind


def test_float32_rows_use_the_exact_path(device: str):
    k = kernels(torch.float32, device)
    for kind in (*KINDS, "mixed"):
        w = weight(kind, 48, 64, torch.float32, device)
        x = torch.randn(9, 64, device=device)
        want = x.double() @ exact(w).T
        tolerance = 2e-3 if device == "cuda" else 1e-6  # tensor cores may round float32 to eleven bits
        for got in (k.linear(x, w, None), k.logits(x, w, None)):
            assert error(got, want) < tolerance
        gate, up = want.chunk(2, 1)
        assert error(k.gated(x, w, None, SWIGLU, soon=(w,)), gate * torch.sigmoid(gate) * up) < tolerance


def test_the_device_decides(monkeypatch: pytest.MonkeyPatch):
    """A GPU without fp8 says so, and what to do."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "An old one")
    monkeypatch.setattr("quire.backends.torch.backend.pick_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr("quire.backends.torch.backend.Weights", lambda *_, **__: SimpleNamespace())
    with pytest.raises(Unsupported, match="An old one has no fp8"):
        open_backend("cuda", quantize="fp8")
    old = open_backend("cuda", quantize="int8")
    assert old.kv_dtypes == ("f16", "int8") and not old.weights.float8  # type: ignore[attr-defined]
