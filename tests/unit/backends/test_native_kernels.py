"""The native backend's arithmetic: packing loses nothing, linears are the int8 arithmetic they say, attention is right."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from quire import formats
from quire.backends.choose import open_backend
from quire.backends.native.backend import NativeBackend, extension
from quire.backends.ops import KV
from quire.layouts import Affine, Dense, Layout
from tests.unit.backends.native_kit import (
    EXPANDED,
    QUANTIZED,
    affine,
    codec,
    dense,
    fourteen_bit_product,
    fourteen_bits,
    ragged,
    rows_batch,
)  # fmt: skip

NO_KV = KV(layers=0, pages=1, page_size=16, kv_heads=1, head_dim=64)


def embed_all(backend: NativeBackend, table: Layout) -> np.ndarray:
    n = table.shape[0]
    program = backend.compile(lambda ops, batch, _: ops.embed(batch.ids, table), kv=NO_KV, max_tokens=n, max_rows=1)
    return program.run(_no_logits(n)).copy()


def _no_logits(n: int):
    batch = rows_batch(n)
    batch.logit_rows = batch.logit_rows[:0]
    return batch


def run_linear(backend: NativeBackend, x: np.ndarray, weight: Layout, bias: Dense | None = None) -> np.ndarray:
    program = backend.compile(
        lambda ops, batch, inputs: ops.linear(inputs["x"], weight, bias),
        kv=NO_KV, max_tokens=len(x), max_rows=1, inputs={"x": x.shape[1]},
    )  # fmt: skip
    return program.run(_no_logits(len(x)), {"x": x}).copy()


@pytest.mark.parametrize("name", [*QUANTIZED, *EXPANDED])
def test_packing_loses_nothing(name: str) -> None:
    backend = NativeBackend()
    for n, k in ((33, 512), (16, 256), (1, 768)):
        table = affine(name, n, k)
        np.testing.assert_array_equal(embed_all(backend, table), table.dequantize())


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dense_packing_loses_nothing(dtype: str) -> None:
    table = dense(dtype, 37, 50)
    np.testing.assert_array_equal(embed_all(NativeBackend(), table), table.dequantize())


@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_size_is_the_files_size(name: str) -> None:
    backend = NativeBackend()
    table = affine(name, 64, 4096)
    embed_all(backend, table)
    assert backend.packed_bytes <= 1.05 * table.nbytes


@pytest.mark.parametrize("name", [n for n in EXPANDED if n != "TQ2_0"])
def test_a_codebook_is_expanded_one_batch_at_a_time_and_counted_beforehand(name: str) -> None:
    """From the file's blocks to packed ones: the numbers are the file's, the size is the estimate's, nothing is kept."""
    form = formats.load(name)
    raw = np.random.default_rng(3).integers(0, 256, (64, 4 * form.NBYTES), np.uint8)
    if name == "IQ1_M":
        raw.reshape(64, 4, -1)[..., 49::2] &= 0x3F  # the upper bits of d, in the last of four pieces
    else:
        raw.reshape(64, 4, -1)[..., 1] = 0x21  # d is about 0.01
    table = form.read(raw.reshape(-1), (64, 4 * form.BLOCK))
    backend = NativeBackend()
    needs = backend.estimate(lambda ops, batch, _: ops.embed(batch.ids, table), kv=NO_KV, max_tokens=64, max_rows=1)
    np.testing.assert_array_equal(embed_all(backend, table), table.dequantize())
    assert needs.weights == backend.packed_bytes <= table.nbytes
    assert not isinstance(table.data, np.ndarray)


def round_to_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[M, K] as [M, G, 32] integers and [M, G] scales: the rounding that the backend documents."""
    groups = x.reshape(len(x), -1, 32).astype(np.float32)
    amax = np.abs(groups).max(-1)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(amax < 1e-36, 0, np.float32(127) / amax).astype(np.float32)
    scale = np.where(amax < 1e-36, 0, amax / np.float32(127)).astype(np.float32)
    scale = (scale.view(np.uint32) & ~np.uint32(3)).view(np.float32)  # two bits shorter: see group_scale in rows.h
    return np.rint(groups * inverse[..., None]).astype(np.int64), scale


def activations(m: int, k: int) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal((m, k)).astype(np.float32)
    x[0, :32] = 0
    x[0, 32:64] *= 1e-38
    x[-1, 64] = 300.0
    return x


@pytest.mark.parametrize("name", [*QUANTIZED, *EXPANDED])
def test_linear_is_its_int8_arithmetic(name: str) -> None:
    weight, x = affine(name, 48, 512), activations(5, 512)
    got = run_linear(NativeBackend(), x, weight)
    q, sx = round_to_int8(x)
    rounded = (q * sx[..., None].astype(np.float64)).reshape(x.shape)
    codes, scale, bias = weight.parts()
    exact = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), weight.codec.group, 1)
    if bias is not None:
        exact = exact + np.repeat(bias.astype(np.float64), weight.codec.group, 1)
    want = rounded @ exact.T
    spread = np.abs(rounded) @ (np.abs(codes) * np.repeat(np.abs(scale), weight.codec.group, 1)).T
    spread = spread + (0 if bias is None else np.abs(rounded) @ np.repeat(np.abs(bias), weight.codec.group, 1).T)
    assert (np.abs(got - want) <= 2e-6 * spread + 1e-30).all()  # float32 sums of 32 terms, nothing else


@pytest.mark.parametrize("name", [*QUANTIZED, *EXPANDED])
def test_linear_is_within_the_bound_of_its_rounding(name: str) -> None:
    weight, x = affine(name, 48, 512), activations(5, 512)
    got, exact = run_linear(NativeBackend(), x, weight), weight.dequantize().astype(np.float64)
    _, sx = round_to_int8(x)
    mass = np.abs(exact).reshape(48, -1, 32).sum(-1)  # [N, G]
    bound = (sx.astype(np.float64) / 2) @ mass.T
    assert (np.abs(got - x.astype(np.float64) @ exact.T) <= 1.01 * bound + 1e-4).all()


@pytest.mark.parametrize("isa", extension().available())
@pytest.mark.parametrize("rows", [1, 3, 9, 40])
@pytest.mark.parametrize("large", [1.4e33, np.inf, -np.inf])
def test_a_row_too_large_for_its_scale_is_not_a_number(large: float, rows: int, isa: str) -> None:
    """So that whoever looks at it finds out; just below, and in the rows beside it, nothing happens."""
    weight, x = affine("Q4_0", 40, 256), activations(rows, 256)
    x[-1, 5] = 1.2e33
    fine = run_linear(NativeBackend(isa=isa), x, weight)
    assert np.isfinite(fine).all()
    x[-1, 5] = large
    got = run_linear(NativeBackend(isa=isa), x, weight)
    assert np.isnan(got[-1]).all()
    np.testing.assert_array_equal(got[:-1], fine[:-1])


@pytest.mark.parametrize("isa", extension().available())
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "Q2_K"])  # without and with a bias, by 32 and by 16
def test_a_rows_linear_does_not_depend_on_how_many_ride_along(name: str, isa: str) -> None:
    """One row, a few and many take different kernels; every number must come out of them bit for bit."""
    weight, x = affine(name, 40, 768), activations(33, 768)
    whole = run_linear(NativeBackend(isa=isa), x, weight)
    for m in (1, 2, 3, 4, 5, 8, 9, 13, 16, 17):
        np.testing.assert_array_equal(run_linear(NativeBackend(isa=isa), x[33 - m :], weight), whole[33 - m :])


@pytest.mark.parametrize("isa", extension().available())
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_K", "Q2_K"])
def test_a_few_rows_of_a_wide_matrix_are_what_they_are_alone(name: str, isa: str) -> None:
    """What a few rows share is kept for 4,096 columns at a time: a wider matrix takes several of them, the last one short."""
    weight, x = affine(name, 24, 4096 + 512), activations(11, 4096 + 512)
    alone = np.concatenate([run_linear(NativeBackend(isa=isa), row[None], weight) for row in x])
    for m in (2, 3, 11):
        np.testing.assert_array_equal(run_linear(NativeBackend(isa=isa), x[:m], weight), alone[:m])


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_dense_linear(dtype: str) -> None:
    weight, bias = dense(dtype, 35, 71), dense("f32", 35)
    x = activations(7, 71)
    want = x.astype(np.float64) @ weight.dequantize().T.astype(np.float64) + bias.dequantize()
    np.testing.assert_allclose(run_linear(NativeBackend(), x, weight, bias), want, rtol=2e-6, atol=2e-6)


def halves(n: int, k: int, seed: int = 3) -> np.ndarray:
    """Numbers of every size that float16 has, many of them small beside the largest of their group, and the ends of its range."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((n, k)) * 10.0 ** rng.uniform(-7, 0, (n, k))).astype(np.float16)
    values[0, :4] = 0.0, -0.0, 2**-24, -(2.0**-15)
    values[1] = 0
    values[2, :32] = 2.0**-24 * np.arange(32)
    values[3, :3] = 65504, -65504, 1
    values[4, :3] = (
        1 + 1015 / 1024,
        -1 - 1016 / 1024,
        2.0**-12,
    )  # the last mantissa that fits, and the first that does not
    return values


@pytest.mark.parametrize("isa", extension().available())
def test_halves_are_integers_of_fourteen_bits(isa: str) -> None:
    """As another program packs them: every number within half a step, and all that are not small beside their largest exact."""
    values = halves(40, 96)
    upper, lower, scale = fourteen_bits(values)
    want = ((64 * upper + lower) * (scale[..., None] / 64)).reshape(values.shape)
    np.testing.assert_array_equal(embed_all(NativeBackend(isa=isa), Dense(values, "f16")), want.astype(np.float32))
    most = np.repeat(np.abs(values.astype(np.float64)).reshape(40, -1, 32).max(-1), 32, axis=1)
    off = np.abs(want - values.astype(np.float64))
    assert (off <= most / 8064).all() and not off[np.abs(values.astype(np.float64)) * 2 >= most].any()


@pytest.mark.parametrize("isa", extension().available())
@pytest.mark.parametrize(("n", "k"), [(40, 96), (3, 128), (35, 800), (16, 9216)])
def test_products_of_halves_to_the_bit(n: int, k: int, isa: str) -> None:
    """Whatever rows come together, and over more columns than are taken at a time."""
    values, x = halves(n, k) if n > 4 else dense("f16", n, k).data, activations(37, k)
    x[0, :32] = 0
    x[1, 0] = 3000
    want = fourteen_bit_product(x, values)
    backend, weight = NativeBackend(threads=2, isa=isa), Dense(values, "f16")
    for m in (1, 2, 3, 4, 7, 8, 17, 37):
        np.testing.assert_array_equal(run_linear(backend, x[:m], weight), want[:m])


@pytest.mark.parametrize(
    ("weight", "count"), [(dense("f16", 20, 96), 1), (dense("f16", 20, 71), 0), (dense("bf16", 20, 96), 0)]
)
def test_what_is_rounded_is_told(weight: Dense, count: int) -> None:
    backend = NativeBackend()
    assert backend.told() == []
    run_linear(backend, activations(2, weight.shape[1]), weight)
    assert len(backend.told()) == count and all("14 bits" in line for line in backend.told())


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_half_that_is_no_number_makes_none(bad: float) -> None:
    """In its own output, and in no other."""
    values = halves(20, 96)
    values[17, 40] = bad
    got = run_linear(NativeBackend(), activations(3, 96), Dense(values, "f16"))
    assert np.isnan(got[:, 17]).all() and np.isfinite(np.delete(got, 17, axis=1)).all()


def test_exp_is_accurate_at_every_scale() -> None:
    x = np.concatenate([np.linspace(-104, 89, 200001), [0, -0.0, 1e-30, np.inf, -np.inf, -200, 200]]).astype(np.float32)
    out = np.empty_like(x)
    with np.errstate(over="ignore"):
        want = np.exp(x.astype(np.float64))
    for isa in extension().available():
        extension().exp(isa, x, out)
        finite = want < np.finfo(np.float32).max
        ulp = np.maximum(np.spacing(want[finite].astype(np.float32)).astype(np.float64), 2.0**-149)
        assert (np.abs(out[finite] - want[finite]) <= 1.6 * ulp).all()
        assert np.isinf(out[~finite]).all() and out[x == -np.inf] == 0
    extension().exp(extension().available()[0], np.full(3, np.nan, np.float32), out[:3])
    assert np.isnan(out[:3]).all()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 8), (9, 3, 64), (8, 1, 24), (2, 2, 80), (3, 1, 256)]
)
def test_attention_agrees_with_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    kv = KV(layers=2, pages=16, page_size=16, kv_heads=kv_heads, head_dim=head_dim)

    def forward(ops, batch, inputs):
        return ops.attention(inputs["q"], inputs["k"], inputs["v"], batch, layer=1, heads=heads, scale=head_dim**-0.5)

    rng = np.random.default_rng(1)
    widths = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    programs = [
        b.compile(forward, kv=kv, max_tokens=128, max_rows=1, inputs=widths)
        for b in (open_backend("native", threads=2), open_backend("reference"))
    ]
    for parts in ([(37, 0, (3, 7, 1)), (16, 0, (2, 5))], [(1, 37, (3, 7, 1)), (9, 16, (2, 5))]):
        batch = ragged([([0] * n, start, pages) for n, start, pages in parts])
        batch.logit_rows = batch.logit_rows[:0]
        inputs = {k: rng.standard_normal((batch.tokens, w)).astype(np.float32) for k, w in widths.items()}
        got, want = (p.run(batch, inputs) for p in programs)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_stale_cache_is_never_read() -> None:
    """A page used before by someone else may hold infinities: nothing of it may reach a later sequence."""
    kv = KV(layers=1, pages=2, page_size=16, kv_heads=1, head_dim=16)
    program = NativeBackend().compile(
        lambda ops, batch, i: ops.attention(i["q"], i["k"], i["v"], batch, layer=0, heads=1, scale=1.0),
        kv=kv, max_tokens=16, max_rows=1, inputs=dict.fromkeys("qkv", 16),
    )  # fmt: skip

    def run(n: int, value: float) -> np.ndarray:
        batch = ragged([([0] * n, 0, (1,))])
        batch.logit_rows = batch.logit_rows[:0]
        return program.run(batch, {k: np.full((n, 16), value, np.float32) for k in "qkv"}).copy()

    run(16, math.inf)
    np.testing.assert_array_equal(run(3, 0.5), np.full((3, 16), 0.5, np.float32))


def test_an_idle_pool_costs_nothing() -> None:
    backend = NativeBackend(threads=2)
    run_linear(backend, activations(2, 256), affine("Q4_0", 32, 256))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - before < 0.1  # a thread that spins uses all of it


def test_bad_codecs_are_refused() -> None:
    good = affine("Q4_0", 16, 64)
    c = codec("Q4_0")
    plane = c.codes.planes[0]
    outside = type(plane)(np.full_like(plane.byte, c.nbytes), plane.shift, plane.mask, plane.lift, plane.flip)
    broken = type(c)(**{**_fields(c), "codes": type(c.codes)((outside,), c.codes.offset)})
    with pytest.raises(ValueError, match="outside its block"):
        embed_all(NativeBackend(), Affine(good.data, broken))


def _fields(c) -> dict:
    return {name: getattr(c, name) for name in ("name", "block", "nbytes", "group", "bits", "codes", "scale", "bias")}
