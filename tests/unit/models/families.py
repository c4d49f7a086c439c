"""Tiny random models of every dense family: built with transformers, written as GGUF by the gguf package from the same weights.

Names of tensors come from the gguf package's own map; what a converter does to the numbers is said here, family by family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EPS = {"Cohere": "layer_norm_eps", "Cohere2": "layer_norm_eps"}  # what the key is called, where not rms_norm_eps
WINDOW = 24  # ends inside a page, and shorter than the prompts
SHORT, LONG = [1.0 + 0.1 * i for i in range(6)], [1.5 + 0.6 * i for i in range(6)]
Changed = Iterator[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Family:
    """How to make one, and what a converter writes. keys and tensors are given its configuration."""

    kind: str  # transformers' prefix: KindConfig, KindForCausalLM
    changes: dict[str, Any] = field(default_factory=dict)
    arch: str | None = None  # in a GGUF
    keys: Callable[[Any], dict[str, Any]] = lambda c: {}
    tensors: Callable[[Any, str, np.ndarray], Changed] = lambda c, name, data: iter([(name, data)])
    extra: Callable[[Any], dict[str, np.ndarray]] = lambda c: {}  # tensors that are not in the folder
    context: int | None = None  # serve no more than this
    lengths: tuple[tuple[int, int | None], ...] = ((1, None), (17, 5), (100, 37))


def as_pairs(c: Any, name: str, data: np.ndarray) -> Changed:
    """Rows of queries and keys for rotation of neighbouring pairs, as converters of the Llama kind write them."""
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    role = name.split(".")[-2]
    yield name, permute(data, heads[role]) if role in heads else data


def norms_plus_one(c: Any, name: str, data: np.ndarray) -> Changed:
    yield name, data + 1.0 if name.endswith("norm.weight") else data


def one_qkv(c: Any, name: str, data: np.ndarray) -> Changed:
    """Queries, keys and values as one tensor; `write_gguf` joins what has one name, in the order of the folder."""
    for role in ("q_proj", "k_proj", "v_proj"):
        if f".{role}." in name:
            yield f"blk.{name.split('.')[2]}.attn_qkv.{name.rsplit('.', 1)[1]}", data
            return
    yield name, data


def theta(c: Any) -> float:
    rope = c.rope_parameters
    return float(rope.get("full_attention", rope)["rope_theta"])


def granite_keys(c: Any) -> dict[str, Any]:
    return {
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    }


def gemma2_keys(c: Any) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
        "attention.sliding_window": c.sliding_window,
    }


def gemma3_keys(c: Any) -> dict[str, Any]:
    full = c.rope_parameters["full_attention"]
    keys: dict[str, Any] = {"attention.sliding_window": c.sliding_window}
    if full["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    return keys


def phi3_keys(c: Any) -> dict[str, Any]:
    """attn_factor as the converter computes it, from the two contexts."""
    rope = c.rope_parameters
    keys: dict[str, Any] = {
        "rope.dimension_count": int(16 * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings", 512),
        "attention.sliding_window": c.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        scale, original = 512 / rope["original_max_position_embeddings"], rope["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original)))
    return keys


def phi3_factors(c: Any) -> dict[str, np.ndarray]:
    if c.rope_parameters["rope_type"] != "longrope":
        return {}
    return {
        f"rope_factors_{kind}.weight": np.array(c.rope_parameters[f"{kind}_factor"], np.float32)
        for kind in ("short", "long")
    }


def longrope() -> dict[str, Any]:
    return {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
    }


COHERE_KEYS: Callable[[Any], dict[str, Any]] = lambda c: {"logit_scale": c.logit_scale}  # noqa: E731
HALF: Callable[[Any], dict[str, Any]] = lambda c: {"rope.dimension_count": c.head_dim // 2}  # noqa: E731
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW}
SMALL_MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1}

FAMILIES: dict[str, Family] = {
    "mistral, window": Family(
        "Mistral",
        {"head_dim": 16, "sliding_window": WINDOW},
        "llama",
        lambda c: {"attention.sliding_window": c.sliding_window},
        as_pairs,
    ),
    "ministral, some windows": Family(
        "Ministral",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen2": Family("Qwen2", {}, "qwen2"),
    "qwen2, late windows": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "layer_types": None}
    ),
    "smollm3": Family("SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}, "smollm3", tensors=as_pairs),
    "smollm3, windows": Family(
        "SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": WINDOW}
    ),
    "qwen3": Family("Qwen3", {"head_dim": 32}, "qwen3"),
    "qwen3, tied, biased": Family(
        "Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}, "qwen3"
    ),
    "qwen3, late windows": Family(
        "Qwen3", {"head_dim": 16, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}
    ),
    "gemma2": Family(
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        "gemma2",
        gemma2_keys,
        norms_plus_one,
    ),
    "gemma2, no caps, another scale": Family(
        "Gemma2",
        {**GEMMA, "query_pre_attn_scalar": 50, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": Family(
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        "gemma3",
        gemma3_keys,
        norms_plus_one,
    ),
    "gemma3, a wide window, capped": Family(
        "Gemma3Text",
        {**GEMMA, "num_hidden_layers": 7, "sliding_window": 4096, "final_logit_softcapping": 4.0},
        "gemma3",
        lambda c: gemma3_keys(c) | {"final_logit_softcapping": c.final_logit_softcapping},
        norms_plus_one,
    ),
    "phi3": Family("Phi3", {"sliding_window": WINDOW}, "phi3", phi3_keys),
    "phi3, half rotated": Family(
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "phi3",
        phi3_keys,
    ),
    "phi3, short factors": Family(
        "Phi3", longrope(), "phi3", phi3_keys, extra=phi3_factors, context=64, lengths=((1, None), (17, 5), (64, 33))
    ),
    "phi3, long factors": Family(
        "Phi3", longrope(), "phi3", phi3_keys, extra=phi3_factors, lengths=((65, 30), (100, 37))
    ),
    "granite": Family("Granite", {**SMALL_MULTIPLIERS, "logits_scaling": 0.25}, "granite", granite_keys, as_pairs),
    "granite, tied, biases": Family(
        "Granite", {**SMALL_MULTIPLIERS, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "olmo2": Family("Olmo2", {}, "olmo2"),
    "cohere": Family("Cohere", {"logit_scale": 2.0}, "command-r", COHERE_KEYS),
    "cohere, norms by head": Family("Cohere", {"logit_scale": 2.0, "use_qk_norm": True}, "command-r", COHERE_KEYS),
    "cohere, untied, biased": Family(
        "Cohere", {"logit_scale": 2.0, "tie_word_embeddings": False, "attention_bias": True}
    ),
    "cohere2": Family(
        "Cohere2",
        {"logit_scale": 2.0, "num_hidden_layers": 5, "sliding_window": WINDOW},
        "cohere2",
        lambda c: {"logit_scale": c.logit_scale, "attention.sliding_window": c.sliding_window},
    ),
    "glm4": Family("Glm4", {"head_dim": 32}, "glm4", HALF),
    "glm4, a quarter rotated": Family(
        "Glm4",
        {
            "head_dim": 32,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "glm": Family("Glm", {"head_dim": 16, "attention_bias": True}, "chatglm", HALF, one_qkv),
}
WITH_GGUF = [name for name, family in FAMILIES.items() if family.arch is not None]
CAUSAL = {"Gemma3Text": "Gemma3"}  # where the class of the model has another prefix than its configuration


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights that are far from those it starts with."""
    import torch
    import transformers

    family = FAMILIES[name]
    torch.manual_seed(seed)
    eps = {EPS.get(family.kind, "rms_norm_eps"): 3e-3}  # large enough to be seen
    config = getattr(transformers, f"{family.kind}Config")(**{**SIZES, **eps, **family.changes, **changes})
    config._attn_implementation = "eager"  # others leave soft caps out
    model = getattr(transformers, f"{CAUSAL.get(family.kind, family.kind)}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.07)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for norm in (p for n, p in model.named_parameters() if "_norm." in n and p.dim() > 1):
            norm.add_(1.0)  # weights by head are two-dimensional
    return model


def write_gguf(name: str, model: Any, path: Path, quantize: str | None = None) -> Path:
    """The model as a converter would write it, matrices quantized to the named type, or float32."""
    import gguf

    family, c = FAMILIES[name], model.config
    arch = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == family.arch)
    names = gguf.get_tensor_name_map(arch, c.num_hidden_layers)
    writer = gguf.GGUFWriter(str(path), family.arch)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    if hasattr(c, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(c.layer_norm_eps)
    if getattr(c, "head_dim", None) is not None:
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    writer.add_rope_freq_base(theta(c))
    for key, value in family.keys(c).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(f"{family.arch}.{key}", value)
    made: dict[str, list[np.ndarray]] = {}
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for theirs, data in family.tensors(c, own, tensor.detach().numpy().astype(np.float32)):
            known = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
            made.setdefault(known, []).append(data)
    for known, parts in made.items():
        data = np.ascontiguousarray(np.concatenate(parts))
        if quantize and data.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(known, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(known, data)
    for known, data in family.extra(c).items():
        writer.add_tensor(known, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
