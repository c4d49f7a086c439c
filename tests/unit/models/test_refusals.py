"""What a file of a dense family may not say: numbers that are not possible, settings that are not understood, strange tensors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.observe.errors import BadModelFile, QuireError, Unsupported
from quire.weights.checkpoint import open_checkpoint
from tests.unit.models import families, folders
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch writes the files")

SLIDING = "sliding_attention"
BAD: dict[tuple[str, str], tuple[dict[str, Any], type[QuireError], str]] = {
    ("qwen3", "zero heads"): ({"num_attention_heads": 0}, BadModelFile, "num_attention_heads is 0"),
    ("qwen3", "absurd width"): ({"hidden_size": 1 << 40}, BadModelFile, "hidden_size is"),
    ("qwen3", "absurd layers"): ({"num_hidden_layers": 1 << 20}, BadModelFile, "num_hidden_layers is"),
    ("qwen3", "another head"): ({"head_dim": 16}, BadModelFile, r"q_proj.weight' has shape 192x96.*96x96"),
    ("qwen3", "relu"): ({"hidden_act": "relu"}, Unsupported, "hidden_act is 'relu'"),
    ("qwen3", "no layers"): ({"num_hidden_layers": None}, BadModelFile, "num_hidden_layers is missing"),
    ("qwen3", "biases"): ({"attention_bias": True}, BadModelFile, "q_proj.bias' of shape 192 is missing"),
    ("qwen3", "longrope"): (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        Unsupported,
        "'longrope' is not supported",
    ),
    ("qwen3", "a layer of another kind"): (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear_attention", SLIDING, SLIDING]},
        Unsupported,
        "layer_types has 'linear_attention'",
    ),
    ("qwen3", "too few layer types"): (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING]},
        BadModelFile,
        "layer_types .*3 names",
    ),
    ("qwen3", "windows without a size"): (
        {"use_sliding_window": True, "sliding_window": None, "layer_types": [SLIDING] * 3},
        BadModelFile,
        "sliding_window is missing",
    ),
    ("qwen3", "windows from nowhere"): (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": -1},
        BadModelFile,
        "max_window_layers is -1",
    ),
    ("gemma2", "gelu"): ({"hidden_activation": "gelu"}, Unsupported, "hidden_activation is 'gelu'"),
    ("gemma2", "a cap of nothing"): ({"attn_logit_softcapping": 0.0}, BadModelFile, "attn_logit_softcapping is 0.0"),
    ("gemma2", "both ways"): (
        {"use_bidirectional_attention": True},
        Unsupported,
        "use_bidirectional_attention is True",
    ),
    ("gemma2", "no scale"): ({"query_pre_attn_scalar": 0}, BadModelFile, "query_pre_attn_scalar is 0"),
    ("gemma2", "no window"): ({"sliding_window": 0}, BadModelFile, "sliding_window is 0"),
    ("gemma3", "a cap"): ({"attn_logit_softcapping": 50.0}, Unsupported, "attn_logit_softcapping is 50.0"),
    ("gemma3", "half a rope"): (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        BadModelFile,
        "sliding_attention is missing",
    ),
    ("gemma3", "a rope that spins"): (
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}, SLIDING: {}}},
        Unsupported,
        "full_attention: rope scaling 'dynamic'",
    ),
    ("phi3", "parts of a head"): (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
        BadModelFile,
        "partial_rotary_factor is 1.5",
    ),
    ("phi3", "factors of another size"): (
        {"rope_parameters": {**families.longrope()["rope_parameters"], "partial_rotary_factor": 0.5}},
        BadModelFile,
        "longrope needs 4 divisors of each kind: there are 6",
    ),
    ("phi3", "factors that are words"): (
        {"rope_parameters": {**families.longrope()["rope_parameters"], "long_factor": ["a"] * 6}},
        BadModelFile,
        "long_factor is",
    ),
    ("phi3", "no factors"): (
        {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0] * 8}},
        BadModelFile,
        "short_factor is None",
    ),
    ("phi3", "wider"): ({"intermediate_size": 64}, BadModelFile, r"gate_up_proj.weight' has shape 256x96.*128x96"),
    ("granite", "no multiplier"): ({"residual_multiplier": 0.0}, BadModelFile, "residual_multiplier is 0.0"),
    ("granite", "no positions"): ({"position_embedding_type": "nope"}, Unsupported, "position_embedding_type is nope"),
    ("olmo2", "no key"): ({"intermediate_size": None}, BadModelFile, "intermediate_size is missing"),
    ("cohere", "one after the other"): ({"use_parallel_block": False}, Unsupported, "use_parallel_block is False"),
    ("cohere", "norms that are not there"): (
        {"use_qk_norm": True},
        BadModelFile,
        "q_norm.weight' of shape 6x16 is miss",
    ),
    ("cohere", "logits of nothing"): ({"logit_scale": 0}, BadModelFile, "logit_scale is 0"),
    ("cohere2", "norms"): ({"use_qk_norm": True}, Unsupported, "use_qk_norm is True"),
    ("glm4", "nothing rotated"): (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.01}},
        BadModelFile,
        "partial_rotary_factor is 0.01",
    ),
    ("glm4", "the model before"): (
        {"architectures": ["GlmForCausalLM"]},
        BadModelFile,
        "post_mlp_layernorm.weight' is not",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = folders.save(families.build(name), tmp_path_factory.mktemp("saved") / "m")
        return made[name]

    return get


@pytest.mark.parametrize(("name", "what"), BAD)
def test_a_configuration_that_lies_is_refused(name: str, what: str, saved: Any, tmp_path: Path):
    changes, error, why = BAD[name, what]
    path = Path(shutil.copytree(saved(name), tmp_path / "m"))
    folders.edit(path / "config.json", **changes)
    with pytest.raises(error, match=why):
        models.load(open_checkpoint(path))


GGUF_BAD: dict[tuple[str, str], tuple[dict[str, Any], type[QuireError], str]] = {
    ("qwen3", "zero heads"): ({"attention.head_count": 0}, BadModelFile, "qwen3.attention.head_count is 0"),
    ("qwen3", "no heads"): ({"attention.head_count": None}, BadModelFile, "'qwen3.attention.head_count' is missing"),
    ("qwen3", "absurd"): ({"block_count": 1 << 30}, BadModelFile, "qwen3.block_count is"),
    ("qwen3", "a layer more"): ({"block_count": 4}, BadModelFile, "tensor 'blk.3.attn_norm.weight'"),
    ("qwen3", "a layer fewer"): ({"block_count": 2}, BadModelFile, "tensor 'blk.2.*11 of 36 tensors are not"),
    ("gemma2", "a cap of nothing"): ({"attn_logit_softcapping": 0.0}, BadModelFile, "attn_logit_softcapping is 0.0"),
    ("gemma3", "no base"): ({"rope.freq_base": None}, BadModelFile, "'gemma3.rope.freq_base' is missing"),
    ("gemma3", "a window behind"): ({"attention.sliding_window": -5}, BadModelFile, "sliding_window is -5"),
    ("cohere", "no scale"): ({"logit_scale": None}, BadModelFile, "'command-r.logit_scale' is missing"),
    ("cohere2", "no window"): ({"attention.sliding_window": None}, BadModelFile, "sliding_window' is missing"),
    ("granite", "no positions"): ({"rope.scaling.finetuned": False}, Unsupported, "rope.scaling.finetuned is false"),
    ("olmo2", "windows"): ({"attention.sliding_window": 8}, Unsupported, "attention.sliding_window is set"),
    ("glm4", "sections"): ({"rope.dimension_sections": 3}, Unsupported, "rope.dimension_sections is set"),
    ("phi3, long factors", "no original"): (
        {"rope.scaling.original_context_length": None},
        BadModelFile,
        "original_context_length' is missing",
    ),
}


def edit_gguf(source: Path, target: Path, changes: dict[str, Any]) -> Path:
    """The same file with other values under its architecture; None takes a key out."""
    import gguf

    reader = gguf.GGUFReader(str(source))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), arch)
    keys = {k: f.contents() for k, f in reader.fields.items() if k.startswith(f"{arch}.")}
    for key, value in {**keys, **{f"{arch}.{k}": v for k, v in changes.items()}}.items():
        if value is not None:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_int32, bool: writer.add_bool}
            add[type(value)](key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(("name", "what"), GGUF_BAD)
def test_metadata_that_lies_is_refused(name: str, what: str, tmp_path: Path):
    changes, error, why = GGUF_BAD[name, what]
    source = families.write_gguf(name, families.build(name), tmp_path / "m.gguf")
    models.load(open_checkpoint(source))  # as it is, it is fine
    with pytest.raises(error, match=why):
        models.load(open_checkpoint(edit_gguf(source, tmp_path / "bad.gguf", changes)))


def test_a_strange_tensor_is_refused(saved: Any, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(saved("olmo2"), tmp_path / "m"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"] = torch.ones(96)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(BadModelFile, match=r"input_layernorm.weight' is not one that a Olmo2ForCausalLM .*1 of 37"):
        models.load(open_checkpoint(path))


def test_the_factors_of_longrope_are_told(saved: Any):
    path = saved("phi3, long factors")
    model = models.load(open_checkpoint(path))
    assert model.config.context == 512 and "above 64 tokens, for short prompts too" in model.notes[-1]
    assert isinstance(model, models.Stretches)
    model.stretch(64)
    assert model.notes[-1] == "longrope: the factors for a context of at most 64 tokens"
    assert not isinstance(models.load(open_checkpoint(saved("qwen3"))), models.Stretches)


def test_windows_are_told_and_bound_nothing(saved: Any):
    model = models.load(open_checkpoint(saved("mistral, window")))
    assert model.config.context == 512 and model.notes == ["attention window: 24 tokens in all layers"]
    assert models.load(open_checkpoint(saved("gemma3"))).notes == ["attention window: 24 tokens in 6 of 7 layers"]
    assert models.load(open_checkpoint(saved("gemma3, a wide window, capped"))).notes == []


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_with_images(prefix: str, saved: Any, tmp_path: Path):
    """As such a folder is: the configuration inside, leaving out what it shares with the first one; a tower beside."""
    import json

    from safetensors.torch import load_file, save_file

    source = saved("gemma3")
    text = json.loads((source / "config.json").read_text())
    renamed = {
        k.replace("model.", prefix, 1) if k.startswith("model.") else k: v
        for k, v in load_file(source / "model.safetensors").items()
    }
    renamed["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.ones(4, 4)
    renamed["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(4)
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": {}}))
    save_file(renamed, tmp_path / "model.safetensors")
    tokens = list(range(3, 60))
    got = Loaded(tmp_path, "reference", most=64)
    np.testing.assert_array_equal(got.logits(tokens), Loaded(source, "reference", most=64).logits(tokens))
    assert any("2 tensors in the file are not used" in note for note in got.model.notes)
    with pytest.raises(BadModelFile, match="text_config is missing"):
        folders.edit(tmp_path / "config.json", text_config=None)
        models.load(open_checkpoint(tmp_path))


def test_pages_of_a_fused_tensor_are_given_back_with_its_last_part(saved: Any, monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_checkpoint(saved("phi3"))
    model: Any = models.load(checkpoint)
    released: list[str] = []
    monkeypatch.setattr(type(checkpoint), "release", lambda self, name: released.append(name))
    attn = model.layers[0].attn
    model.release(attn.q)
    model.release(attn.v)
    assert released == []
    model.release(attn.k)
    assert released == ["model.layers.0.self_attn.qkv_proj.weight"]
