"""fp8 weights with scales for tiles, kept as a checkpoint has them: loading, products, experts, and what is fused with them.

Weights are written by an independent packer (tests/unit/formats/packers.py) and read from a file; the oracle multiplies its
numbers in float64, with rows rounded to fp8 by a few lines of torch here where a kernel rounds them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire import models
from quire.backends.cases import NO_KV, ragged
from quire.backends.choose import open_backend
from quire.backends.cuda import experts as mixtures
from quire.backends.cuda.kernels.grouped import TILED, grouped
from quire.backends.cuda.kernels.route import place
from quire.backends.cuda.kernels.skinny import Shape
from quire.backends.cuda.kernels.tiled import quantize_groups, tiled_product
from quire.backends.cuda.kernels.tuning import TILED_MANY, TILED_ROWS, tiled_many, tiled_shape
from quire.backends.cuda.ops import CudaKernels
from quire.backends.cuda.tiles import GroupedRows
from quire.backends.elementwise import GEGLU, SWIGLU
from quire.backends.torch import experts as plain
from quire.backends.torch.quantized import E4M3, Mixed, Tiled
from quire.backends.torch.weights import Weights
from quire.layouts import Float8, Layout, Routing
from quire.weights.checkpoint import open_checkpoint
from tests.unit.backends.cuda.paged import error
from tests.unit.backends.cuda.test_experts import by_hand
from tests.unit.formats import packers
from tests.unit.formats.test_hub import config, packed, write
from tests.unit.models import folders
from tests.unit.models import mixtures as mixed_models
from tests.unit.models.test_quantized_folders import save

TILES = config("fp8", weight_block_size=[128, 128], activation_scheme="dynamic", fmt="e4m3")
ROWS = (1, 5, 17, 65)  # one of each path; tests/gpu has more, and larger


def layout(n: int, k: int, folder: Path, seed: int = 0) -> tuple[Layout, np.ndarray]:
    """A matrix of a file, and its numbers."""
    rng = np.random.default_rng([n, k, seed])
    w = rng.standard_normal((n, k)).astype(np.float32) * k**-0.5
    w *= np.exp(rng.standard_normal((n, 1)).astype(np.float32))  # tiles must not look alike
    tensors, means = packers.fp8(w, tile=(128, 128), name="weight_scale_inv")
    path = write(folder / f"{n}-{k}-{seed}.safetensors", tensors)
    return packed(path, TILES).read("m.weight"), means


def load(layouts: list[Layout], device: str, half: torch.dtype) -> Weights:
    made = Weights(torch.device(device), half, quantize="keep")
    made.load([layouts], products={id(w) for w in layouts})
    return made


def weight(
    n: int | tuple[int, ...], k: int, folder: Path, device: str, half: torch.dtype
) -> tuple[Tiled, torch.Tensor]:
    """Matrices one below the other as they are kept, and what they mean."""
    parts = [layout(rows, k, folder, at) for at, rows in enumerate((n,) if isinstance(n, int) else n)]
    held = load([w for w, _ in parts], device, half).joined([w for w, _ in parts])
    assert isinstance(held, Tiled)
    return held, torch.from_numpy(np.concatenate([means for _, means in parts])).to(device)


def rows_of(m: int, k: int, half: torch.dtype, device: str) -> torch.Tensor:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m + k))
    x[0, 1] = 9.0  # a group's largest number decides how the others are rounded
    return x.to(half).to(device)


def in_groups(x: torch.Tensor) -> torch.Tensor:
    """x as fp8 holds it, with a scale for each row and 128 columns."""
    out = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for first in range(0, x.shape[1], 128):
        own = x[:, first : first + 128].float()
        scale = own.abs().amax(1, keepdim=True) / 448
        out[:, first : first + 128] = (own / scale).to(E4M3).double() * scale.double()
    return out


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    return in_groups(x) if x.shape[0] > TILED_ROWS else x.double()


def bound(half: torch.dtype) -> float:
    return 2.0 * torch.finfo(half).eps


# ---- weights


def test_codes_and_scales_are_the_files(tmp_path: Path, device: str, half: torch.dtype):
    w, means = weight(300, 320, tmp_path, device, half)  # the last tiles are cut off, in both directions
    assert w.shape == (300, 320) and w.height == 128 and w.scale.shape == (3, 3)
    assert torch.equal(w.dequantize(), means.float())
    assert torch.equal(w.rows(100, 290).dequantize(), means[100:290].float())
    assert torch.equal(w.rows(100, 290).rows(60, 100).dequantize(), means[160:200].float())
    ids = torch.tensor([299, 0, 127, 128, 128], device=device)
    assert torch.equal(w.take(ids), means[ids].float()) and torch.equal(w.rows(50, 300).take(ids - 50 * (ids > 49)), w.take(
        torch.where(ids > 49, ids, ids + 50)
    ))  # fmt: skip


def test_matrices_that_end_within_a_tile_are_joined(tmp_path: Path, device: str, half: torch.dtype):
    w, means = weight((192, 96, 40), 256, tmp_path, device, half)
    assert w.height == 32 and torch.equal(w.dequantize(), means.float())
    w, means = weight((256, 128, 40), 256, tmp_path, device, half)
    assert w.height == 128 and torch.equal(w.dequantize(), means.float())


def test_chunks_of_a_file_need_not_be_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.backends.torch.weights._CHUNK", 50 * 256)
    w, means = weight((192, 300), 256, tmp_path, "cpu", torch.float16)
    assert torch.equal(w.dequantize(), means.float())


def test_rows_that_were_cut_and_copied_are_looked_at(tmp_path: Path):
    """As a model takes the heads of a matrix apart: 192 rows each, of which 128 and 64."""
    whole, means = layout(4 * 192, 256, tmp_path)
    assert isinstance(whole, Float8) and whole.tile == (128, 128)
    heads = np.asarray(whole.data).reshape(4, 192, -1)
    for cut in (slice(0, 128), slice(128, 192)):
        part = replace(whole, data=np.ascontiguousarray(heads[:, cut]).reshape(-1, heads.shape[-1]))
        assert part.tile == (64, 128)
        made = load([part], "cpu", torch.float16)[part]
        assert isinstance(made, Tiled) and made.height == 64
        want = means.reshape(4, 192, -1)[:, cut].reshape(-1, 256)
        assert torch.equal(made.dequantize(), torch.from_numpy(want).float())
    assert replace(whole, data=whole.data[96:400]).tile == (32, 128)
    assert replace(whole, data=whole.data[::2]).tile == (1, 128)
    made = load([odd := replace(whole, data=whole.data[96:400])], "cpu", torch.float16)[odd]
    assert isinstance(made, Tiled) and torch.equal(made.dequantize(), torch.from_numpy(means[96:400]).float())


def test_tiles_of_other_widths_are_plain_numbers(tmp_path: Path):
    tensors, means = packers.fp8(np.ones((64, 256), np.float32), tile=(64, 32), name="weight_scale_inv")
    how = config("fp8", weight_block_size=[64, 32], fmt="e4m3")
    narrow = packed(write(tmp_path / "narrow.safetensors", tensors), how).read("m.weight")
    held = load([narrow], "cpu", torch.float32)[narrow]
    assert isinstance(held, torch.Tensor) and torch.equal(held, torch.from_numpy(means).float())


def test_a_device_without_fp8_keeps_none(tmp_path: Path):
    w, means = layout(64, 256, tmp_path)
    made = Weights(torch.device("cpu"), torch.float32, quantize="keep")
    made.float8 = False
    made.load([[w]], products={id(w)})
    assert torch.equal(made[w], torch.from_numpy(means).float()) and "1 FP8 in tiles" in made.told()[0]  # type: ignore[arg-type]


# ---- rows


@pytest.mark.parametrize("width", [384, 200])
def test_rows_in_groups(width: int, device: str, half: torch.dtype):
    x = rows_of(21, width, half, device)
    made = GroupedRows.of(x)
    assert torch.equal(made.plain(torch.float32).double(), in_groups(x).float().double())
    x[3, 5], x[4] = float("nan"), 0.0
    quantize_groups(x, made.codes, made.scale)
    assert made.codes[3, 5].float().isnan() and (made.codes[4].float() == 0).all()


@pytest.mark.parametrize("width", [256, 320])
def test_norms_and_gates_make_rows_in_groups(width: int, tmp_path: Path, device: str, half: torch.dtype):
    k, (reader, means) = CudaKernels(NO_KV, torch.device(device), half), weight(40, width, tmp_path, device, half)
    x, gain = rows_of(70, width, half, device), torch.rand(width, device=device) + 0.5
    normed = x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    both = rows_of(70, 2 * width, half, device)
    gate, up = both.double().chunk(2, 1)
    for made, want in (
        (k.rms_norm(x, gain, 1e-5, soon=(reader, reader)), normed),
        (k._quantized.gate(both, (reader,), "swiglu"), torch.nn.functional.silu(gate) * up),
    ):
        assert isinstance(made, GroupedRows)
        assert torch.allclose(
            made.plain(torch.float32).double(), in_groups(want), rtol=0.13, atol=1e-6
        )  # a step at most
        assert error(made.plain(torch.float32), in_groups(want)) < 1e-2  # and seldom one
        assert error(k.linear(made, reader, None), made.plain(torch.float32).double() @ means.T) < bound(half)
    few = k.rms_norm(x[:TILED_ROWS], gain, 1e-5, soon=(reader,))
    assert isinstance(few, torch.Tensor) and isinstance(k.rms_norm(x, gain, 1e-5, soon=(reader, x)), torch.Tensor)


# ---- products


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(
    "n, width", [(200, 384), ((64, 32), 320)]
)  # in the second, tiles of 32 rows, and the last columns cut off
def test_products(m: int, n: int | tuple[int, ...], width: int, tmp_path: Path, half: torch.dtype, device: str):
    k, (w, means) = CudaKernels(NO_KV, torch.device(device), half), weight(n, width, tmp_path, device, half)
    x, bias = rows_of(m, width, half, device), torch.randn(w.shape[0], device=device).to(half)
    want = as_multiplied(x) @ means.T
    got = k.linear(x, w, bias)
    assert got.dtype == half and error(got, want + bias.double()) < bound(half)
    wide = k.logits(x, w, None)
    # A GPU adds products of FP8 in fewer bits than a float32 has: 1.3e-4 on an H200.
    assert wide.dtype == torch.float32 and error(wide, want) < (3e-4 if device == "cuda" else 1e-4)
    parts = k.linear(x, w, None, loose=True)
    assert error(parts.double().sum(0) if parts.dim() == 3 else parts, want) < bound(half)
    assert (parts.dim() == 3) == (m <= TILED_ROWS)


@pytest.mark.parametrize("m", ROWS)
def test_residuals_and_gates(m: int, tmp_path: Path, half: torch.dtype, device: str):
    k, (w, means) = CudaKernels(NO_KV, torch.device(device), half), weight((128, 128), 256, tmp_path, device, half)
    x, residual = rows_of(m, 256, half, device), rows_of(m, 256, half, device)
    seen = as_multiplied(x) @ means.T
    gate, up = seen.chunk(2, 1)
    silu, gelu = torch.nn.functional.silu(gate) * up, torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert error(k.gated(x, w, None, SWIGLU), silu) < 2 * bound(half)
    assert error(k.gated(x, w, None, GEGLU), gelu) < 2 * bound(half)
    gain = torch.rand(256, device=device) + 0.5
    total = residual.double() + seen
    want = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * gain.double()
    kept, normed = k.linear_add_norm(x, w, None, residual.clone(), gain, 1e-5)
    assert error(kept, total) < bound(half) and error(normed, want) < 2 * bound(half)
    handed = k.linear_add_norm(x, w, None, residual.clone(), gain, 1e-5, soon=(w,))[1]
    assert isinstance(handed, GroupedRows if m > TILED_ROWS else torch.Tensor)


@pytest.mark.parametrize("high, shape", TILED_MANY)
def test_every_configuration_of_many_rows(high: int, shape: Shape, tmp_path: Path, device: str, half: torch.dtype):
    w, means = weight(150, 256, tmp_path, device, half)
    x = rows_of(140, 256, half, device)
    made, y = GroupedRows.of(x), torch.empty(140, 150, dtype=half, device=device)
    tiled_product(made.codes, w, y, replace(shape, pdl=False), rows=high, x_scale=made.scale)
    assert error(y, in_groups(x) @ means.T) < bound(half)


def test_what_is_chosen():
    """By the shape and the class of rows; the largest tile of which there are enough."""
    for n, rows in ((6144, 2048), (4096, 2048), (28672, 256), (6144, 256)):
        assert tiled_many(n, rows)[0].block_n == 128
    assert tiled_many(4096, 256) == (TILED_MANY[-1][1], 64)
    assert tiled_shape(4096).splits > 1 and tiled_shape(14336, gated=True).splits == 1


def test_mixed_with_other_kinds(tmp_path: Path, half: torch.dtype, device: str):
    tiles, means = layout(96, 256, tmp_path)
    other = load([tiles], device, half)[tiles]
    dense = torch.randn(32, 256, device=device).to(half)
    assert isinstance(other, Tiled)
    mixed, k = Mixed((other, dense)), CudaKernels(NO_KV, torch.device(device), half)
    want = torch.cat([torch.from_numpy(means).to(device), dense.double()])
    assert torch.equal(mixed.dequantize().double(), want.float().double())
    for m in (3, 70):
        x = rows_of(m, 256, half, device)
        seen = torch.cat([as_multiplied(x) @ want[:96].T, x.double() @ want[96:].T], 1)
        assert error(k.linear(x, mixed, None), seen) < bound(half)


@pytest.mark.parametrize("m", [3, 17, 65])
def test_what_is_no_number_stays_none(m: int, tmp_path: Path, half: torch.dtype, device: str):
    k, (w, _) = CudaKernels(NO_KV, torch.device(device), half), weight(48, 256, tmp_path, device, half)
    x = rows_of(m, 256, half, device)
    x[1, 7] = float("nan")
    y = k.linear(k.rms_norm(x, torch.ones(256, device=device), 1e-5, soon=(w,)), w, None)
    assert y[1].isnan().all() and not y[0].isnan().any() and not y[2].isnan().any()


def test_large_bf16_rows(tmp_path: Path, device: str):
    """What a bf16 row may hold and float16 cannot; the interpreter knows no bf16 products, and needs none here."""
    w, means = weight(40, 256, tmp_path, device, torch.bfloat16)
    x, out = rows_of(4, 256, torch.bfloat16, device), torch.empty(4, 40, device=device)
    x[1] *= 60_000.0
    shape = replace(tiled_shape(40), pdl=False, splits=1)
    tiled_product(x, w, out, shape)
    assert max(error(out[row], (x.double() @ means.T)[row]) for row in range(4)) < 1e-4


def test_float32_rows_use_the_exact_path(tmp_path: Path, device: str):
    k, (w, means) = (
        CudaKernels(NO_KV, torch.device(device), torch.float32),
        weight(48, 256, tmp_path, device, torch.float32),
    )
    x = torch.randn(70, 256, device=device)
    tolerance = 2e-3 if device == "cuda" else 1e-6
    assert error(k.linear(x, w, None), x.double() @ means.T) < tolerance
    assert isinstance(k.rms_norm(x, torch.ones(256, device=device), 1e-5, soon=(w,)), torch.Tensor)


def test_shapes_that_do_not_fit_are_refused(tmp_path: Path, device: str, half: torch.dtype):
    w, _ = weight(48, 256, tmp_path, device, half)
    x, y = rows_of(4, 256, half, device), torch.empty(4, 48, dtype=half, device=device)
    with pytest.raises(ValueError, match="tiles"):
        tiled_product(x[:, :128], w, y, Shape(64, 0, 4, 2))
    with pytest.raises(ValueError, match="tiles"):
        tiled_product(x, w.rows(8, 48), y[:, :40], Shape(64, 0, 4, 2))
    with pytest.raises(ValueError, match="fp8 have scales"):
        tiled_product(x.to(E4M3), w, y, Shape(64, 0, 4, 2))
    with pytest.raises(ValueError, match="partial"):
        tiled_product(x, w, y, Shape(64, 0, 4, 2, 2))
    with pytest.raises(ValueError, match="filled whole"):
        w.rows(8, 48).fill(torch.zeros(40, 256, device=device))


# ---- experts


def mixture(d: int, f: int, count: int, top: int, folder: Path, device: str, half: torch.dtype) -> plain.Mixture:
    both, _ = weight((f,) * (2 * count), d, folder, device, half)
    down, _ = weight((d,) * count, f, folder, device, half)
    return plain.Mixture(both, down, None, None, count, None, Routing(top, renormalize=True), None)


@pytest.mark.parametrize("d, f", [(256, 256), (320, 160)])  # the second: tiles of 32 rows, and columns cut off
def test_experts(d: int, f: int, tmp_path: Path, device: str, half: torch.dtype):
    m = mixture(d, f, 3, 2, tmp_path, device, half)
    x, logits = rows_of(9, d, half, device), torch.randn(9, 3, device=device)
    want = by_hand(x, logits, m)
    assert mixtures.fits(m, half) and not mixtures.fits(m, torch.float32)
    tolerance = 2e-2 if half == torch.bfloat16 else 3e-3
    assert error(mixtures.mix(x, logits, m), want) < tolerance
    for blocks in (False, True):
        assert error(plain.mix(x, logits, m, blocks=blocks), want) < tolerance


def test_many_rows_of_an_expert_are_fp8(tmp_path: Path, device: str, half: torch.dtype):
    """Both products round their rows, so the whole is compared with what experts would do with such rows."""
    m = mixture(160, 160, 2, 1, tmp_path, device, half)
    x, logits = rows_of(130, 160, half, device), torch.randn(130, 2, device=device)
    got, both, down = mixtures.mix(x, logits, m), m.both, m.down
    assert isinstance(both, Tiled) and isinstance(down, Tiled)
    for e in (0, 1):
        rows = (logits.argmax(1) == e).nonzero()[:, 0]
        seen = in_groups(x[rows]) @ both.rows(e * 320, (e + 1) * 320).dequantize().double().T
        want = (
            in_groups(plain.activate(seen, None).to(half)) @ down.rows(e * 160, (e + 1) * 160).dequantize().double().T
        )
        # A number that falls on the border of two codes may be rounded either way.
        assert error(got[rows], want) < 1e-2


def test_grouped_products_in_fp8(tmp_path: Path, device: str, half: torch.dtype):
    w, means = weight((96, 96, 96), 256, tmp_path, device, half)
    ids = torch.tensor([1] * 70 + [0, 2, 2], dtype=torch.int32, device=device)
    order, starts = torch.empty_like(ids), torch.empty(4, dtype=torch.int32, device=device)
    place(ids, order, starts)
    x = rows_of(73, 256, half, device)
    made = GroupedRows.of(x)
    for tile in TILED:
        y = torch.full((73, 96), float("nan"), dtype=half, device=device)
        grouped(made.codes, w, y, order, starts, top=1, x_scale=made.scale, tile=tile)
        want = torch.einsum("pk,pnk->pn", in_groups(x)[order.long()], means.view(3, 96, 256)[ids[order.long()].long()])
        assert error(y, want) < bound(half)
    with pytest.raises(ValueError, match="rows of fp8"):
        grouped(made.codes, w, y, order, starts, top=1)


def test_filled_from_numbers(device: str):
    """Quantized here: tiles with their own largest number, and nothing else."""
    w = torch.randn(200, 320, device=device)
    w[:128, :128] *= 100.0
    made = Tiled.empty(200, 320, 128, torch.device(device))
    made.fill(w)
    assert made.scale[0, 0] == w[:128, :128].abs().max() / 448 and made.scale[1, 2] == w[128:, 256:].abs().max() / 448
    assert ((made.dequantize() - w).abs() <= w.abs() / 16 + made._wide(made._of_rows()) * 2**-10).all()


# ---- models


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3moe", marks=pytest.mark.large)])
def test_a_folder_in_tiles(kind: str, tmp_path: Path, device: str, half: torch.dtype):
    """A model of transformers saved as such checkpoints are: logits kept as fp8 against transformers over the same numbers.

    Prompts of few rows: nothing is rounded but half floats. Of many: rows are, to three bits.
    """
    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "head_dim": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 320,
    }
    if kind == "qwen3moe":
        sizes |= {"moe_intermediate_size": 160, "num_experts": 4}
    exact = save((mixed_models if kind == "qwen3moe" else folders).build(kind, **sizes), tmp_path / "m", "fp8 tiles")
    tokens = np.random.default_rng(1).integers(0, 160, 66)
    with torch.no_grad():
        want = exact(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    model = models.load(open_checkpoint(tmp_path / "m"))
    backend = open_backend("cuda", device=device, dtype=str(half).removeprefix("torch."), quantize="keep")
    program = backend.compile(model.forward, kv=model.kv(8, 16), max_tokens=128, max_rows=128)
    line = backend.told()[0]  # type: ignore[attr-defined]
    assert "FP8 in tiles" not in line and "a row or a tile has one scale" in line
    for n, close in ((5, 0.02), (66, 0.08)):
        got = program.run(ragged([(0, n, list(range(8)))], tokens[:n]))
        apart = np.linalg.norm(got - want[:n], axis=1) / np.linalg.norm(want[:n], axis=1)
        assert np.median(apart) < close, (n, apart)  # a router may choose otherwise for a row or two
