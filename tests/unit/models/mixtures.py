"""Tiny random mixtures of experts: built with transformers, and the same weights written as GGUF with the gguf package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.models.tiny import permute

SIZES = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2moe": ("Qwen2Moe", {**QWEN, "shared_expert_intermediate_size": 96}),
    "qwen3moe": ("Qwen3Moe", {**QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3next": (
        "Qwen3Next",
        {
            **QWEN,
            "rms_norm_eps": 1e-4,  # what a delta net normalizes may be next to nothing: with less, float32 loses it
            "num_hidden_layers": 5,
            "head_dim": 32,
            "shared_expert_intermediate_size": 96,
            "full_attention_interval": 3,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "glm4moe": (
        "Glm4Moe",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 40,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "deepseek2": ("DeepseekV2", {**LATENT, "n_shared_experts": 2, "routed_scaling_factor": 1.3}),
    "deepseek3": (
        "DeepseekV3",
        {**LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_mtp_layers": 0},
    ),
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights, large enough for every part to count."""
    import torch
    import transformers

    torch.manual_seed(seed)
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    made = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in made.state_dict().items():
            if key.endswith(("e_score_correction_bias", "router.bias", "sinks", "_bias")):
                value.copy_(torch.randn_like(value) * 0.3)
            elif value.dim() > 1:
                large = 0.3 if "gate.weight" in key or "router" in key else 0.5 if "conv1d" in key else 0.08
                value.copy_(torch.randn_like(value) * large)
            else:
                value.add_(torch.randn_like(value) * 0.1)
    return made


def exact_logits(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Logits of every token. Keys and values are rounded as in a float16 cache, so that routers see the same numbers."""
    import torch
    from transformers import DynamicCache

    class Halves(DynamicCache):
        def update(self, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key.half().to(key.dtype), value.half().to(value.dtype), *args, **kwargs)

    # Layers that carry a state are found by the configuration; with it others would forget what is behind their window.
    kept = Halves(config=model.config) if model.config.model_type == "qwen3_next" else Halves()
    with torch.no_grad():
        return model(torch.tensor([tokens]), past_key_values=kept).logits[0].numpy()


def continued(model: Any, prompt: list[int], heard: list[int]) -> list[int]:
    """What greedy sampling would have said at each place of what was heard."""
    logits = exact_logits(model, prompt + heard[:-1])
    return logits[len(prompt) - 1 :].argmax(axis=-1).tolist()


def round_experts(model: Any, kind: str) -> None:
    """The experts' matrices become what a GGUF of that type holds of them, by the gguf package."""
    import gguf
    import torch

    type_ = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if "experts" not in key or "shared" in key or value.dim() < 3:
                continue
            turned = "GptOss" in type(model).__name__
            x = value.transpose(1, 2) if turned else value
            packed = gguf.quants.quantize(x.contiguous().numpy(), type_)
            exact = torch.from_numpy(gguf.quants.dequantize(packed, type_).copy()).reshape(x.shape)
            value.copy_(exact.transpose(1, 2) if turned else exact)


def save_mxfp4(model: Any, path: Path, seed: int = 0) -> Path:
    """A gpt-oss folder with random MXFP4 experts, as it was published; the model gets the same numbers from transformers."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from tests.unit.models import folders

    generator = torch.Generator().manual_seed(seed)
    packed = {}
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
                e, k, n = value.shape
                blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8, generator=generator)
                scales = torch.randint(121, 125, (e, n, k // 32), dtype=torch.uint8, generator=generator)
                value.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
                packed[key] = (blocks, scales)
    folders.save(model, path)
    tensors = load_file(path / "model.safetensors")
    for key, (blocks, scales) in packed.items():
        del tensors[key]
        tensors[f"{key}_blocks"], tensors[f"{key}_scales"] = blocks, scales
    save_file(tensors, path / "model.safetensors")
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    folders.edit(path / "config.json", quantization_config=how)
    return path


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_qkvz": "ssm_in",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    **{f"mlp.shared_expert.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{p}_proj": f"ffn_{p}_shexp" for p in ("gate", "up", "down")},
}
POST_NORM = ("glm4moe", "gpt-oss", "qwen3next")  # their files call the norm before the experts after what it follows
PERMUTED = ("mixtral", "granitemoe")


def _renamed(kind: str, key: str, x: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """What a parameter becomes in a GGUF: names and arrays."""
    stem, last = key.rsplit(".", 1)
    if kind == "qwen3next" and last == "weight" and stem.endswith("norm") and "linear_attn" not in stem:
        x = x + 1.0
    if stem in NAMES:
        yield f"{NAMES[stem]}.{last}", x
        return
    _, _, layer, rest = key.split(".", 3)
    block, stem = f"blk.{layer}.", rest.rsplit(".", 1)[0]
    if stem.endswith("experts") and "shared" not in stem:
        if last.startswith("gate_up"):
            axis = x.ndim - 1 if kind == "gpt-oss" else 1
            parts = np.split(x, 2, axis) if kind != "gpt-oss" else (x[..., ::2], x[..., 1::2])
            for name, part in zip(("gate", "up"), parts, strict=True):
                yield (
                    f"{block}ffn_{name}_exps.{'bias' if last.endswith('bias') else 'weight'}",
                    _turned(kind, last, part),
                )
        else:
            yield f"{block}ffn_down_exps.{'bias' if last.endswith('bias') else 'weight'}", _turned(kind, last, x)
    elif rest == "linear_attn.A_log":
        yield f"{block}ssm_a", -np.exp(x)
    elif rest == "linear_attn.dt_bias":
        yield f"{block}ssm_dt.bias", x
    elif stem == "linear_attn.conv1d":
        yield f"{block}ssm_conv1d.weight", x.squeeze(1)
    elif last == "e_score_correction_bias":
        yield f"{block}exp_probs_b.bias", x
    elif last == "sinks":
        yield f"{block}attn_sinks.weight", x
    else:
        name = NAMES[stem]
        if name == "ffn_norm" and kind in POST_NORM:
            name = "post_attention_norm"
        if kind in PERMUTED and name in ("attn_q", "attn_k"):
            x = permute(x, config.num_attention_heads if name == "attn_q" else config.num_key_value_heads)
        yield f"{block}{name}.{last}", x.reshape(-1) if name == "ffn_gate_inp_shexp" else x


def _turned(kind: str, last: str, x: np.ndarray) -> np.ndarray:
    return x.swapaxes(1, 2) if kind == "gpt-oss" and not last.endswith("bias") else x


def keys(kind: str, c: Any) -> dict[str, Any]:
    """Metadata of such a file, without the architecture's name."""
    found: dict[str, Any] = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.freq_base": float(c.rope_parameters["rope_theta"]),
        "expert_count": getattr(c, "num_experts", None) or getattr(c, "num_local_experts", 0),
        "expert_used_count": c.num_experts_per_tok,
    }
    if kind in ("mixtral", "qwen3moe", "glm4moe", "gpt-oss", "qwen3next"):
        found |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if kind in ("qwen2moe", "qwen3moe", "glm4moe", "deepseek2", "deepseek3", "qwen3next"):
        found["expert_feed_forward_length"] = c.moe_intermediate_size
    if kind == "qwen3next":
        found |= {
            "rope.dimension_count": c.head_dim // 4,
            "ssm.conv_kernel": c.linear_conv_kernel_dim,
            "ssm.state_size": c.linear_key_head_dim,
            "ssm.group_count": c.linear_num_key_heads,
            "ssm.time_step_rank": c.linear_num_value_heads,
            "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
            "full_attention_interval": 1 + c.layer_types.index("full_attention"),
        }
    if kind in ("qwen2moe", "qwen3next"):
        found["expert_shared_feed_forward_length"] = c.shared_expert_intermediate_size
    if kind == "granitemoe":
        found |= {
            "attention.scale": c.attention_multiplier,
            "embedding_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "logit_scale": c.logits_scaling,
        }
    if kind in ("glm4moe", "deepseek2", "deepseek3"):
        found |= {
            "expert_shared_count": c.n_shared_experts,
            "expert_weights_scale": c.routed_scaling_factor,
            "expert_weights_norm": bool(c.norm_topk_prob),
            "leading_dense_block_count": c.first_k_dense_replace,
            "expert_gating_func": 1 if kind == "deepseek2" else 2,
        }
        if (c.n_group or 1) > 1:
            found |= {"expert_group_count": c.n_group, "expert_group_used_count": c.topk_group}
    if kind == "glm4moe":
        found["rope.dimension_count"] = c.head_dim // 2
    if kind == "gpt-oss":
        found |= {"attention.sliding_window": c.sliding_window, "expert_feed_forward_length": c.intermediate_size}
    if kind.startswith("deepseek"):
        found |= {
            "attention.kv_lora_rank": c.kv_lora_rank,
            "attention.key_length": c.qk_nope_head_dim + c.qk_rope_head_dim,
            "attention.value_length": c.v_head_dim,
            "rope.dimension_count": c.qk_rope_head_dim,
        }
        if c.q_lora_rank:
            found["attention.q_lora_rank"] = c.q_lora_rank
    if c.rope_parameters["rope_type"] == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": c.rope_parameters["factor"],
            "rope.scaling.original_context_length": c.rope_parameters["original_max_position_embeddings"],
        }
        if "mscale_all_dim" in c.rope_parameters:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * c.rope_parameters["mscale_all_dim"]
    return found


def write_gguf(
    kind: str,
    model: Any,
    path: Path,
    *,
    experts: str | None = None,
    absorbed: bool = False,
    apart: bool = False,
    mixed: bool = False,
    **more: Any,
) -> Path:
    """The model as a GGUF. experts: the type of their matrices; absorbed: kv_b in two parts, as newer files have it; apart: a
    tensor per expert, as older ones have it; mixed: all that a delta net projects in one matrix, as older ones have it;
    more: other metadata."""
    import gguf

    c = model.config
    arch = {"mixtral": "llama", "deepseek3": "deepseek2"}.get(kind, kind)
    writer = gguf.GGUFWriter(str(path), arch)
    values = keys(kind, c)
    if absorbed:
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
            "attention.value_length": c.kv_lora_rank,
            "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
            "attention.value_length_mla": c.v_head_dim,
        }
    for key, value in {**values, **more}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    for key, tensor in model.state_dict().items():
        for name, x in _renamed(kind, key, tensor.detach().numpy().astype(np.float32), c):
            x = np.ascontiguousarray(x)
            if absorbed and name.endswith("attn_kv_b.weight"):
                both = x.reshape(c.num_attention_heads, -1, c.kv_lora_rank)
                k, v = both[:, : c.qk_nope_head_dim].swapaxes(1, 2), both[:, c.qk_nope_head_dim :]
                writer.add_tensor(name.replace("kv_b", "k_b"), np.ascontiguousarray(k))
                writer.add_tensor(name.replace("kv_b", "v_b"), np.ascontiguousarray(v))
            elif name.endswith("ssm_in.weight") and not mixed:
                share = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
                ends = np.cumsum([c.linear_key_head_dim, c.linear_key_head_dim, share])
                q, k, v, z = (
                    p.reshape(-1, c.hidden_size)
                    for p in np.split(x.reshape(c.linear_num_key_heads, -1, c.hidden_size), ends, 1)
                )
                writer.add_tensor(name.replace("ssm_in", "attn_qkv"), np.concatenate([q, k, v]))
                writer.add_tensor(name.replace("ssm_in", "attn_gate"), z)
            elif apart and name.endswith("_exps.weight"):
                for e, part in enumerate(x):
                    writer.add_tensor(name.replace("_exps.", f".{e}."), part)
            elif experts and name.endswith("_exps.weight"):
                type_ = gguf.GGMLQuantizationType[experts]
                writer.add_tensor(name, gguf.quants.quantize(x, type_), raw_dtype=type_)
            else:
                writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
