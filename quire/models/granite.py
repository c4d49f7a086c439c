"""Granite 3: the Llama shape with four multipliers, of the embedding, of scores, of what is added to the residual, of logits.

Logits are divided by theirs. In a GGUF query and key rows lie for rotation of neighbouring pairs, as for llama.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Layout, Rope
from quire.models import hf, metadata
from quire.models.parts import (
    GGUF_NAMES,
    HF_NAMES,
    Attention,
    Dims,
    Mlp,
    Weights,
    attention_of,
    from_folder,
    head_rows,
    mlp_of,
    refuse_strangers,
    rotation,
)
from quire.observe.errors import Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
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


class Model:
    """A Granite model: its configuration, its weights and its forward."""

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
        self.config = d = dims
        self.notes: list[str] = []
        self._tensors = weights.tensors
        self.rope, self.by = rope, by
        self.embedding = weights.matrix("embedding", d.vocab_size, d.width)
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i),
                attn=attention_of(weights, i, d, biased),
                ffn_norm=weights.norm("ffn_norm", d.width, i),
                mlp=mlp_of(weights, i, d, biased),
            )
            for i in range(d.layers)
        ]
        self.norm = weights.norm("norm", d.width)
        self.head = weights.head(d, self.embedding, tied)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys)
        if not keys.flag("rope.scaling.finetuned", True):
            raise Unsupported(f"metadata {keys.arch}.rope.scaling.finetuned is false: Granite without positions")
        dim = metadata.rope_dim_of(keys, d)
        scaling = metadata.scaling_of(keys, tensors, dim, d.context)
        by = Multipliers(
            embedding=keys.zero_or("embedding_scale") or 1.0,
            attention=keys.zero_or("attention.scale") or d.scale,
            residual=keys.zero_or("residual_scale") or 1.0,
            logits=keys.number("logit_scale"),
        )
        rope = rotation(keys.number("rope.freq_base", 10000.0), dim, scaling, pairs=True)
        model = cls(d, Weights(tensors, GGUF_NAMES), rope, by)
        model.notes += refuse_strangers(gguf, tensors, d)
        return model

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        return from_folder(cls.of, folder)

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

    def kv(self, pages: int, page_size: int) -> KV:
        return self.config.kv(pages, page_size)

    def release(self, layout: Layout) -> None:
        self._tensors.release(layout)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows as they go into the head."""
        c, by = self.config, self.by
        x = ops.scale(ops.embed(batch.ids, self.embedding), by.embedding)  # [T, d]
        for i, w in enumerate(self.layers):
            ops.mark(x, i)
            h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
            q = ops.rope(ops.linear(h, a.q, a.q_bias), batch.pos, self.rope, c.heads)
            k = ops.rope(ops.linear(h, a.k, a.k_bias), batch.pos, self.rope, c.kv_heads)
            v = ops.linear(h, a.v, a.v_bias)
            h = ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=by.attention)
            x = ops.add(x, ops.scale(ops.linear(h, a.o, a.o_bias), by.residual))
            h = ops.rms_norm(x, w.ffn_norm, c.eps)
            h = ops.swiglu(ops.linear(h, m.gate, m.gate_bias), ops.linear(h, m.up, m.up_bias))
            x = ops.add(x, ops.scale(ops.linear(h, m.down, m.down_bias), by.residual))
        return head_rows(ops, batch, x, len(self.layers), self.norm, c.eps)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.scale(ops.linear(self.hidden(ops, batch, inputs), self.head), 1.0 / self.by.logits)
