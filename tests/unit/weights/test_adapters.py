"""Adapters on disk: what is read of them, and what is refused, by its name and with the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.observe.errors import BadModelFile, NotFound, QuireError, Unsupported
from quire.weights.adapters.read import open_adapter

save_file = pytest.importorskip("safetensors.numpy").save_file

MODULE = "model.layers.0.self_attn.q_proj"
PREFIX = "base_model.model."


def folder(path: Path, tensors: dict[str, np.ndarray] | None = None, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors if tensors is not None else pair(), path / "adapter_model.safetensors")
    return path


def pair(module: str = MODULE, r: int = 4, n: int = 6, k: int = 10) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((r, k)).astype(np.float32), rng.standard_normal((n, r)).astype(np.float32)
    return {f"{PREFIX}{module}.lora_A.weight": a, f"{PREFIX}{module}.lora_B.weight": b}


def test_a_folder_is_read(tmp_path: Path):
    other = "model.layers.1.self_attn.q_proj"
    made = open_adapter(
        folder(
            tmp_path / "a",
            pair() | pair(other, r=9),
            rank_pattern={r"layers\.1\..*q_proj": 9},
            alpha_pattern={other: 18},
            use_rslora=False,
        )
    )
    assert (made.kind, made.rank) == ("peft", 9)
    by_name = {m.module: m for m in made.modules}
    assert by_name[MODULE].scale == 2.0 and by_name[other].scale == 2.0
    np.testing.assert_array_equal(by_name[MODULE].a.dequantize(), pair()[f"{PREFIX}{MODULE}.lora_A.weight"])
    assert open_adapter(folder(tmp_path / "b", use_rslora=True)).modules[0].scale == 4.0


def test_the_digest_is_of_everything_that_it_computes(tmp_path: Path):
    tensors = pair()
    first = open_adapter(folder(tmp_path / "a", tensors)).digest
    assert open_adapter(folder(tmp_path / "b", tensors)).digest == first
    assert open_adapter(folder(tmp_path / "c", tensors, lora_alpha=9)).digest != first
    tensors[f"{PREFIX}{MODULE}.lora_B.weight"][3, 2] += 1e-6
    assert open_adapter(folder(tmp_path / "d", tensors)).digest != first


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"use_dora": True}, Unsupported, "use_dora is set.*DoRA"),
        ({"modules_to_save": ["lm_head"]}, Unsupported, "modules_to_save is set"),
        ({"bias": "all"}, Unsupported, "bias is 'all'"),
        ({"peft_type": "IA3"}, Unsupported, "peft_type is 'IA3'"),
        ({"fan_in_fan_out": True}, Unsupported, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, Unsupported, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, Unsupported, "pissa_niter_4.*changed base"),
        ({"r": 0}, BadModelFile, "r is 0"),
        ({"lora_alpha": "much"}, BadModelFile, "lora_alpha is the string 'much'"),
        ({"r": 5}, BadModelFile, r"lora_A\.weight' has rank 4, but .* says 5"),
        ({"rank_pattern": {"(a+)+q_proj": 4}}, BadModelFile, "too complicated"),
        ({"rank_pattern": {"[": 4}}, BadModelFile, "no regular expression"),
        ({"rank_pattern": 3}, BadModelFile, "rank_pattern is 3"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_more_than_lora_is_refused_by_name(config: dict[str, Any], error: type, words: str, tmp_path: Path):
    with pytest.raises(error, match=words):
        open_adapter(folder(tmp_path / "a", **config))


def test_broken_pairs_are_refused_with_the_tensor(tmp_path: Path):
    name = f"{PREFIX}{MODULE}.lora_"
    whole = pair()
    for tensors, words in (
        ({f"{name}A.weight": whole[f"{name}A.weight"]}, "has lora_a .* and no lora_b"),
        ({f"{name}B.weight": whole[f"{name}B.weight"]}, "has lora_b .* and no lora_a"),
        ({**whole, f"{name}B.weight": np.zeros((6, 3), np.float32)}, "4x10 and .* 6x3: .* of one rank"),
        ({f"{name}A.weight": np.zeros(4, np.float32), f"{name}B.weight": whole[f"{name}B.weight"]}, "has shape 4 and"),
        ({**whole, f"{PREFIX}model.embed_tokens.lora_embedding_A": np.zeros((4, 3), np.float32)}, "embed_tokens"),
        ({**whole, f"{PREFIX}{MODULE}.lora_magnitude_vector.weight": np.zeros(6, np.float32)}, "magnitude_vector"),
        ({}, "no adapter in it"),
    ):
        with pytest.raises((BadModelFile, Unsupported), match=words):
            open_adapter(folder(tmp_path / "a", tensors))


def test_missing_and_pickled_files(tmp_path: Path):
    with pytest.raises(NotFound, match="no adapter at"):
        open_adapter(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFound, match=r"no adapter_config\.json"):
        open_adapter(tmp_path / "empty")
    path = folder(tmp_path / "a")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(Unsupported, match=r"adapter_model\.bin is a pickle.*safetensors"):
        open_adapter(path)
    (path / "adapter_model.bin").unlink()
    with pytest.raises(NotFound, match=r"there is no adapter_model\.safetensors"):
        open_adapter(path)


def gguf_file(path: Path, edit: Callable[[Any], None] = lambda w: None, **keys: Any) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_string("general.type", keys.get("type", "adapter"))
    writer.add_string("adapter.type", keys.get("adapter", "lora"))
    if "alpha" not in keys or keys["alpha"] is not None:
        writer.add_float32("adapter.lora.alpha", keys.get("alpha", 8.0))
    for half, data in zip("ab", pair().values(), strict=True):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{half}", data)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_is_read(tmp_path: Path):
    made = open_adapter(gguf_file(tmp_path / "a.gguf"))
    (lora,) = made.modules
    assert (made.kind, made.architecture, lora.module, lora.scale) == ("gguf", "llama", "blk.0.attn_q", 2.0)
    assert (lora.a.shape, lora.b.shape) == ((4, 10), (6, 4))
    assert open_adapter(gguf_file(tmp_path / "b.gguf", alpha=0.0)).modules[0].scale == 1.0


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"type": "model"}, "is no adapter: key 'general.type' is 'model'"),
        ({"adapter": "ia3"}, "adapter.type' is 'ia3'"),
        ({"alpha": None}, "adapter.lora.alpha"),
        ({"alpha": float("nan")}, "alpha' is nan"),
        ({"edit": lambda w: w.add_tensor("blk.0.attn_norm.weight", np.ones(10, np.float32))}, "attn_norm.* no half"),
        ({"edit": lambda w: w.add_tensor("blk.1.attn_q.weight.lora_a", np.ones((4, 10), np.float32))}, "no lora_b"),
    ],
    ids=["a model", "another kind", "no alpha", "alpha is no number", "a whole tensor", "half a pair"],
)
def test_a_gguf_that_is_no_adapter_is_refused(keys: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(QuireError, match=words):
        open_adapter(gguf_file(tmp_path / "a.gguf", **keys))


def test_files_cut_short_are_refused(tmp_path: Path):
    for path in (folder(tmp_path / "a") / "adapter_model.safetensors", gguf_file(tmp_path / "a.gguf")):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - 8])
        with pytest.raises(BadModelFile, match=path.name):
            open_adapter(path.parent if path.suffix == ".safetensors" else path)
