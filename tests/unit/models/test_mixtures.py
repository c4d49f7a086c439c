"""Mixtures of experts against transformers that wrote them, and against a GGUF of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_equal(name: str, backend: str, tmp_path: Path):
    """Prompts that cross pages, chunks and windows, from one file and from shards."""
    kind, changes = VARIANTS[name]
    model = mixtures.build(kind, **changes)
    loaded = Loaded(folders.save(model, tmp_path / "m", shard="60KB" if len(name) % 2 else "5GB"), backend, most=256)
    rng = np.random.default_rng(1)
    for length, chunk in ((1, None), (17, 5), (100, 33), (200, 64)):
        tokens = rng.integers(0, 160, length).tolist()
        want = exact_logits(model, tokens, rounded=backend != "torch")
        np.testing.assert_allclose(loaded.logits(tokens, chunk), want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GGUFS)
def test_a_gguf_of_the_same_weights_gives_the_same_logits(name: str, backend: str, tmp_path: Path):
    kind, changes, how = GGUFS[name]
    model = mixtures.build(kind, **changes)
    loaded = Loaded(mixtures.write_gguf(kind, model, tmp_path / "m.gguf", **how), backend, most=128)
    tokens = np.random.default_rng(3).integers(0, 160, 110).tolist()
    want = exact_logits(model, tokens, rounded=backend != "torch")
    np.testing.assert_allclose(loaded.logits(tokens, 33), want, atol=1e-3, rtol=1e-3)
