"""The real Gemma 3 270M, quantized, against transformers on weights that the gguf package dequantizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.observe.errors import QuireError
from quire.weights.store.store import Store
from tests.unit.models.programs import Loaded

torch = pytest.importorskip("torch", reason="needs the test extra: torch is the independent implementation")

NAME = "gemma3:270m"
PER_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


@pytest.fixture(scope="module")
def path() -> Path:
    """The file, where it has been pulled: a quarter of a gigabyte is not fetched for a test."""
    try:
        return Store().resolve(NAME)
    except QuireError:
        pytest.skip(f"needs the model {NAME} in the store: quire pull {NAME}")


def from_gguf(path: Path) -> Any:
    """The file as a transformers model, with none of our code."""
    import gguf
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    reader = gguf.GGUFReader(str(path))

    def value(key: str) -> Any:
        return reader.fields[f"gemma3.{key}"].contents()

    tensors = {t.name: t for t in reader.tensors}
    config = Gemma3TextConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("attention.key_length"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        sliding_window=value("attention.sliding_window"),
        query_pre_attn_scalar=256,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    config._attn_implementation = "eager"
    model = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stem = name.removesuffix(".weight")
            known = WHOLE.get(stem) or f"blk.{stem.split('.')[2]}.{PER_LAYER[stem.split('.', 3)[3]]}"
            tensor = tensors[f"{known}.weight"]
            data = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            parameter.copy_(torch.from_numpy(data - 1.0 if stem.endswith("norm") else data).reshape(parameter.shape))
    return model


@pytest.mark.large
def test_logits_are_those_of_transformers(path: Path):
    """Past its window of 512, in chunks; the reference has the exact weights, so only float16 keys and values differ."""
    model, loaded = from_gguf(path), Loaded(path, "reference", most=640)
    tokens = [2, *np.random.default_rng(7).integers(1000, 60000, 620).tolist()]
    with torch.no_grad():
        want = model(torch.tensor([tokens])).logits[0].numpy()
    got = loaded.logits(tokens, 256)
    error = np.abs(got - want)
    assert error.max() < 0.02 * want.std(), f"{error.max() / want.std():.1e}"
    assert (got.argmax(-1) == want.argmax(-1)).mean() > 0.99
