"""Every format against the `gguf` package's own dequantization, bit for bit, on random and adversarial blocks."""

from __future__ import annotations

import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from quire import formats
from quire.formats._codebook import Expanded
from quire.layouts import Affine, Dense

# Formats whose blocks are looked up in a codebook: their layouts are made when they are read.
CODEBOOKS = "IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS TQ1_0 MXFP4".split()  # noqa: SIM905
PLAIN = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K TQ2_0".split()  # noqa: SIM905
SUPPORTED = [*PLAIN, *CODEBOOKS]
# Zeros, subnormals (smallest, largest), smallest normal, one, largest, infinities, quiet and signalling NaNs.
HALVES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00]
HALVES += [0x7E00, 0xFE00, 0x7C01, 0xFDFF, 0x7FFF, 0xFFFF]
# Where the float16 fields of a block lie, by ggml's struct definitions.
SCALE_BYTES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ1_S": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
}


def expected(data: np.ndarray, name: str) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gguf.quants.dequantize(data, GGMLQuantizationType[name])


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Equal bit for bit; a NaN equals any NaN (its sign and payload depend on the order of commuting operands)."""
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    a, b = np.ascontiguousarray(ours).view(np.uint32), np.ascontiguousarray(theirs).view(np.uint32)
    wrong = (a != b) & ~(np.isnan(ours) & np.isnan(theirs))
    assert not wrong.any(), f"{wrong.sum()} differ, first at {np.argwhere(wrong)[0]}"


def check(data: np.ndarray, name: str) -> None:
    """data uint8 [rows, row bytes]."""
    block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    shape = (data.shape[0], data.shape[1] // nbytes * block)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no noise about Inf and NaN either
        layout = formats.load(name).read(data.reshape(-1), shape)
        assert layout.shape == shape
        ours = layout.dequantize()
    same_bits(ours, expected(data, name))


def test_the_registry_is_the_directory() -> None:
    here = {p.stem.upper() for p in Path(formats.__file__).parent.glob("*.py") if not p.stem.startswith("_")}
    assert formats.names() == here == set(SUPPORTED)


def test_ggml_numbers_and_names_are_ggmls() -> None:
    for known in GGMLQuantizationType:
        assert formats.GGML_NAMES[known.value] == known.name


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_format_declares_what_ggml_says(name: str) -> None:
    kind = GGMLQuantizationType[name]
    f = formats.by_ggml_type(kind.value)
    assert f is not None
    assert (name, kind.value) == (f.NAME, f.GGML_TYPE)
    assert GGML_QUANT_SIZES[kind] == (f.BLOCK, f.NBYTES)


def test_types_without_a_format_have_names() -> None:
    assert formats.by_ggml_type(GGMLQuantizationType.Q8_K.value) is None
    assert formats.ggml_name(GGMLQuantizationType.NVFP4.value) == "NVFP4 (40)"
    assert "no known GGML type" in formats.ggml_name(4242)
    assert formats.by_ggml_type(4242) is None
    with pytest.raises(KeyError):
        formats.load("Q8_K")
    with pytest.raises(KeyError):
        formats.load("_K_SCALES")


@pytest.mark.parametrize("name", SUPPORTED)
def test_random_blocks(name: str) -> None:
    rng = np.random.default_rng(SUPPORTED.index(name))
    nbytes = formats.load(name).NBYTES
    check(rng.integers(0, 256, (33, 24 * nbytes), np.uint8), name)


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x0F, 0xF0, 0x55, 0xAA, 0x01, 0x80, 0x7F, 0x3C])
def test_uniform_blocks(name: str, fill: int) -> None:
    check(np.full((3, 2 * formats.load(name).NBYTES), fill, np.uint8), name)


@pytest.mark.parametrize("name", list(SCALE_BYTES))
def test_strange_scales_with_zero_largest_and_random_codes(name: str) -> None:
    rng = np.random.default_rng(7)
    nbytes, places = formats.load(name).NBYTES, SCALE_BYTES[name]
    rows = []
    for codes in (np.zeros(nbytes, np.uint8), np.full(nbytes, 255, np.uint8), rng.integers(0, 256, nbytes, np.uint8)):
        for first in HALVES:
            for second in HALVES if len(places) == 2 else [0]:
                row = codes.copy()
                for at, half in zip(places, (first, second), strict=False):
                    row[at : at + 2] = half & 0xFF, half >> 8
                rows.append(row)
    check(np.stack(rows), name)


@pytest.mark.parametrize("name", list(SCALE_BYTES))
def test_each_bit_of_a_block_counts_where_ggml_says(name: str) -> None:
    nbytes = formats.load(name).NBYTES
    base = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
    for at in SCALE_BYTES[name]:
        base[at : at + 2] = 0x00, 0x3C  # 1.0
    rows = np.repeat(base[None], nbytes * 8, axis=0)
    rows[np.arange(nbytes * 8), np.arange(nbytes * 8) // 8] ^= (1 << (np.arange(nbytes * 8) % 8)).astype(np.uint8)
    check(rows, name)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_dense_bits_survive(name: str) -> None:
    """Every 16-bit pattern; for F32, every upper half: infinities, NaN payloads, subnormals and both zeros."""
    patterns = np.arange(1 << 16, dtype="<u2")
    if name == "F32":
        patterns = (patterns.astype("<u4") << 16) | 1
    data = patterns.view(np.uint8).reshape(256, -1)
    check(data, name)
    if name != "F16":  # nothing is computed: even NaN payloads are kept
        ours = formats.load(name).read(data.reshape(-1), (256, 256)).dequantize()
        assert np.array_equal(ours.view(np.uint32), expected(data, name).view(np.uint32))


@pytest.mark.parametrize("name", SUPPORTED)
def test_shapes_rows_and_odd_addresses(name: str) -> None:
    f = formats.load(name)
    rng = np.random.default_rng(11)
    raw = rng.integers(0, 256, 6 * 2 * f.NBYTES + 1, np.uint8)[1:]
    k = 2 * f.BLOCK
    want = expected(raw.copy().reshape(6, -1), name)
    matrix = f.read(raw, (6, k))
    assert isinstance(matrix, Affine | Dense)
    if name in PLAIN:
        assert matrix.nbytes == raw.size
        assert np.shares_memory(matrix.data, raw)
    for rows in (slice(2, 5), slice(None, None, 2), slice(5, 2), slice(-1, None), slice(4, 99)):
        same_bits(matrix.dequantize(rows), want[rows])
    same_bits(f.read(raw, (3, 2, k)).dequantize(), want.reshape(3, 2, k))
    same_bits(f.read(raw, (3, 2, k)).dequantize(slice(1, 2)), want.reshape(3, 2, k)[1:2])
    same_bits(f.read(raw, (6 * k,)).dequantize(), want.reshape(-1))
    same_bits(f.read(raw, (6 * k,)).dequantize(slice(3, 17)), want.reshape(-1)[3:17])


@pytest.mark.parametrize("name", list(SCALE_BYTES))
def test_codec_tables_stay_inside_the_block(name: str) -> None:
    """A backend compiles these tables without asking again."""
    codec = formats.load(name).read(np.zeros(formats.load(name).NBYTES, np.uint8), (formats.load(name).BLOCK,)).codec
    assert codec.name == name
    tables = [(codec.codes, codec.block, codec.bits)]
    for scale in (codec.scale, codec.bias):
        if scale is not None:
            assert 0 <= scale.at <= codec.nbytes - 2
            if scale.codes is not None:
                tables.append((scale.codes, codec.groups, 8))
    for ints, count, bits in tables:
        for plane in ints.planes:
            assert plane.byte.size == plane.shift.size == count
            assert plane.byte.max() < codec.nbytes
            assert plane.shift.max() < 8
            assert (plane.mask << plane.lift) < 1 << bits


@pytest.mark.parametrize("name", list(SCALE_BYTES))
def test_parts_rebuild_the_matrix(name: str) -> None:
    """codes * scale + bias, in float64 and rounded to float32, is the matrix to within one rounding of each step."""
    f = formats.load(name)
    raw = np.random.default_rng(5).integers(0, 256, 4 * 3 * f.NBYTES, np.uint8)
    for at in SCALE_BYTES[name]:
        raw.reshape(-1, f.NBYTES)[:, at + 1] = 0x2C  # 0.06 or so
    layout = f.read(raw, (4, 3 * f.BLOCK))
    assert isinstance(layout, Affine)
    codes, scale, bias = layout.parts()
    low = codes.min() + layout.codec.codes.offset
    high = codes.max() + layout.codec.codes.offset
    assert low >= 0
    assert high < 1 << layout.codec.bits
    exact = codes.astype(np.float64) * np.repeat(scale, layout.codec.group, axis=1)
    if bias is not None:
        exact += np.repeat(bias, layout.codec.group, axis=1)
    np.testing.assert_allclose(layout.dequantize(), exact, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_a_codebook_is_expanded_when_it_is_read_and_not_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = formats.load(name)
    raw = np.random.default_rng(13).integers(0, 256, 3 * 4 * 2 * f.NBYTES, np.uint8)
    made: list[int] = []
    real = f.expand
    monkeypatch.setattr(f, "expand", lambda blocks: made.append(len(blocks)) or real(blocks))
    stack = f.read(raw, (3, 4, 2 * f.BLOCK))
    assert isinstance(stack, Affine)
    row = 2 * stack.codec.nbytes
    assert stack.shape == (3, 4, 2 * f.BLOCK) and stack.data.shape == (3, 4, row)
    assert stack.nbytes == stack.data.size == 3 * 4 * row and len(stack.data) == 3
    one = Affine(stack.data[1], stack.codec)  # as a mixture cuts its experts out of a stack
    some = Affine(one.data[1:3], one.codec)
    assert one.shape == (4, 2 * f.BLOCK) and some.shape == (2, 2 * f.BLOCK) and not made
    blocks = np.ascontiguousarray(some.data)  # as a backend takes a matrix over
    assert made == [4] and blocks.dtype == np.uint8 and blocks.shape == (2, row) == some.data.shape
    same_bits(Affine(blocks, some.codec).dequantize(), stack.dequantize()[1, 1:3])
    with pytest.raises(ValueError, match="no array to share"):
        np.asarray(some.data, copy=False)
    assert isinstance(some.data, Expanded)


def test_many_blocks_are_expanded_in_pieces() -> None:
    """More than are expanded at a time, and not a whole number of times."""
    check(np.random.default_rng(17).integers(0, 256, (700, 3 * 66), np.uint8), "IQ2_XXS")


def test_every_pattern_of_every_codebook() -> None:
    """The tables here against those of the gguf package, one entry at a time."""
    from quire.formats._grids import grid

    for name, times, plus in (
        ("IQ2_XXS", 1, 0), ("IQ2_XS", 1, 0), ("IQ2_S", 1, 0), ("IQ3_XXS", 2, 0), ("IQ3_S", 1, 0), ("IQ1_S", 1, -1)
    ):  # fmt: skip
        theirs = getattr(gguf.quants, name)
        theirs.init_grid()
        assert np.array_equal(grid(name).astype(int) * times + plus, theirs.grid.reshape(theirs.grid_shape)), name
