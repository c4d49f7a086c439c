"""Quantized matrices of folders, one by one, against independent writers: exact numbers, what they cost, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.formats import hub
from quire.layouts import E4M3, Affine, Dense, Float8, Layout
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.packed import Packed, scheme_of
from quire.weights.safetensors import Safetensors
from quire.weights.values import Values
from tests.unit.formats import packers

torch = pytest.importorskip("torch", reason="needs the test extra: torch writes bfloat16 and e4m3")

Made = tuple[dict[str, Any], np.ndarray]


def ct(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


def config(method: str, **settings: Any) -> dict[str, Any]:
    return {"quant_method": method, **settings}


PACK = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float"}
# name -> (writer, quantization_config, the layout's bytes for each 32 numbers)
KINDS: dict[str, tuple[Callable[[np.ndarray], Made], dict[str, Any], int]] = {
    "gptq": (lambda w: packers.gptq(w), config("gptq", bits=4, group_size=128), 18),
    "gptq asym": (lambda w: packers.gptq(w, sym=False), config("gptq", bits=4, group_size=128, sym=False), 24),
    "gptq 32": (lambda w: packers.gptq(w, group=32, sym=False), config("gptq", bits=4, group_size=32), 24),
    "gptq 64 v2": (
        lambda w: packers.gptq(w, group=64, sym=False, v2=True, order=False),
        config("gptq", bits=4, group_size=64, checkpoint_format="gptq_v2"),
        24,
    ),
    "gptq row": (lambda w: packers.gptq(w, group=-1, dtype=np.float32), config("gptq", bits=4, group_size=-1), 20),
    "gptq 8": (lambda w: packers.gptq(w, bits=8), config("gptq", bits=8, group_size=128), 34),
    "gptq 8 asym": (lambda w: packers.gptq(w, bits=8, sym=False), config("gptq", bits=8, group_size=128), 40),
    "awq": (lambda w: packers.awq(w), config("awq", bits=4, group_size=128, zero_point=True, version="gemm"), 24),
    "awq 64": (lambda w: packers.awq(w, group=64), config("awq", w_bit=4, q_group_size=64), 24),
    "ct": (lambda w: packers.compressed(w), ct("pack-quantized", **PACK), 20),
    "ct bfloat": (lambda w: packers.compressed(w, bfloat=True), ct("pack-quantized", **PACK), 18),
    "ct asym": (lambda w: packers.compressed(w, sym=False, bfloat=True), ct("pack-quantized", **PACK), 24),
    "ct asym old": (
        lambda w: packers.compressed(w, sym=False, old=True, bfloat=True),
        ct("pack-quantized", **PACK),
        24,
    ),
    "ct 8 channel": (
        lambda w: packers.compressed(w, bits=8, group=-1),
        ct("pack-quantized", num_bits=8, type="int", strategy="channel"),
        36,
    ),
    "ct int8": (
        lambda w: packers.int_quantized(w),
        ct("int-quantized", num_bits=8, type="int", strategy="channel"),
        36,
    ),
    "fp8 tiles": (
        lambda w: packers.fp8(w, tile=(128, 128), name="weight_scale_inv"),
        config("fp8", weight_block_size=[128, 128], activation_scheme="dynamic", fmt="e4m3"),
        36,
    ),
    "fp8 tensor": (
        lambda w: packers.fp8(w, tile=(0, 0), name="weight_scale", flat=True),
        config("fp8", activation_scheme="static"),
        36,
    ),
    "fbgemm": (lambda w: packers.fp8(w, tile=None, name="weight_scale"), config("fbgemm_fp8"), 36),
    "ct fp8 row": (
        lambda w: packers.fp8(w, tile=None, name="weight_scale"),
        ct("float-quantized", strategy="channel", **FP8),
        36,
    ),
    "ct fp8 tiles": (
        lambda w: packers.fp8(w, tile=(64, 32), name="weight_scale"),
        ct("float-quantized", strategy="block", block_structure=[64, 32], **FP8),
        36,
    ),
}


def write(path: Path, tensors: dict[str, Any], prefix: str = "m.") -> Path:
    from safetensors.torch import save_file

    made = {n: torch.from_numpy(t) if isinstance(t, np.ndarray) else t for n, t in tensors.items()}
    save_file({f"{prefix}{n}": t.contiguous() for n, t in made.items()}, path)
    return path


def packed(path: Path, how: dict[str, Any]) -> Packed:
    file = Safetensors.open(path)
    scheme = scheme_of(Values("config.json", {"quantization_config": how}))
    assert scheme is not None
    return Packed(scheme, file.tensors, lambda name: file, str(path.parent))


def weights(n: int = 72, k: int = 384, seed: int = 0) -> np.ndarray:
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    return w * np.linspace(0.01, 0.3, n, dtype=np.float32)[:, None]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_exact(kind: str, tmp_path: Path) -> None:
    make, how, nbytes = KINDS[kind]
    tensors, means = make(weights())
    folder = packed(write(tmp_path / "m.safetensors", tensors), how)
    info = folder.matrices["m.weight"]
    layout = folder.read("m.weight")
    assert info.shape == layout.shape == (72, 384) and layout.nbytes == 72 * 12 * nbytes
    assert not folder.rest and info.nbytes == sum(
        np.asarray(t.view(torch.uint8) if hasattr(t, "bfloat16") else t).nbytes for t in tensors.values()
    )
    # float64 rounded once: scales of 16 bits make it exact, longer ones are rounded in the same place
    np.testing.assert_array_equal(layout.dequantize(), means.astype(np.float32))
    np.testing.assert_array_equal(layout.dequantize(slice(13, 50, 3)), means.astype(np.float32)[13:50:3])
    cut = type(layout)(layout.data[5:66], *([layout.codec] if isinstance(layout, Affine) else [layout.by_row]))
    np.testing.assert_array_equal(cut.dequantize(slice(1, None)), means.astype(np.float32)[6:66])


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"bits": 4, "group": 32, "sym": False}, "f16"),
        ({"bits": 4, "group": 128}, "f16"),
        ({"bits": 8, "group": 64, "sym": False}, "f16"),
        ({"bits": 4, "group": 64, "dtype": np.float32}, "f32"),
    ],
)
def test_columns_in_the_order_of_their_activations(settings: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """desc_act: each column has its group's numbers, wherever it lies; rounded once to float16, as such files' kernels do."""
    tensors, means = packers.gptq(weights(n=600), moved=True, **settings)
    assert (np.diff(tensors["g_idx"]) < 0).any()
    how = config("gptq", bits=settings["bits"], group_size=settings["group"], desc_act=True)
    folder = packed(write(tmp_path / "m.safetensors", tensors), how)
    assert any("desc_act" in line for line in folder.notes(True))
    layout = folder.read("m.weight")
    assert isinstance(layout, Dense) and layout.dtype == dtype and layout.shape == (600, 384)
    assert layout.nbytes == 600 * 384 * (2 if dtype == "f16" else 4)
    want = means.astype(np.float32) if dtype == "f32" else means.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(layout.dequantize(), want)
    np.testing.assert_array_equal(layout.dequantize(slice(13, 500, 3)), want[13:500:3])
    np.testing.assert_array_equal(Dense(layout.data[250:300], dtype).dequantize(slice(1, None)), want[251:300])
    np.testing.assert_array_equal(np.ascontiguousarray(layout.data).astype(np.float32), want)


def test_scales_that_float16_numbers_would_not_hold(tmp_path: Path) -> None:
    tensors, _ = packers.gptq(weights(), moved=True)
    tensors["scales"] = np.full_like(tensors["scales"], 60000.0)
    layout = packed(write(tmp_path / "m.safetensors", tensors), KINDS["gptq"][1]).read("m.weight")
    assert isinstance(layout, Dense) and layout.dtype == "f32" and np.isfinite(layout.dequantize()).all()


def test_compressed_columns_in_any_order(tmp_path: Path) -> None:
    """compressed-tensors says the same in weight_g_idx."""
    w = weights()
    at = np.random.default_rng(1).permutation(384)
    tensors, means = packers.compressed(w[:, at], sym=False, bfloat=True)
    codes = tensors["weight_packed"].view(np.uint32)
    apart = np.stack([(codes >> np.uint32(4 * i)) & 15 for i in range(8)], axis=-1).reshape(72, 384)[:, np.argsort(at)]
    words = sum(apart[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    tensors["weight_packed"] = np.asarray(words, np.uint32).view(np.int32)
    tensors["weight_g_idx"] = (np.arange(384) // 128)[np.argsort(at)].astype(np.int32)
    folder = packed(write(tmp_path / "m.safetensors", tensors), ct("pack-quantized", actorder="group", **PACK))
    layout = folder.read("m.weight")
    want = means[:, np.argsort(at)].astype(np.float16 if layout.dtype == "f16" else np.float32)
    assert isinstance(layout, Dense) and any("desc_act" in line for line in folder.notes(True))
    np.testing.assert_array_equal(layout.dequantize(), want.astype(np.float32))


def test_e4m3_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(E4M3, codes.float().numpy())
    assert np.signbit(E4M3[128])


def test_a_codec_is_one_object(tmp_path: Path) -> None:
    """A backend knows codecs by identity; a thousand matrices must not make a thousand."""
    make, how, _ = KINDS["gptq asym"]
    first, second = (
        packed(write(tmp_path / f"{i}.safetensors", make(weights(seed=i))[0]), how).read("m.weight") for i in (0, 1)
    )
    assert isinstance(first, Affine) and isinstance(second, Affine) and first.codec is second.codec


def test_only_rows_with_one_scale_say_so(tmp_path: Path) -> None:
    for kind, by_row in (("fp8 tiles", False), ("fp8 tensor", True), ("fbgemm", True)):
        make, how, _ = KINDS[kind]
        layout = packed(write(tmp_path / f"{by_row}.safetensors", make(weights())[0]), how).read("m.weight")
        assert isinstance(layout, Float8) and layout.by_row == by_row


def test_powers_of_two_as_scales(tmp_path: Path) -> None:
    tensors, _ = packers.fp8(weights(), tile=(128, 128), name="weight_scale_inv")
    exponents = torch.randint(110, 130, (1, 3), dtype=torch.uint8)
    tensors["weight_scale_inv"] = exponents.view(torch.float8_e8m0fnu)
    layout = packed(write(tmp_path / "m.safetensors", tensors), KINDS["fp8 tiles"][1]).read("m.weight")
    want = tensors["weight"].float().numpy() * np.repeat(2.0 ** (exponents.numpy().astype(int) - 127), 128, axis=1)
    np.testing.assert_array_equal(layout.dequantize(), want.astype(np.float32))


def test_a_stored_zero_of_fifteen_is_sixteen(tmp_path: Path) -> None:
    tensors, _ = packers.gptq(weights(), sym=False)
    tensors["qzeros"][:] = -1
    layout = packed(write(tmp_path / "m.safetensors", tensors), KINDS["gptq"][1]).read("m.weight")
    assert isinstance(layout, Affine) and layout.codec.codes.offset == 16 and layout.codec.bias is None


def gptq(**changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of a GPTQ matrix, changed; None takes one out."""
    tensors = {**packers.gptq(weights())[0], **changes}
    return {n: t for n, t in tensors.items() if t is not None}, config("gptq", bits=4, group_size=128)


def _order(**at: int) -> np.ndarray:
    order = (np.arange(384) // 128).astype(np.int32)
    for key, value in at.items():
        order[int(key[1:])] = value
    return order


def refused() -> dict[str, tuple[Callable[[], tuple[dict[str, Any], dict[str, Any]]], type[Exception], str]]:
    f16 = np.float16
    plain, tiles = KINDS["fbgemm"][0](weights())[0], KINDS["fp8 tiles"][0](weights())[0]
    whole = packers.compressed(weights())[0]
    return {
        "no scales": (lambda: gptq(scales=None), BadModelFile, r"tensor 'm.scales' is missing for 72 rows and 384"),
        "no zeros": (lambda: gptq(qzeros=None), BadModelFile, "tensor 'm.qzeros' is missing"),
        "another group": (lambda: gptq(scales=np.ones((6, 72), f16)), BadModelFile, "m.scales' has shape 6x72, but 3x72"),
        "other zeros": (lambda: gptq(qzeros=np.zeros((3, 18), np.int32)), BadModelFile, "m.qzeros' has shape 3x18, but 3x9"),
        "floats for codes": (lambda: gptq(qweight=np.ones((48, 72), f16)), BadModelFile, "m.qweight' holds F16 numbers: I32"),
        "ints for scales": (lambda: gptq(scales=np.ones((3, 72), np.int32)), BadModelFile, "m.scales' holds I32 numbers"),
        "a short order": (lambda: gptq(g_idx=_order()[:100]), BadModelFile, "m.g_idx' has shape 100, but 384"),
        "a group that is not there": (lambda: gptq(g_idx=_order(_7=3)), BadModelFile, "puts column 7 in group 3: there are 3"),
        "a negative group": (lambda: gptq(g_idx=_order(_9=-1)), BadModelFile, "puts column 9 in group -1"),
        "endless scales": (lambda: gptq(scales=np.full((3, 72), np.inf, f16)), BadModelFile, "216 scales that are no numbers"),
        "two of one": (
            lambda: ({**gptq()[0], "weight": np.ones((72, 384), f16)}, gptq()[1]),
            BadModelFile,
            "'m.qweight' is there, and 'm.weight' too",
        ),
        "nothing packed": (lambda: ({"weight": np.ones((4, 32), f16)}, gptq()[1]), BadModelFile, "none of 1 tensors is a qweight"),
        "odd columns": (
            lambda: ({"qweight": np.zeros((2, 8), np.int32)}, gptq()[1]),
            Unsupported,
            "with 16 columns: they must be whole blocks of 32",
        ),
        "tiny groups": (lambda: (gptq()[0], config("gptq", bits=4, group_size=16)), Unsupported, "groups of 16 columns"),
        "3 bits": (lambda: (gptq()[0], config("gptq", bits=3, group_size=128)), Unsupported, "GPTQ with 3 bits"),
        "no bits": (lambda: (gptq()[0], config("gptq", group_size=128)), BadModelFile, "bits is missing"),
        "no group": (lambda: (gptq()[0], config("gptq", bits=4)), BadModelFile, "group_size is None"),
        "marlin": (lambda: (gptq()[0], config("gptq", bits=4, group_size=128, checkpoint_format="marlin")), Unsupported, "'marlin'"),
        "several bits": (
            lambda: (gptq()[0], config("gptq", bits=4, group_size=128, dynamic={"+:.*down.*": {"bits": 8}})),
            Unsupported,
            "dynamic",
        ),
        "gemv": (lambda: (gptq()[0], config("awq", bits=4, group_size=128, version="gemv")), Unsupported, "'gemv'"),
        "bitsandbytes": (lambda: (gptq()[0], config("bitsandbytes", load_in_4bit=True)), Unsupported, "quantization_config: bitsandbytes"),
        "nvfp4": (lambda: (whole, ct("nvfp4-pack-quantized", **PACK)), Unsupported, "'nvfp4-pack-quantized'"),
        "another shape": (
            lambda: ({**whole, "weight_shape": np.array([72, 512])}, ct("pack-quantized", **PACK)),
            BadModelFile,
            "has shape 72x48, but 72x512 numbers of 4 bits take 72x64",
        ),
        "no shape": (
            lambda: ({n: t for n, t in whole.items() if n != "weight_shape"}, ct("pack-quantized", **PACK)),
            BadModelFile,
            "'m.weight_shape' is missing",
        ),
        "two ways": (
            lambda: (
                whole,
                {**ct("pack-quantized", **PACK), "config_groups": {"a": {"weights": PACK}, "b": {"weights": {**PACK, "num_bits": 8}}}},
            ),
            Unsupported,
            "in 2 ways",
        ),
        "fp8 without a scale": (
            lambda: ({"weight": plain["weight"]}, config("fp8", weight_block_size=[128, 128])),
            BadModelFile,
            r"'m.weight_scale_inv' is missing: a weight of 72x384 FP8 numbers",
        ),
        "other tiles": (
            lambda: (tiles, config("fp8", weight_block_size=[64, 64])),
            BadModelFile,
            "weight_scale_inv' has shape 1x3, but 2x6 is needed for 72x384 numbers in tiles of 64x64",
        ),
        "scales of other rows": (lambda: ({**plain, "weight_scale": np.ones((71, 1), np.float32)}, config("fp8")), BadModelFile, "shape 71x1"),
        "e5m2": (
            lambda: ({**plain, "weight": plain["weight"].view(torch.float8_e5m2)}, config("fp8")),
            BadModelFile,
            "holds F8_E5M2 numbers",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", refused())
def test_wrong_ones_are_named(case: str, tmp_path: Path) -> None:
    make, error, words = refused()[case]
    tensors, how = make()
    path = write(tmp_path / "m.safetensors", tensors)
    with pytest.raises(error, match=words) as caught:
        packed(path, how).read("m.weight")
    if "'m." in str(caught.value):
        assert str(path) in str(caught.value)


def test_scales_of_activations_are_left_alone_and_told(tmp_path: Path) -> None:
    tensors, _ = packers.fp8(weights(), tile=(0, 0), name="weight_scale", flat=True)
    tensors |= {
        "input_scale": np.ones(1, np.float32),
        "k_scale": np.ones(1, np.float32),
        "norm": np.ones(4, np.float32),
    }
    folder = packed(write(tmp_path / "m.safetensors", tensors), config("fp8", activation_scheme="static"))
    assert list(folder.rest) == ["m.norm"]
    told = "\n".join(folder.notes(native=True))
    assert "2 scales of activations" in told and "bfloat16, which rounds" in told and "rounded activations" in told
    assert "bfloat16" not in "\n".join(folder.notes(native=False))


def test_every_method_has_a_reader() -> None:
    assert hub.methods() == ["awq", "compressed-tensors", "compressed_tensors", "fbgemm_fp8", "fp8", "gptq"]


def layout_of(kind: str, n: int, k: int, tmp_path: Path, seed: int = 0) -> Layout:
    make, how, _ = KINDS[kind]
    path = write(tmp_path / f"{n}x{k}.safetensors", make(weights(n, k, seed))[0])
    return packed(path, how).read("m.weight")
