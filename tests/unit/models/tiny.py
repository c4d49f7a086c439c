"""Tiny random Llama models: built with transformers, written as GGUF with the gguf package, both from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

TINY = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PER_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def build(seed: int = 0, **changes: Any) -> Any:
    """A transformers LlamaForCausalLM with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**{**TINY, "head_dim": 16, **changes})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows reordered so that rotated halves become neighbouring pairs, as GGUF files of this family store them."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The way back."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, rows, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """What a GGUF calls a transformers parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem in WHOLE:
        return f"{WHOLE[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{PER_LAYER[rest]}.{kind}"


def from_gguf(path: Path) -> Any:
    """A GGUF file as a transformers model: read and dequantized by the gguf package, with none of our code."""
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    from tests.readers import Reader

    reader = Reader(path)

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    tensors = {t.name: t for t in reader.tensors}
    config = LlamaConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings="output.weight" not in tensors,
    )
    with no_init_weights():  # every one comes from the file
        model = LlamaForCausalLM(config).eval()
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = tensors[gguf_name(name)]
            data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            if "q_proj" in name:
                data = unpermute(data, config.num_attention_heads)
            elif "k_proj" in name:
                data = unpermute(data, config.num_key_value_heads)
            parameter.copy_(torch.from_numpy(np.array(data, np.float32)).reshape(parameter.shape))
    return model


def write_gguf(
    model: Any, path: Path, quantize: str | None = None, extra: dict[str, Any] | None = None, split: int = 0
) -> Path:
    """The model as a GGUF file; matrices quantized to the named type, or float32. split: at most so many tensors in a file."""
    import gguf

    c = model.config
    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=split)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    for key, value in (extra or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        data = tensor.detach().numpy().astype(np.float32)
        if "q_proj" in name:
            data = permute(data, c.num_attention_heads)
        elif "k_proj" in name:
            data = permute(data, c.num_key_value_heads)
        if quantize and data.ndim == 2:
            kind_id = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(data, kind_id), raw_dtype=kind_id)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
