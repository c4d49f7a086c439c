"""Rotary frequencies against transformers."""

from __future__ import annotations

import numpy as np
import pytest

from quire.models.rope import Scaling, frequencies

CASES = {
    "none": ({"rope_type": "default"}, Scaling()),
    "linear": ({"rope_type": "linear", "factor": 4.0}, Scaling("linear", 4.0)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        Scaling("llama3", 8.0, 2048, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048},
        Scaling("yarn", 16.0, 2048),
    ),
    "yarn-tuned": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.3,
        },
        Scaling("yarn", 4.0, 4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_agrees_with_transformers(name: str, base: float):
    pytest.importorskip("torch")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters, scaling = CASES[name]
    config = LlamaConfig(
        hidden_size=1024,
        num_attention_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        rope_parameters={**parameters, "rope_theta": base},
    )
    if name == "none":
        inv, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        inv, factor = rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    freq, magnitude = frequencies(base, 128, scaling)
    np.testing.assert_allclose(freq, inv.numpy(), rtol=3e-6)
    assert magnitude == pytest.approx(factor, rel=1e-6)


def test_stored_divisors_are_the_llama3_scaling():
    """A GGUF holds llama3 scaling as one divisor per frequency; both ways must be the same rotation."""
    scaling = Scaling("llama3", 8.0, 8192)
    plain, _ = frequencies(500000.0, 128, Scaling())
    scaled, _ = frequencies(500000.0, 128, scaling)
    again, _ = frequencies(500000.0, 128, Scaling(factors=(plain / scaled).astype(np.float32)))
    np.testing.assert_allclose(again, scaled, rtol=1e-6)
