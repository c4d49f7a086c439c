"""Cohere's Command-R and Command-R7B: attention and MLP side by side on one layer norm, neighbouring pairs rotated, logits scaled.

Norms have no bias. Command-R+ also norms each head of queries and keys, with weights of its own for each head. Command-R7B (cohere2)
has layers with a window, which are rotated, and every fourth that sees all, which is not.
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
    MAX_CONTEXT,
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

ARCHS = ("command-r", "cohere2")
HF_ARCHS = ("CohereForCausalLM", "Cohere2ForCausalLM")


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block, what it sees, and how it rotates."""

    norm: Dense
    attn: Attention
    q_norm: Dense | None  # [heads * head_dim]
    k_norm: Dense | None
    mlp: Mlp
    window: int | None
    rope: Rope | None  # None: its queries and keys have no positions


class Model(Decoder):
    """A Command-R model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        *,
        logit_scale: float,
        windows: tuple[int | None, ...],
        still: Collection[int] = (),  # layers without positions
        normed: bool | None = None,  # queries and keys, by head; None: where the file has the weights
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, windows=windows, tied=tied)
        d = dims
        self.logit_scale = logit_scale
        normed = weights.has("q_norm") if normed is None else normed
        self.layers = [
            Layer(
                norm=weights.norm("attn_norm", d.width, i),
                attn=attention_of(weights, i, d, biased),
                q_norm=weights.norm_by_head("q_norm", d.heads, d.head_dim, i) if normed else None,
                k_norm=weights.norm_by_head("k_norm", d.kv_heads, d.head_dim, i) if normed else None,
                mlp=mlp_of(weights, i, d, ()),
                window=windows[i],
                rope=None if i in still else rope,
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d, second = metadata.dims_of(keys, eps="attention.layer_norm_epsilon"), keys.arch == "cohere2"
        if second:
            keys.count("attention.sliding_window", most=MAX_CONTEXT)
        windows = metadata.windows_of(keys, d, period=4) if second else (None,) * d.layers
        return cls(
            d,
            Weights(tensors, GGUF_NAMES),
            metadata.rotation_of(keys, tensors, d, pairs=True),
            logit_scale=keys.number("logit_scale"),
            windows=seen(windows, d.context),
            still=[i for i in range(d.layers) if second and windows[i] is None],
        )

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes. model_max_length is where these files say how far they were trained."""
        second = architecture == "Cohere2ForCausalLM"
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, rotary_pct=1.0, use_parallel_block=True, use_gated_activation=True)
        if second:
            hf.refuse(config, use_qk_norm=False, order_of_interleaved_layers="local_attn_first")
        base, scaling = hf.rope_of(config, 10000.0 if second else 500000.0)
        context = max(hf.context_of(config, scaling), config.count("model_max_length", 1, most=MAX_CONTEXT))
        d = hf.dims_of(config, architecture, context=context, eps=("layer_norm_eps", 1e-5))
        windows: tuple[int | None, ...] = (None,) * d.layers
        if second:
            period = config.count("sliding_window_pattern", 4)
            windows = hf.windows_of(config, d.layers, period, default=4096)
        return cls(
            d,
            Weights(tensors, HF_NAMES),
            rotation(base, d.head_dim, scaling, pairs=True),
            logit_scale=config.number("logit_scale", 0.0625),
            windows=seen(windows, d.context),
            still=[i for i in range(d.layers) if second and windows[i] is None],
            normed=config.flag("use_qk_norm", False),
            biased=("q", "k", "v", "o") if config.flag("attention_bias", False) else (),
            tied=config.flag("tie_word_embeddings", True),
        )

    def last_norm(self, ops: Ops, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.norm, None, self.config.eps)

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.layer_norm(x, w.norm, None, c.eps), w.attn, w.mlp
        q, k, v = ops.linear(h, a.q, a.q_bias), ops.linear(h, a.k, a.k_bias), ops.linear(h, a.v, a.v_bias)
        if w.q_norm is not None and w.k_norm is not None:
            q = ops.layer_norm(q, w.q_norm, None, c.eps, heads=c.heads)
            k = ops.layer_norm(k, w.k_norm, None, c.eps, heads=c.kv_heads)
        if w.rope is not None:
            q = ops.rope(q, batch.pos, w.rope, c.heads)
            k = ops.rope(k, batch.pos, w.rope, c.kv_heads)
        group, at = self.kv_layout[i]
        seen = ops.attention(q, k, v, batch, layer=at, group=group, heads=c.heads, scale=c.scale, window=w.window)
        x = ops.add(x, ops.linear(seen, a.o, a.o_bias))
        return ops.add(x, ops.linear(ops.swiglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down))

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.scale(super().forward(ops, batch, inputs), self.logit_scale)
