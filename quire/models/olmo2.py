"""OLMo 2: no norms before attention and MLP, only after them, and a norm over the whole row of queries and of keys.

In a GGUF as in a folder rows lie for rotation of halves.
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
    mlp_of,
    rotation,
)
from quire.observe.errors import Unsupported
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values

ARCHS = ("olmo2",)
HF_ARCHS = ("Olmo2ForCausalLM",)
NAMES = {
    **HF_NAMES,
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block."""

    attn: Attention
    q_norm: Dense  # [heads * head_dim]
    k_norm: Dense
    attn_post_norm: Dense
    mlp: Mlp
    ffn_post_norm: Dense


class Model(Decoder):
    """An OLMo 2 model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        *,
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, tied=tied)
        d = dims
        self.rope = rope
        self.layers = [
            Layer(
                attn=attention_of(weights, i, d, biased),
                q_norm=weights.norm("q_norm", d.q_width, i),
                k_norm=weights.norm("k_norm", d.kv_width, i),
                attn_post_norm=weights.norm("attn_post_norm", d.width, i),
                mlp=mlp_of(weights, i, d, ()),
                ffn_post_norm=weights.norm("ffn_post_norm", d.width, i),
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        if any(metadata.windows_of(keys, d, period=4)):
            raise Unsupported(f"metadata {keys.arch}.attention.sliding_window is set: OLMo 3 is not supported yet")
        rope = metadata.rotation_of(keys, tensors, d, pairs=False)
        return cls(d, Weights(tensors, GGUF_NAMES), rope)

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes."""
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, clip_qkv=None)
        base, scaling = hf.rope_of(config, 10000.0)
        d = hf.dims_of(config, architecture, context=hf.context_of(config, scaling), eps=("rms_norm_eps", 1e-5))
        return cls(
            d,
            Weights(tensors, NAMES),
            rotation(base, d.head_dim, scaling, pairs=False),
            biased=("q", "k", "v", "o") if config.flag("attention_bias", False) else (),
            tied=config.flag("tie_word_embeddings", False),
        )

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        a, m = w.attn, w.mlp
        q = ops.rms_norm(ops.linear(x, a.q, a.q_bias), w.q_norm, c.eps)
        k = ops.rms_norm(ops.linear(x, a.k, a.k_bias), w.k_norm, c.eps)
        q = ops.rope(q, batch.pos, self.rope, c.heads)
        k = ops.rope(k, batch.pos, self.rope, c.kv_heads)
        v = ops.linear(x, a.v, a.v_bias)
        h = ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=c.scale)
        x = ops.add(x, ops.rms_norm(ops.linear(h, a.o, a.o_bias), w.attn_post_norm, c.eps))
        h = ops.linear(ops.swiglu(ops.linear(x, m.gate), ops.linear(x, m.up)), m.down)
        return ops.add(x, ops.rms_norm(h, w.ffn_post_norm, c.eps))
