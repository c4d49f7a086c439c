"""Gemma 2: norms before and after attention and MLP, scores and logits with a soft cap, every other layer with a window.

The embedding is scaled by sqrt(width), and so is never a head without its own scale. A folder keeps norms as what they are more
than 1; a GGUF has the 1 added. The scale of scores is a setting in a folder; a GGUF has none, and only the 27B model differs
from 1 / sqrt(head size), which llama.cpp knows by its 46 layers, and so do we.
"""

from __future__ import annotations

import math
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
    seen,
)
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values

ARCHS = ("gemma2",)
HF_ARCHS = ("Gemma2ForCausalLM",)
LARGEST = 46  # layers of the 27B model
NAMES = {
    **HF_NAMES,
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block, and what it sees."""

    attn_norm: Dense
    attn: Attention
    attn_post_norm: Dense
    ffn_norm: Dense
    mlp: Mlp
    ffn_post_norm: Dense
    window: int | None


class Model(Decoder):
    """A Gemma 2 model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        *,
        scale: float,  # of attention scores
        windows: tuple[int | None, ...],
        score_cap: float | None,
        logit_cap: float | None,
        plus: float,  # what the file left out of its norms
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, windows=windows, tied=tied, plus=plus)
        d = dims
        self.rope, self.scale, self.score_cap, self.logit_cap = rope, scale, score_cap, logit_cap
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i, plus),
                attn=attention_of(weights, i, d, biased),
                attn_post_norm=weights.norm("attn_post_norm", d.width, i, plus),
                ffn_norm=weights.norm("ffn_norm", d.width, i, plus),
                mlp=mlp_of(weights, i, d, ()),
                ffn_post_norm=weights.norm("ffn_post_norm", d.width, i, plus),
                window=windows[i],
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        return cls(
            d,
            Weights(tensors, GGUF_NAMES),
            metadata.rotation_of(keys, tensors, d, pairs=False),
            scale=1.0 / math.sqrt(d.width // d.heads) if d.layers == LARGEST else d.scale,
            windows=seen(metadata.windows_of(keys, d, period=2, default=4096), d.context),
            score_cap=keys.number("attn_logit_softcapping", 50.0),
            logit_cap=keys.number("final_logit_softcapping", 30.0),
            plus=0.0,
        )

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes. A cap that is null is none; one that is not there has its default."""
        hf.check_activation(config, "hidden_activation", hf.GELU_TANH)
        hf.refuse(config, use_bidirectional_attention=False)
        base, scaling = hf.rope_of(config, 10000.0)
        d = hf.dims_of(config, architecture, context=hf.context_of(config, scaling), head_dim=256)
        score_cap = None if "attn_logit_softcapping" in config.raw else 50.0
        logit_cap = None if "final_logit_softcapping" in config.raw else 30.0
        return cls(
            d,
            Weights(tensors, NAMES),
            rotation(base, d.head_dim, scaling, pairs=False),
            scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            windows=seen(hf.windows_of(config, d.layers, period=2, default=4096), d.context),
            score_cap=config.number("attn_logit_softcapping", score_cap),
            logit_cap=config.number("final_logit_softcapping", logit_cap),
            plus=1.0,
            biased=("q", "k", "v", "o") if config.flag("attention_bias", False) else (),
            tied=config.flag("tie_word_embeddings", True),
        )

    def embedded(self, ops: Ops, batch: Batch) -> Tensor:
        return ops.scale(ops.embed(batch.ids, self.embedding), math.sqrt(self.config.width))

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q = ops.rope(ops.linear(h, a.q, a.q_bias), batch.pos, self.rope, c.heads)
        k = ops.rope(ops.linear(h, a.k, a.k_bias), batch.pos, self.rope, c.kv_heads)
        v = ops.linear(h, a.v, a.v_bias)
        group, at = self.kv_layout[i]
        h = ops.attention(
            q,
            k,
            v,
            batch,
            layer=at,
            group=group,
            heads=c.heads,
            scale=self.scale,
            window=w.window,
            softcap=self.score_cap,
        )
        x = ops.add(x, ops.rms_norm(ops.linear(h, a.o, a.o_bias), w.attn_post_norm, c.eps))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        h = ops.linear(ops.geglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down)
        return ops.add(x, ops.rms_norm(h, w.ffn_post_norm, c.eps))

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        logits = super().forward(ops, batch, inputs)
        return logits if self.logit_cap is None else ops.softcap(logits, self.logit_cap)
