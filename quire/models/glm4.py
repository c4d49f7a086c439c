"""GLM-4: a part of each head rotated in neighbouring pairs, gate and up in one matrix, and norms after attention and MLP.

The models of 2025 (glm4) have those last norms, the ones before (glm, in a GGUF chatglm) do not; chatglm keeps queries, keys and
values in one matrix.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.backends.batch import Batch
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Rope
from quire.models import hf, metadata
from quire.models.decoder import Decoder
from quire.models.parts import (
    GGUF_NAMES,
    HF_NAMES,
    Attention,
    Dims,
    Mlp,
    Weights,
    attention_of,
    fused_attention_of,
    fused_mlp_of,
    rotation,
)
from quire.observe.errors import Unsupported
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values

ARCHS = ("glm4", "chatglm")
HF_ARCHS = ("Glm4ForCausalLM", "GlmForCausalLM")
NAMES = {
    **HF_NAMES,
    "attn_post_norm": "model.layers.{}.post_self_attn_layernorm",
    "ffn_post_norm": "model.layers.{}.post_mlp_layernorm",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block."""

    attn_norm: Dense
    attn: Attention
    attn_post_norm: Dense | None
    ffn_norm: Dense
    mlp: Mlp
    ffn_post_norm: Dense | None


class Model(Decoder):
    """A GLM-4 model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        *,
        post: bool,  # norms after attention and MLP
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, tied=tied)
        d = dims
        self.rope = rope
        fused = weights.has("qkv")
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i),
                attn=fused_attention_of(weights, i, d, None) if fused else attention_of(weights, i, d, biased),
                attn_post_norm=weights.norm("attn_post_norm", d.width, i) if post else None,
                ffn_norm=weights.norm("ffn_norm", d.width, i),
                mlp=fused_mlp_of(weights, i, d),
                ffn_post_norm=weights.norm("ffn_post_norm", d.width, i) if post else None,
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        for key in ("rope.dimension_sections", "nextn_predict_layers"):
            if keys.has(key):
                raise Unsupported(f"metadata {keys.arch}.{key} is set: such models are not supported")
        rope = metadata.rotation_of(keys, tensors, d, pairs=True)
        return cls(d, Weights(tensors, GGUF_NAMES), rope, post=keys.arch == "glm4")

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes."""
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, 10000.0, partial=True)
        context, eps = hf.context_of(config, scaling), ("rms_norm_eps", 1.5625e-7)
        d = hf.dims_of(config, architecture, context=context, head_dim=128, eps=eps)
        return cls(
            d,
            Weights(tensors, NAMES),
            rotation(base, hf.rotated_of(config, d.head_dim, 0.5), scaling, pairs=True),
            post=architecture == "Glm4ForCausalLM",
            biased=("q", "k", "v") if config.flag("attention_bias", True) else (),
            tied=config.flag("tie_word_embeddings", False),
        )

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q = ops.rope(ops.linear(h, a.q, a.q_bias), batch.pos, self.rope, c.heads)
        k = ops.rope(ops.linear(h, a.k, a.k_bias), batch.pos, self.rope, c.kv_heads)
        v = ops.linear(h, a.v, a.v_bias)
        h = ops.linear(ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=c.scale), a.o)
        x = ops.add(x, h if w.attn_post_norm is None else ops.rms_norm(h, w.attn_post_norm, c.eps))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        h = ops.linear(ops.swiglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down)
        return ops.add(x, h if w.ffn_post_norm is None else ops.rms_norm(h, w.ffn_post_norm, c.eps))
