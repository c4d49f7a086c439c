"""Mixtures of experts against transformers that wrote them, and against a GGUF of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import models
from quire.observe.errors import BadModelFile, QuireError, Unsupported
from quire.weights.checkpoint import open_checkpoint
from tests.unit.models import folders, mixtures
from tests.unit.models.mixtures import exact_logits
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

BACKENDS = ["reference", "native", "torch"]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral, a window": ("mixtral", {"sliding_window": 48}),
    "mixtral, tied": ("mixtral", {"tie_word_embeddings": True}),
    "qwen2moe": ("qwen2moe", {}),
    "qwen2moe, normalized": ("qwen2moe", {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2moe, some layers plain": ("qwen2moe", {"mlp_only_layers": [1], "decoder_sparse_step": 1}),
    "qwen2moe, windows": ("qwen2moe", {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 3}),
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe, every second layer": ("qwen3moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "qwen3moe, a window, biases": (
        "qwen3moe",
        {"use_sliding_window": True, "sliding_window": 33, "attention_bias": True},
    ),
    "olmoe": ("olmoe", {}),
    "olmoe, normalized": ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
    "granitemoe": ("granitemoe", {}),
    "qwen3next": ("qwen3next", {}),
    "qwen3next, other layers": (
        "qwen3next",
        {
            "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm4moe": ("glm4moe", {}),
    "glm4moe, groups": ("glm4moe", {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": False}),
    "gpt-oss": ("gpt-oss", {}),
    "gpt-oss, other windows": (
        "gpt-oss",
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "swiglu_limit": 0.5},
    ),
    "deepseek2": ("deepseek2", {}),
    "deepseek2, groups": (
        "deepseek2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "attention_bias": True},
    ),
    "deepseek2, plain queries, yarn": ("deepseek2", {"q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek2, two mscales": ("deepseek2", {"rope_parameters": {**YARN, "mscale": 1.0}}),
    "deepseek3": ("deepseek3", {}),
    "deepseek3, halves": ("deepseek3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    "deepseek3, yarn": ("deepseek3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
}
GGUFS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mixtral": ("mixtral", {}, {}),
    "qwen2moe": ("qwen2moe", {}, {}),
    "qwen3moe": ("qwen3moe", {}, {}),
    "qwen3next": ("qwen3next", {}, {}),
    "qwen3next, mixed": ("qwen3next", {}, {"mixed": True}),
    "olmoe": ("olmoe", {}, {}),
    "granitemoe": ("granitemoe", {}, {}),
    "glm4moe": ("glm4moe", {}, {}),
    "gpt-oss": ("gpt-oss", {}, {}),
    "deepseek2": ("deepseek2", {}, {}),
    "deepseek2, absorbed": ("deepseek2", {"q_lora_rank": None, "rope_parameters": YARN}, {"absorbed": True}),
    "deepseek2, groups": (
        "deepseek2",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        {},
    ),
    "deepseek3": ("deepseek3", {}, {}),
    "deepseek3, absorbed": ("deepseek3", {}, {"absorbed": True}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A model's folder, of one file or of shards, and what transformers says of some prompts: once for all backends."""
    kind, changes = VARIANTS[request.param]
    model, rng = mixtures.build(kind, **changes), np.random.default_rng(1)
    shard = "60KB" if len(request.param) % 2 else "5GB"
    path = folders.save(model, tmp_path_factory.mktemp("mixture") / "m", shard=shard)
    prompts = [(rng.integers(0, 160, length).tolist(), chunk) for length, chunk in ((1, None), (17, 5), (110, 33))]
    return path, [(tokens, chunk, exact_logits(model, tokens)) for tokens, chunk in prompts]


@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_logits_equal(told: tuple[Path, list[Any]], backend: str):
    """Prompts that cross pages, chunks and windows, from one file and from shards; then one behind a prefix that another left."""
    loaded = Loaded(told[0], backend, most=256)
    for tokens, chunk, want in told[1]:
        np.testing.assert_allclose(loaded.logits(tokens, chunk), want, atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(loaded.after_hit(tokens, 48, 23), want[48:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_of_the_same_weights_gives_the_same_logits(name: str, backend: str, tmp_path: Path):
    kind, changes, how = GGUFS[name]
    model = mixtures.build(kind, **changes)
    loaded = Loaded(mixtures.write_gguf(kind, model, tmp_path / "m.gguf", **how), backend, most=256)
    tokens = np.random.default_rng(3).integers(0, 160, 110).tolist()
    want = exact_logits(model, tokens)
    np.testing.assert_allclose(loaded.logits(tokens, 33), want, atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(loaded.after_hit(tokens, 48, 23), want[48:], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["folder", "gguf"])
def test_mxfp4_experts_give_what_their_exact_numbers_give(where: str, backend: str, tmp_path: Path):
    """The folder is as gpt-oss was published; transformers and the gguf package say what the numbers are."""
    model = mixtures.build("gpt-oss")
    if where == "folder":
        path = mixtures.save_mxfp4(model, tmp_path / "m")
    else:
        path = mixtures.write_gguf("gpt-oss", model, tmp_path / "m.gguf", experts="MXFP4")
        mixtures.round_experts(model, "MXFP4")
    loaded = Loaded(path, backend, most=128)
    tokens = np.random.default_rng(5).integers(0, 160, 100).tolist()
    got, want = loaded.logits(tokens, 33), exact_logits(model, tokens)
    if backend == "native":  # activations are rounded to int8 there
        assert np.abs(got - want).mean() < 0.05 * want.std()
    else:
        np.testing.assert_allclose(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss", "qwen3moe", "deepseek2"])
def test_stacks_of_quantized_experts(kind: str, tmp_path: Path):
    model = mixtures.build(kind)
    path = mixtures.write_gguf(kind, model, tmp_path / "m.gguf", experts="Q4_0")
    mixtures.round_experts(model, "Q4_0")
    tokens = np.random.default_rng(6).integers(0, 160, 40).tolist()
    got = Loaded(path, "reference", most=64).logits(tokens)
    np.testing.assert_allclose(got, exact_logits(model, tokens), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("old", [False, True])
def test_mixtral_with_and_without_stacks(old: bool, tmp_path: Path):
    """Files of the first months have a tensor per expert."""
    model = mixtures.build("mixtral")
    path = mixtures.write_gguf("mixtral", model, tmp_path / "m.gguf", apart=old)
    tokens = list(range(3, 40))
    got = Loaded(path, "reference", most=64).logits(tokens)
    np.testing.assert_allclose(got, exact_logits(model, tokens), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss", "qwen2moe", "qwen3next", "deepseek3"])
@pytest.mark.parametrize(
    ("backend", "device"),
    [
        pytest.param("reference", "auto", marks=pytest.mark.large),  # slow, and its logits are compared above
        ("native", "auto"),
        ("torch", "cpu"),
    ],
)
def test_greedy_continuations_are_those_of_transformers(kind: str, backend: str, device: str, tmp_path: Path):
    """Through the engine, cold and with prefix hits, chunks smaller than the prompts, windows smaller than them."""
    from quire.config import EngineConfig, Environment
    from quire.engine.construction.build import build_engine
    from quire.engine.types import Request
    from quire.runner.params import SamplingParams

    if (kind, backend) == ("qwen3next", "reference"):
        pytest.skip("needs nothing: tests/unit/engine/test_engine_states.py has this one")
    model = mixtures.build(kind)
    folders.save(model, tmp_path / "m")
    rng = np.random.default_rng(4)
    shared = rng.integers(3, 160, 50).tolist()
    prompts = [shared, shared + rng.integers(3, 160, 30).tolist(), shared[:40] + rng.integers(3, 160, 9).tolist()]
    config = EngineConfig(
        path=str(tmp_path / "m"), backend=backend, device=device, max_seqs=4, max_batch_tokens=24, context=256
    )
    engine, _ = build_engine(config, Environment(home=tmp_path / "home", threads=2))
    cached = []
    try:
        for n, prompt in enumerate([*prompts, prompts[1]]):
            engine.add(Request(id=str(n), tokens=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=12)))
            heard: list[int] = []
            while engine.busy:
                for event in engine.step():
                    assert event.error is None, event.error
                    heard += event.tokens
                    if event.receipt is not None:
                        cached.append(event.receipt.cached_tokens)
            assert len(heard) == 12 and heard == mixtures.continued(model, prompt, heard), n
    finally:
        engine.close()
    assert cached[0] == 0 and all(n > 0 for n in cached[1:])


BAD: dict[str, tuple[str, dict[str, Any], type[QuireError], str]] = {
    "more experts": ("mixtral", {"num_local_experts": 6}, BadModelFile, r"experts.5.w1.weight.* is missing|shape 5x96"),
    "fewer experts": ("mixtral", {"num_local_experts": 4}, BadModelFile, "gate.weight' has shape 5x96.*4x96"),
    "no experts": ("mixtral", {"num_local_experts": 0}, BadModelFile, "num_local_experts is 0"),
    "more chosen than there are": (
        "mixtral",
        {"num_experts_per_tok": 6},
        BadModelFile,
        "6 experts cannot be chosen of 5",
    ),
    "none chosen": ("qwen3moe", {"num_experts_per_tok": 0}, BadModelFile, "num_experts_per_tok is 0"),
    "wider experts": (
        "qwen3moe",
        {"moe_intermediate_size": 96},
        BadModelFile,
        r"gate_proj.weight' has shape 64x96.*96x96",
    ),
    "layers that are none": ("qwen3moe", {"mlp_only_layers": [3]}, BadModelFile, "mlp_only_layers"),
    "a shared expert that is not there": (
        "qwen3moe",
        {"architectures": ["Qwen2MoeForCausalLM"], "shared_expert_intermediate_size": 64},
        BadModelFile,
        "is missing",
    ),
    "norms that nobody asked for": (
        "qwen3moe",
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        BadModelFile,
        "is missing",
    ),
    "another activation": ("qwen2moe", {"hidden_act": "gelu"}, Unsupported, "hidden_act is 'gelu'"),
    "value heads that do not share": (
        "qwen3next",
        {"linear_num_value_heads": 3},
        BadModelFile,
        "3 value heads cannot share 2 key heads",
    ),
    "another sort of layer": ("qwen3next", {"layer_types": ["mamba"] * 5}, Unsupported, "layer_types has 'mamba'"),
    "no layer that attends": ("qwen3next", {"layer_types": ["linear_attention"] * 5}, Unsupported, "that attends"),
    "wider states": ("qwen3next", {"linear_key_head_dim": 512}, Unsupported, "keys of 512"),
    "fewer taps": ("qwen3next", {"linear_conv_kernel_dim": 3}, BadModelFile, "conv1d.weight' has shape 160x1x4"),
    "gates that are not there": ("qwen3next", {"head_dim": 64}, BadModelFile, "q_proj.weight' has shape 384x96"),
    "clipped queries": ("olmoe", {"clip_qkv": 8.0}, Unsupported, "clip_qkv is 8.0"),
    "another gain": ("gpt-oss", {"swiglu_alpha": 1.5}, Unsupported, "swiglu_alpha is 1.5"),
    "an activation without a limit": ("gpt-oss", {"swiglu_limit": 0}, BadModelFile, "swiglu_limit is 0"),
    "another quantization": (
        "gpt-oss",
        {"quantization_config": {"quant_method": "gptq"}},
        Unsupported,
        "quantization_config: gptq",
    ),
    "codes that are not there": (
        "gpt-oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
        BadModelFile,
        "gate_up_proj_blocks' of shape 6x256x3x16 is missing",
    ),
    "fp8": (
        "deepseek3",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        BadModelFile,
        "none of .* tensors is a weight of that kind",
    ),
    "another score": ("deepseek3", {"scoring_func": "softmax"}, Unsupported, "scoring_func is softmax"),
    "another method": ("deepseek2", {"topk_method": "noaux_tc"}, Unsupported, "topk_method is 'noaux_tc'"),
    "normalized or not": ("deepseek2", {"norm_topk_prob": True}, Unsupported, "norm_topk_prob is True"),
    "uneven groups": ("deepseek3", {"n_group": 3}, BadModelFile, "8 experts do not lie in 3 groups"),
    "too few groups": (
        "deepseek3",
        {"n_group": 4, "topk_group": 1},
        BadModelFile,
        "3 experts cannot be chosen of 1 groups of 2",
    ),
    "groups of one": ("deepseek3", {"n_group": 8, "topk_group": 4}, BadModelFile, "8 groups"),
    "layers here and there": ("deepseek2", {"moe_layer_freq": 2}, Unsupported, "moe_layer_freq is 2"),
    "more dense layers": ("deepseek2", {"first_k_dense_replace": 2}, BadModelFile, "mlp.gate_proj.weight.* is missing"),
    "dense layers beyond the last": (
        "deepseek2",
        {"first_k_dense_replace": 4},
        BadModelFile,
        "first_k_dense_replace is 4",
    ),
    "another rank": ("deepseek2", {"kv_lora_rank": 40}, BadModelFile, r"kv_a_proj_with_mqa.weight' has shape 48x96"),
    "an odd rank": ("deepseek2", {"kv_lora_rank": 36}, Unsupported, "a rank of 36"),
    "queries of low rank that are not": ("deepseek2", {"q_lora_rank": None}, BadModelFile, "q_proj.weight' of shape"),
    "shared keys": ("deepseek2", {"num_key_value_heads": 2}, Unsupported, "num_key_value_heads"),
    "strange yarn": (
        "deepseek2",
        {"rope_parameters": {**YARN, "spin": 1}},
        Unsupported,
        "spin is not understood",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for kind in {kind for kind, *_ in BAD.values()}:
        folders.save(mixtures.build(kind), root / kind)
    return root


@pytest.mark.parametrize("name", BAD)
def test_a_configuration_that_lies_is_refused(name: str, saved: Path, tmp_path: Path):
    import shutil

    kind, changes, error, why = BAD[name]
    path = Path(shutil.copytree(saved / kind, tmp_path / "m"))
    folders.edit(path / "config.json", **changes)
    with pytest.raises(error, match=why):
        models.load(open_checkpoint(path))


BAD_GGUF: dict[str, tuple[str, dict[str, Any], type[QuireError], str]] = {
    "more chosen than there are": (
        "qwen3moe",
        {"expert_used_count": 9},
        BadModelFile,
        "9 experts cannot be chosen of 8",
    ),
    "fewer experts": ("qwen3moe", {"expert_count": 4}, BadModelFile, "ffn_gate_inp.weight' has shape 8x96"),
    "no width": ("qwen3moe", {"expert_feed_forward_length": None}, BadModelFile, "expert_feed_forward_length"),
    "another function": ("deepseek3", {"expert_gating_func": 4}, Unsupported, "expert_gating_func is 4"),
    "clamped": ("olmoe", {"attention.clamp_kqv": 8.0}, Unsupported, "clamp_kqv"),
    "uneven values": ("qwen3next", {"ssm.inner_size": 98}, BadModelFile, "98: not 4 equal heads"),
    "no state": ("qwen3next", {"ssm.state_size": None}, BadModelFile, "ssm.state_size"),
    "no rank": ("deepseek2", {"attention.kv_lora_rank": None}, BadModelFile, "kv_lora_rank"),
    "nothing but rotation": ("deepseek2", {"attention.key_length": 16}, Unsupported, "0 plain"),
    "dense layers beyond the last": (
        "deepseek2",
        {"leading_dense_block_count": 9},
        BadModelFile,
        "leading_dense_block",
    ),
}


@pytest.mark.parametrize("name", BAD_GGUF)
def test_metadata_that_lies_is_refused(name: str, tmp_path: Path):
    kind, changes, error, why = BAD_GGUF[name]
    path = mixtures.write_gguf(kind, mixtures.build(kind), tmp_path / "m.gguf", **changes)
    with pytest.raises(error, match=why):
        models.load(open_checkpoint(path))


def test_a_llama_without_experts_is_still_a_llama(tmp_path: Path):
    from tests.unit.models import tiny

    plain = open_checkpoint(tiny.write_gguf(tiny.build(), tmp_path / "a.gguf"))
    mixed = open_checkpoint(mixtures.write_gguf("mixtral", mixtures.build("mixtral"), tmp_path / "b.gguf"))
    assert plain.architecture == mixed.architecture == "llama"
    assert models.family_of(plain).__name__.endswith("llama")
    assert models.family_of(mixed).__name__.endswith("mixtral")
    assert models.supported().count("llama") == 1


def test_layers_behind_the_last_are_left_alone_and_told(tmp_path: Path):
    """DeepSeek V3 and GLM ship layers that predict further tokens."""
    from safetensors.torch import load_file, save_file

    path = folders.save(mixtures.build("deepseek3"), tmp_path / "m", config={"num_nextn_predict_layers": 1})
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(4, 4)
    save_file(tensors, path / "model.safetensors")
    assert "1 tensors in the file are not used" in models.load(open_checkpoint(path)).notes[0]
    folders.edit(path / "config.json", num_nextn_predict_layers=None)
    with pytest.raises(BadModelFile, match=r"model.layers.3.eh_proj.weight' is not one"):
        models.load(open_checkpoint(path))


def test_a_head_that_predicts_further_tokens_is_left_alone_and_told(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    path = folders.save(mixtures.build("qwen3next"), tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.ones(4, 4)
    save_file(tensors, path / "model.safetensors")
    assert "1 tensors in the file are not used by this model: mtp.fc.weight" in models.load(open_checkpoint(path)).notes


def test_a_state_is_of_one_size(tmp_path: Path):
    model = models.load(open_checkpoint(folders.save(mixtures.build("qwen3next"), tmp_path / "m")))
    kv, carry = model.kv(4, 16), model.kv(4, 16).more[0]
    assert (kv.layers, carry.layers) == (1, 4) and carry.token_bytes == 0 and carry.forgets and not kv.forgets
    assert carry.page_bytes == 4 * 4 * (3 * 160 + 4 * 16 * 24)  # rows for the convolution, and a matrix for each head
    assert kv.nbytes == 4 * (16 * kv.token_bytes + carry.page_bytes)


def test_a_latent_pool_is_as_small_as_it_should_be(tmp_path: Path):
    model = models.load(open_checkpoint(folders.save(mixtures.build("deepseek2"), tmp_path / "m")))
    kv = model.kv(4, 16)
    assert (kv.kv_heads, kv.head_dim, kv.latent) == (1, 48, 32)
    assert kv.token_bytes == 3 * 48 * 2  # layers, columns, two bytes; not 6 heads of 40 and of 20 columns


def test_windows_are_told(tmp_path: Path):
    model = models.load(open_checkpoint(folders.save(mixtures.build("gpt-oss"), tmp_path / "m")))
    assert "attention window: 40 tokens in 2 of 3 layers" in model.notes
