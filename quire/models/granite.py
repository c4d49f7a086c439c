"""Granite 3: the Llama shape with four multipliers, of the embedding, of scores, of what is added to the residual, of logits.

Logits are divided by theirs. In a GGUF query and key rows lie for rotation of neighbouring pairs, as for llama.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

ARCHS = ("granite",)
HF_ARCHS = ("GraniteForCausalLM",)


@dataclass(frozen=True, slots=True)
class Multipliers:
    embedding: float
    attention: float  # of scores, in place of 1 / sqrt(head_dim)
    residual: float
    logits: float  # they are divided by it


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block."""

    attn_norm: Dense
    attn: Attention
    ffn_norm: Dense
    mlp: Mlp


class Model(Decoder):
    """A Granite model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        by: Multipliers,
        *,
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, tied=tied)
        d = dims
        self.rope, self.by = rope, by
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i),
                attn=attention_of(weights, i, d, biased),
                ffn_norm=weights.norm("ffn_norm", d.width, i),
                mlp=mlp_of(weights, i, d, biased),
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        if not keys.flag("rope.scaling.finetuned", True):
            raise Unsupported(f"metadata {keys.arch}.rope.scaling.finetuned is false: Granite without positions")
        by = Multipliers(
            embedding=keys.zero_or("embedding_scale") or 1.0,
            attention=keys.zero_or("attention.scale") or d.scale,
            residual=keys.zero_or("residual_scale") or 1.0,
            logits=keys.number("logit_scale"),
        )
        rope = metadata.rotation_of(keys, tensors, d, pairs=True)
        return cls(d, Weights(tensors, GGUF_NAMES), rope, by)

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes."""
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, position_embedding_type="rope")
        base, scaling = hf.rope_of(config, 10000.0)
        d = hf.dims_of(config, architecture, context=hf.context_of(config, scaling))
        by = Multipliers(
            embedding=config.number("embedding_multiplier", 1.0),
            attention=config.number("attention_multiplier", 1.0),
            residual=config.number("residual_multiplier", 1.0),
            logits=config.number("logits_scaling", 1.0),
        )
        attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
        return cls(
            d,
            Weights(tensors, HF_NAMES),
            rotation(base, d.head_dim, scaling, pairs=False),
            by,
            biased=(("q", "k", "v", "o") if attention else ()) + (("gate", "up", "down") if mlp else ()),
            tied=config.flag("tie_word_embeddings", False),
        )

    def embedded(self, ops: Ops, batch: Batch) -> Tensor:
        return ops.scale(ops.embed(batch.ids, self.embedding), self.by.embedding)

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w, by = self.config, self.layers[i], self.by
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q = ops.rope(ops.linear(h, a.q, a.q_bias), batch.pos, self.rope, c.heads)
        k = ops.rope(ops.linear(h, a.k, a.k_bias), batch.pos, self.rope, c.kv_heads)
        v = ops.linear(h, a.v, a.v_bias)
        h = ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=by.attention)
        x = ops.add(x, ops.scale(ops.linear(h, a.o, a.o_bias), by.residual))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        h = ops.swiglu(ops.linear(h, m.gate, m.gate_bias), ops.linear(h, m.up, m.up_bias))
        return ops.add(x, ops.scale(ops.linear(h, m.down, m.down_bias), by.residual))

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.scale(super().forward(ops, batch, inputs), 1.0 / self.by.logits)
