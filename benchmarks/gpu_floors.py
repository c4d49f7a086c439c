"""What a device must at least read and compute for a step of a known shape, mixtures of experts included.

Experts are chosen as if each set were as likely as any other, which is how text spreads over experts that were trained to be used
alike: of E experts, n rows with `top` choices each touch E * (1 - (1 - top / E) ** n). Random weights route so, too. A layer behind a
window reads no more of its keys than the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = Mapping[str, Any]


def experts(shape: Shape) -> tuple[int, int, int]:
    """How many experts a layer has, how many are chosen, how wide one is; (0, 0, 0) where there are none."""
    count = shape.get("num_experts") or shape.get("num_local_experts") or 0
    if not count:
        return 0, 0, 0
    return count, shape["num_experts_per_tok"], shape.get("moe_intermediate_size", shape["intermediate_size"])


def touched(shape: Shape, rows: int) -> float:
    """Experts of a layer that so many rows choose."""
    count, top, _ = experts(shape)
    return count * (1 - (1 - top / count) ** rows)


def expert_numbers(shape: Shape) -> int:
    """Weights of one expert of one layer."""
    return 3 * shape["hidden_size"] * experts(shape)[2]


def expert_bytes(shape: Shape, quantize: str, size: int) -> float:
    """Bytes of a number of an expert's; `size`: of a plain one."""
    packed = "quantization_config" in shape and quantize in ("none", "keep")
    return 17 / 32 if packed else {"fp8": 1.0, "fp8-block": 1.0, "int8": 1.0, "int4": 0.53125}.get(quantize, size)


def weight_bytes(shape: Shape, total: float, rows: int, quantize: str, size: int) -> float:
    """Bytes of weights that a decode step reads: all but the embedding, unless it is the head, and of experts those that are touched."""
    read = total - (0 if shape["tie_word_embeddings"] else size * shape["vocab_size"] * shape["hidden_size"])
    count = experts(shape)[0]
    if not count:
        return read
    each = shape["num_hidden_layers"] * expert_numbers(shape) * expert_bytes(shape, quantize, size)
    return read - (count - touched(shape, rows)) * each


def seen(shape: Shape, tokens: float) -> float:
    """Tokens of a context that a layer reads, on the average of all layers."""
    window = shape.get("sliding_window")
    return tokens if not window else (tokens + min(tokens, window)) / 2  # every second layer has one


def prompt_operations(shape: Shape, tokens: int) -> float:
    """Of the products and of causal attention over a prompt; the head runs over one row."""
    queries, keys = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    d, (count, top, _) = shape["hidden_size"], experts(shape)
    mlp = top * expert_numbers(shape) + count * d if count else 3 * d * shape["intermediate_size"]
    layers = shape["num_hidden_layers"]
    attention = layers * 4 * tokens * _pairs(shape, tokens) * queries
    return 2 * layers * (d * (2 * queries + 2 * keys) + mlp) * tokens + attention + 2 * shape["vocab_size"] * d


def _pairs(shape: Shape, tokens: int) -> float:
    """Keys that a token of a prompt sees on the average, over all layers."""
    window = shape.get("sliding_window")
    return tokens / 2 if not window else (tokens / 2 + min(tokens / 2, window)) / 2
