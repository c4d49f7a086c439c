"""Qwen3: the Llama shape with a norm over each head of queries and keys, before they are rotated.

The dense models; mixtures of experts are another family. In a GGUF as in a folder rows lie for rotation of halves.
A reranker's own rows (a classifier of one label; of yes and no in a GGUF) are kept as `scores`: reranker.py makes scores of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.backends.batch import Batch
from quire.backends.ops import Ops, Tensor
from quire.layouts import Dense, Layout, Rope
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

ARCHS = ("qwen3",)
HF_ARCHS = ("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification")


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block, and what it sees."""

    attn_norm: Dense
    attn: Attention
    q_norm: Dense  # [head_dim]
    k_norm: Dense
    ffn_norm: Dense
    mlp: Mlp
    window: int | None


class Model(Decoder):
    """A Qwen3 model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        *,
        windows: tuple[int | None, ...],
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, windows=windows, tied=tied)
        d = dims
        self.rope = rope
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i),
                attn=attention_of(weights, i, d, biased),
                q_norm=weights.norm("q_norm", d.head_dim, i),
                k_norm=weights.norm("k_norm", d.head_dim, i),
                ffn_norm=weights.norm("ffn_norm", d.width, i),
                mlp=mlp_of(weights, i, d, ()),
                window=windows[i],
            )
            for i in range(d.layers)
        ]
        self.scores: Layout | None = None  # [1, d] or [2, d]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        model = cls(
            d,
            Weights(tensors, GGUF_NAMES),
            metadata.rotation_of(keys, tensors, d, pairs=False),
            windows=seen(metadata.windows_of(keys, d, period=0), d.context),
        )
        if tensors.has("cls.output.weight"):
            model.scores = tensors.matrix("cls.output.weight", 2, d.width)
        return model

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes."""
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, 10000.0)
        d = hf.dims_of(config, architecture, context=hf.context_of(config, scaling), head_dim=128)
        scores = architecture.endswith("ForSequenceClassification")
        model = cls(
            d,
            Weights(tensors, HF_NAMES),
            rotation(base, d.head_dim, scaling, pairs=False),
            windows=seen(hf.late_windows_of(config, d.layers), d.context),
            biased=("q", "k", "v", "o") if config.flag("attention_bias", False) else (),
            tied=scores or config.flag("tie_word_embeddings", False),
        )
        if scores:
            hf.one_label(config)
            model.scores = tensors.matrix("score.weight", 1, d.width)
        return model

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q = ops.rms_norm(ops.linear(h, a.q, a.q_bias), w.q_norm, c.eps, heads=c.heads)
        k = ops.rms_norm(ops.linear(h, a.k, a.k_bias), w.k_norm, c.eps, heads=c.kv_heads)
        q = ops.rope(q, batch.pos, self.rope, c.heads)
        k = ops.rope(k, batch.pos, self.rope, c.kv_heads)
        v = ops.linear(h, a.v, a.v_bias)
        group, at = self.kv_layout[i]
        h = ops.attention(q, k, v, batch, layer=at, group=group, heads=c.heads, scale=c.scale, window=w.window)
        x = ops.add(x, ops.linear(h, a.o, a.o_bias))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        return ops.add(x, ops.linear(ops.swiglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down))
