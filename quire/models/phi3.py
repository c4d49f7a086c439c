"""Phi-3, Phi-3.5 and Phi-4: the Llama shape with fused projections, heads that may be rotated in part, and longrope.

Longrope has two lists of divisors, for sequences within the original context and for longer ones. A sequence that outgrows the
first would need its cached keys again, so the list is chosen once, by the longest sequence that is served: `stretch`. With the
original context or less, numbers are those of transformers for every prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    fused_attention_of,
    fused_mlp_of,
    rotation,
    seen,
)
from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values

ARCHS = ("phi3",)
HF_ARCHS = ("Phi3ForCausalLM",)


@dataclass(frozen=True, slots=True)
class Positions:
    """All that a rotation is made of."""

    base: float
    dim: int
    scaling: Scaling


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block, and what it sees."""

    attn_norm: Dense
    attn: Attention
    ffn_norm: Dense
    mlp: Mlp
    window: int | None


class Model(Decoder):
    """A Phi-3 model: its configuration, its weights and its layers."""

    rope: Rope

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        positions: Positions,
        *,
        windows: tuple[int | None, ...],
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, windows=windows, tied=tied)
        d = dims
        self._positions = positions
        self.stretch(d.context)
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i),
                attn=fused_attention_of(weights, i, d),
                ffn_norm=weights.norm("ffn_norm", d.width, i),
                mlp=fused_mlp_of(weights, i, d),
                window=windows[i],
            )
            for i in range(d.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        d = metadata.dims_of(keys)
        dim = metadata.rope_dim_of(keys, d)
        scaling = metadata.scaling_of(keys, tensors, dim, d.context)
        short = metadata.divisors_of(tensors, "rope_factors_short.weight", dim)
        long = metadata.divisors_of(tensors, "rope_factors_long.weight", dim)
        if (short is None) != (long is None):
            raise BadModelFile(
                "of the tensors 'rope_factors_short.weight' and 'rope_factors_long.weight' one is missing"
            )
        if long is not None:
            original = keys.count("rope.scaling.original_context_length", most=MAX_CONTEXT)
            factor = d.context / original
            scaling = replace(
                scaling, kind="longrope", factor=factor, original_context=original, short=short, long=long
            )
        return cls(
            d,
            Weights(tensors, GGUF_NAMES),
            Positions(keys.number("rope.freq_base", 10000.0), dim, scaling),
            windows=seen(metadata.windows_of(keys, d, period=0), d.context),
        )

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes."""
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, attention_bias=False)
        base, scaling = hf.rope_of(config, 10000.0, partial=True, kinds=(*hf.KINDS, "longrope"))
        context, eps = hf.context_of(config, scaling), ("rms_norm_eps", 1e-5)
        d = hf.dims_of(config, architecture, context=context, eps=eps)
        return cls(
            d,
            Weights(tensors, HF_NAMES),
            Positions(base, hf.rotated_of(config, d.head_dim), scaling),
            windows=seen(hf.windows_of(config, d.layers, period=0), d.context),
            tied=config.flag("tie_word_embeddings", False),
        )

    def stretch(self, context: int) -> None:
        """Rotate as for sequences of up to so many tokens. Before the model is compiled."""
        p = self._positions
        self.rope = rotation(p.base, p.dim, p.scaling, pairs=False, context=context)
        original = p.scaling.original_context
        if p.scaling.kind != "longrope":
            return
        self.notes = [note for note in self.notes if not note.startswith("longrope: ")]
        if context <= original:
            self.notes.append(f"longrope: the factors for a context of at most {original} tokens")
        else:
            self.notes.append(
                f"longrope: the factors for a context above {original} tokens, for short prompts too; "
                f"with a context of {original} or less the others are used"
            )

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q = ops.rope(ops.linear(h, a.q), batch.pos, self.rope, c.heads)
        k = ops.rope(ops.linear(h, a.k), batch.pos, self.rope, c.kv_heads)
        v = ops.linear(h, a.v)
        group, at = self.kv_layout[i]
        h = ops.attention(q, k, v, batch, layer=at, group=group, heads=c.heads, scale=c.scale, window=w.window)
        x = ops.add(x, ops.linear(h, a.o))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        return ops.add(x, ops.linear(ops.swiglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down))
