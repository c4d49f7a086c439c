"""Gemma 3, its text part: Gemma 2 with norms over each head of queries and keys, and two rotations.

Five layers in six have a window and rotate with a small base; the sixth sees all, with a large base that may be stretched. A folder
keeps norms as what they are more than 1; a GGUF has the 1 added. The scale of scores is a setting in a folder; a GGUF has none,
and only the 27B model (62 layers) differs from 1 / sqrt(head size). Of a model that also sees images, the tower and its
projector are left alone, which is told.
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
from quire.models.gemma2 import NAMES
from quire.models.parts import (
    GGUF_NAMES,
    Attention,
    Dims,
    Mlp,
    Weights,
    attention_of,
    mlp_of,
    rotation,
    seen,
)
from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values

ARCHS = ("gemma3",)
HF_ARCHS = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
LARGEST = 62  # layers of the 27B model
IMAGES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.", "v.", "mm.")
TEXT = {  # what a text_config leaves out where it is the same as in the first of these models
    "vocab_size": 262208, "max_position_embeddings": 131072, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 256,
}  # fmt: skip
INSIDE = ("model.language_model.", "language_model.model.")  # where the text part may be in a model with images


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block, what it sees, and how it rotates."""

    attn_norm: Dense
    attn: Attention
    q_norm: Dense  # [head_dim]
    k_norm: Dense
    attn_post_norm: Dense
    ffn_norm: Dense
    mlp: Mlp
    ffn_post_norm: Dense
    window: int | None
    rope: Rope


class Model(Decoder):
    """A Gemma 3 model: its configuration, its weights and its layers."""

    unused = IMAGES

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        *,
        wide: Rope,  # of layers that see everything
        near: Rope,  # of those with a window
        scale: float,  # of attention scores
        windows: tuple[int | None, ...],
        logit_cap: float | None,
        plus: float,  # what the file left out of its norms
        biased: Collection[str] | None = None,
        tied: bool | None = None,
    ):
        within = seen(windows, dims.context)
        super().__init__(dims, weights, windows=within, tied=tied, plus=plus)
        d = dims
        self.scale, self.logit_cap = scale, logit_cap
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i, plus),
                attn=attention_of(weights, i, d, biased),
                q_norm=weights.norm("q_norm", d.head_dim, i, plus),
                k_norm=weights.norm("k_norm", d.head_dim, i, plus),
                attn_post_norm=weights.norm("attn_post_norm", d.width, i, plus),
                ffn_norm=weights.norm("ffn_norm", d.width, i, plus),
                mlp=mlp_of(weights, i, d, ()),
                ffn_post_norm=weights.norm("ffn_post_norm", d.width, i, plus),
                window=within[i],
                rope=wide if windows[i] is None else near,
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        dim = metadata.rope_dim_of(keys, d)
        scaling = metadata.scaling_of(keys, tensors, dim, d.context)
        return cls(
            d,
            Weights(tensors, GGUF_NAMES),
            wide=rotation(keys.number("rope.freq_base"), dim, scaling, pairs=False),
            near=rotation(keys.number("rope.freq_base_swa", 10000.0), dim, Scaling(), pairs=False),
            scale=1.0 / math.sqrt(d.width // d.heads) if d.layers == LARGEST else d.scale,
            windows=metadata.windows_of(keys, d, period=6),
            logit_cap=keys.zero_or("final_logit_softcapping"),
            plus=0.0,
        )

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes; one with images keeps the text part's configuration inside."""
        names, tied = NAMES, config.flag("tie_word_embeddings", True)
        if architecture == "Gemma3ForConditionalGeneration":
            hf.refuse_quantized(config)
            config, names = _text_part(config, tensors)
        hf.check_activation(config, "hidden_activation", hf.GELU_TANH)
        hf.refuse(config, use_bidirectional_attention=False, attn_logit_softcapping=None)
        d = hf.dims_of(config, architecture, head_dim=256)
        wide, near = _ropes(config)
        return cls(
            d,
            Weights(tensors, names),
            wide=rotation(wide[0], d.head_dim, wide[1], pairs=False),
            near=rotation(near[0], d.head_dim, near[1], pairs=False),
            scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            windows=hf.windows_of(config, d.layers, config.count("sliding_window_pattern", 6), default=4096),
            logit_cap=config.number("final_logit_softcapping", None),
            plus=1.0,
            biased=("q", "k", "v", "o") if config.flag("attention_bias", False) else (),
            tied=tied,
        )

    def embedded(self, ops: Ops, batch: Batch) -> Tensor:
        return ops.scale(ops.embed(batch.ids, self.embedding), math.sqrt(self.config.width))

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q = ops.rms_norm(ops.linear(h, a.q, a.q_bias), w.q_norm, c.eps, heads=c.heads)
        k = ops.rms_norm(ops.linear(h, a.k, a.k_bias), w.k_norm, c.eps, heads=c.kv_heads)
        q = ops.rope(q, batch.pos, w.rope, c.heads)
        k = ops.rope(k, batch.pos, w.rope, c.kv_heads)
        v = ops.linear(h, a.v, a.v_bias)
        group, at = self.kv_layout[i]
        h = ops.attention(q, k, v, batch, layer=at, group=group, heads=c.heads, scale=self.scale, window=w.window)
        x = ops.add(x, ops.rms_norm(ops.linear(h, a.o, a.o_bias), w.attn_post_norm, c.eps))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        h = ops.linear(ops.geglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down)
        return ops.add(x, ops.rms_norm(h, w.ffn_post_norm, c.eps))

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        logits = super().forward(ops, batch, inputs)
        return logits if self.logit_cap is None else ops.softcap(logits, self.logit_cap)


def _ropes(config: Values) -> tuple[tuple[float, Scaling], tuple[float, Scaling]]:
    """Base and scaling of layers that see all, and of those with a window. Older files have them side by side."""
    both = config.inside("rope_parameters")
    if both is None:
        return hf.rope_of(config, 1000000.0), (config.number("rope_local_base_freq", 10000.0), Scaling())
    found: list[tuple[float, Scaling]] = []
    for kind, theta in (("full_attention", 1000000.0), ("sliding_attention", 10000.0)):
        values = both.inside(kind)
        if values is None:
            raise BadModelFile(f"{both.where}: {kind} is missing")
        hf.refuse(values, partial_rotary_factor=1.0)
        found.append((values.number("rope_theta", theta), hf.scaling_of(config, values)))
    return found[0], found[1]


def _text_part(config: Values, tensors: Tensors) -> tuple[Values, dict[str, str]]:
    """The configuration of the text part, and what its tensors are called."""
    from quire.weights.values import Values

    text = config.inside("text_config")
    if text is None:
        raise BadModelFile(f"{config.where}: text_config is missing")
    inside = next((p for p in INSIDE if tensors.has(f"{p}embed_tokens.weight")), INSIDE[0])
    names = {role: name.replace("model.", inside, 1) for role, name in NAMES.items() if name.startswith("model.")}
    text = Values(text.where, {**TEXT, **text.raw})
    return text, {**names, "head": "language_model.lm_head" if inside == INSIDE[1] else "lm_head"}
