"""Folders as Hugging Face lays them out, against transformers that wrote them and against a GGUF of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.observe.errors import BadModelFile, QuireError, Unsupported
from quire.weights.checkpoint import open_checkpoint
from tests.unit.models import folders, tiny
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

BACKENDS = ["reference", "native", "torch"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "no sharing": ("llama", {"num_key_value_heads": 6}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 32}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 10000.0,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, one window": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
}


def exact_logits(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_equal(name: str, backend: str, tmp_path: Path):
    """Prompts that cross pages and chunks, from one file and from shards, and one behind a prefix that another has left; what
    remains is rounding keys and values."""
    kind, changes = VARIANTS[name]
    model = folders.build(kind, **changes)
    loaded = Loaded(folders.save(model, tmp_path / "m", shard="60KB" if len(name) % 2 else "5GB"), backend, most=256)
    rng = np.random.default_rng(1)
    for length, chunk in ((1, None), (17, 5), (100, 33), (200, 64)):
        tokens = rng.integers(0, 160, length).tolist()
        got, want = loaded.logits(tokens, chunk), exact_logits(model, tokens)
        np.testing.assert_allclose(got, want, atol=5e-3, rtol=2e-3)
    np.testing.assert_allclose(loaded.after_hit(tokens[:110], 48, 23), want[48:110], atol=5e-3, rtol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_computed_in_float32(dtype: str, backend: str, tmp_path: Path):
    model = folders.build("qwen2")
    folders.save(model, tmp_path / "m", dtype=getattr(torch, dtype))
    model = model.float()  # the rounded weights, in exact arithmetic
    loaded = Loaded(tmp_path / "m", backend, most=128)
    tokens = np.random.default_rng(2).integers(0, 160, 90).tolist()
    np.testing.assert_allclose(loaded.logits(tokens, 40), exact_logits(model, tokens), atol=5e-3, rtol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_of_the_same_weights_gives_the_same_logits(backend: str, tied: bool, tmp_path: Path):
    """Rows of queries and keys lie in another order there; the sums are the same."""
    model = folders.build("llama", tie_word_embeddings=tied)
    ours = Loaded(folders.save(model, tmp_path / "m", shard="60KB"), backend, most=128)
    theirs = Loaded(tiny.write_gguf(model, tmp_path / "m.gguf"), backend, most=128)
    tokens = np.random.default_rng(3).integers(0, 160, 70).tolist()
    np.testing.assert_allclose(ours.logits(tokens, 33), theirs.logits(tokens, 33), atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize(("backend", "device"), [("reference", "auto"), ("native", "auto"), ("torch", "cpu")])
def test_greedy_continuations_are_those_of_transformers(backend: str, device: str, tmp_path: Path):
    """Through the engine, cold and with prefix hits, chunks smaller than the prompts."""
    from quire.config import EngineConfig, Environment
    from quire.engine.construction.build import build_engine
    from quire.engine.types import Request
    from quire.runner.params import SamplingParams

    model = folders.build("llama", rope_parameters=LLAMA3)
    folders.save(model, tmp_path / "m", shard="60KB")
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 160, 50).tolist()
    prompts = [shared, shared + rng.integers(3, 160, 30).tolist(), shared[:40] + rng.integers(3, 160, 9).tolist()]
    config = EngineConfig(
        path=str(tmp_path / "m"), backend=backend, device=device, max_seqs=4, max_batch_tokens=24, context=256
    )
    engine, info = build_engine(config, Environment(home=tmp_path / "home", threads=2))
    cached = []
    try:
        for n, prompt in enumerate([*prompts, *prompts]):
            engine.add(Request(id=str(n), tokens=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=8)))
            heard: list[int] = []
            while engine.busy:
                for event in engine.step():
                    assert event.error is None, event.error
                    heard += event.tokens
                    if event.receipt is not None:
                        cached.append(event.receipt.cached_tokens)
            with torch.no_grad():
                want = model.generate(
                    torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
                )
            assert heard == want[0, len(prompt) :].tolist(), n
    finally:
        engine.close()
    assert info.architecture == "LlamaForCausalLM" and cached[0] == 0 and all(n > 0 for n in cached[1:])


BAD: dict[str, tuple[dict[str, Any], type[QuireError], str]] = {
    "another architecture": (
        {"architectures": ["MambaForCausalLM"]},
        Unsupported,
        r"'MambaForCausalLM' is not supp.*Llama",
    ),
    "no class, another type": ({"architectures": None, "model_type": "gpt2"}, Unsupported, "'gpt2'"),
    "classes that are none": ({"architectures": 3}, BadModelFile, "architectures"),
    "more layers": (
        {"num_hidden_layers": 4},
        BadModelFile,
        r"tensor 'model.layers.3.input_layernorm.weight' of shape 96",
    ),
    "fewer layers": (
        {"num_hidden_layers": 2},
        BadModelFile,
        r"model.safetensors: tensor 'model.layers.2.*9 of 30 tensors",
    ),
    "zero heads": ({"num_attention_heads": 0}, BadModelFile, "num_attention_heads is 0"),
    "negative": ({"hidden_size": -96}, BadModelFile, "hidden_size is -96"),
    "a word": ({"hidden_size": "wide"}, BadModelFile, "hidden_size is the string 'wide'"),
    "a fraction": ({"intermediate_size": 1.5}, BadModelFile, "intermediate_size is 1.5"),
    "absurd": ({"hidden_size": 1 << 40}, BadModelFile, f"hidden_size is {1 << 40}"),
    "wider": (
        {"intermediate_size": 256},
        BadModelFile,
        r"'model.layers.0.mlp.gate_proj.weight' has shape 128x96, .*256x96",
    ),
    "a larger vocabulary": ({"vocab_size": 161}, BadModelFile, r"embed_tokens.weight' has shape 160x96.*161x96"),
    "uneven heads": ({"num_key_value_heads": 4}, BadModelFile, "6 heads cannot share 4"),
    "odd heads": ({"head_dim": 20}, Unsupported, "heads of 20"),
    "biases that are not there": ({"attention_bias": True}, BadModelFile, "q_proj.bias' of shape 96 is missing"),
    "gelu": ({"hidden_act": "gelu"}, Unsupported, "gelu"),
    "quantized": ({"quantization_config": {"quant_method": "hqq"}}, Unsupported, "quantization_config: hqq"),
    "half said": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, BadModelFile, "group_size is None"),
    "quantized, but not": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        BadModelFile,
        "none of 30 tensors is a qweight",
    ),
    "another family's": ({"quantization_config": {"quant_method": "mxfp4"}}, Unsupported, "quantization_config: mxfp4"),
    "no context": ({"max_position_embeddings": None}, BadModelFile, "max_position_embeddings is missing"),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, Unsupported, "'dynamic'"),
    "a rope that is none": ({"rope_parameters": [1]}, BadModelFile, "rope_parameters"),
    "a strange rope": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "spin": 1}}, Unsupported, "spin"),
    "half a rope": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, Unsupported, "0.5"),
    "llama3 without its numbers": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        BadModelFile,
        "low_freq",
    ),
    "no factor": ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, BadModelFile, "factor is 0"),
    "tied to nothing": ({"eos_token_id": 2, "tie_word_embeddings": "yes"}, BadModelFile, "tie_word_embeddings"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save(folders.build("llama"), tmp_path_factory.mktemp("saved") / "m")


@pytest.mark.parametrize("name", BAD)
def test_a_configuration_that_lies_is_refused(name: str, saved: Path, tmp_path: Path):
    import shutil

    changes, error, why = BAD[name]
    path = Path(shutil.copytree(saved, tmp_path / "m"))
    folders.edit(path / "config.json", **changes)
    with pytest.raises(error, match=why):
        models.load(open_checkpoint(path))


def test_an_architecture_is_refused_before_weights_are_looked_at(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"architectures": ["FalconForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(Unsupported, match=r"FalconForCausalLM.*LlamaForCausalLM,.* Qwen2ForCausalLM"):
        models.load(open_checkpoint(tmp_path))


def test_files_older_than_their_class_are_read(saved: Path, tmp_path: Path):
    """rope_theta and rope_scaling beside each other, no head_dim, no class: as files of years past have it."""
    import shutil

    model = folders.build("llama", rope_parameters=LLAMA3)
    path = folders.save(model, tmp_path / "m")
    old = {k: v for k, v in LLAMA3.items() if k not in ("rope_theta", "rope_type")}
    folders.edit(
        path / "config.json",
        rope_parameters=None,
        architectures=None,
        head_dim=None,
        rope_theta=10000.0,
        rope_scaling={**old, "type": "llama3"},
    )
    tokens = list(range(3, 150))
    np.testing.assert_allclose(
        Loaded(path, "reference", most=256).logits(tokens), exact_logits(model, tokens), atol=5e-3, rtol=2e-3
    )
    shutil.rmtree(path)


def test_a_window_that_is_not_in_use_is_none(tmp_path: Path):
    path = folders.save(folders.build("qwen2", sliding_window=64), tmp_path / "q")
    model = models.load(open_checkpoint(path))
    assert model.config.context == 512 and model.notes == []


def test_yarn_reaches_beyond_what_is_written_down(saved: Path, tmp_path: Path):
    import shutil

    path = Path(shutil.copytree(saved, tmp_path / "m"))
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    folders.edit(path / "config.json", rope_parameters=rope)
    assert models.load(open_checkpoint(path)).config.context == 2048


def test_a_copy_of_the_tied_embedding_is_told_and_frequencies_are_not(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    path = folders.save(folders.build("llama", tie_word_embeddings=True), tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path / "model.safetensors")
    assert "lm_head.weight is not used" in models.load(open_checkpoint(path)).notes[0]
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(BadModelFile, match=r"q_norm.weight' is not one that a LlamaForCausalLM"):
        models.load(open_checkpoint(path))
