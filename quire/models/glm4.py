"""GLM-4: a part of each head rotated in neighbouring pairs, gate and up in one matrix, and norms after attention and MLP.

The models of 2025 (glm4) have those last norms, the ones before (glm, in a GGUF chatglm) do not; chatglm keeps queries, keys and
values in one matrix.
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
    fused_attention_of,
    fused_mlp_of,
    head_rows,
    refuse_strangers,
    rotation,
)
from quire.observe.errors import Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
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


class Model:
    """A GLM-4 model: its configuration, its weights and its forward."""

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
        self.config = d = dims
        self.notes: list[str] = []
        self._tensors = weights.tensors
        self.rope = rope
        self.embedding = weights.matrix("embedding", d.vocab_size, d.width)
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
        self.norm = weights.norm("norm", d.width)
        self.head = weights.head(d, self.embedding, tied)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys)
        for key in ("rope.dimension_sections", "nextn_predict_layers"):
            if keys.has(key):
                raise Unsupported(f"metadata {keys.arch}.{key} is set: such models are not supported")
        dim = metadata.rope_dim_of(keys, d)
        scaling = metadata.scaling_of(keys, tensors, dim, d.context)
        rope = rotation(keys.number("rope.freq_base", 10000.0), dim, scaling, pairs=True)
        model = cls(d, Weights(tensors, GGUF_NAMES), rope, post=keys.arch == "glm4")
        model.notes += refuse_strangers(gguf, tensors, d)
        return model

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        return from_folder(cls.of, folder)

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

    def kv(self, pages: int, page_size: int) -> KV:
        return self.config.kv(pages, page_size)

    def release(self, layout: Layout) -> None:
        self._tensors.release(layout)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows as they go into the head."""
        c = self.config
        x = ops.embed(batch.ids, self.embedding)  # [T, d]
        for i, w in enumerate(self.layers):
            ops.mark(x, i)
            h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
            q = ops.rope(ops.linear(h, a.q, a.q_bias), batch.pos, self.rope, c.heads)
            k = ops.rope(ops.linear(h, a.k, a.k_bias), batch.pos, self.rope, c.kv_heads)
            v = ops.linear(h, a.v, a.v_bias)
            h = ops.linear(ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=c.scale), a.o)
            x = ops.add(x, h if w.attn_post_norm is None else ops.rms_norm(h, w.attn_post_norm, c.eps))
            h = ops.rms_norm(x, w.ffn_norm, c.eps)
            h = ops.linear(ops.swiglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down)
            x = ops.add(x, h if w.ffn_post_norm is None else ops.rms_norm(h, w.ffn_post_norm, c.eps))
        return head_rows(ops, batch, x, len(self.layers), self.norm, c.eps)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.linear(self.hidden(ops, batch, inputs), self.head)
