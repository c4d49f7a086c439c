"""Phi-3, Phi-3.5 and Phi-4: the Llama shape with fused projections, heads that may be rotated in part, and longrope.

Longrope has two lists of divisors, for sequences within the original context and for longer ones. A sequence that outgrows the
first would need its cached keys again, so the list is chosen once, by the longest sequence that is served: `stretch`. With the
original context or less, numbers are those of transformers for every prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Layout, Rope
from quire.models import hf, metadata
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
    head_rows,
    own_code_line,
    refuse_strangers,
    rotation,
    seen,
    windows_line,
)
from quire.models.places import Places
from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
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


class Model:
    """A Phi-3 model: its configuration, its weights and its forward."""

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
        self.config = d = dims
        self.told = windows_line(windows)
        self.places = Places(windows, self.config.context)
        self._tensors = weights.tensors
        self._positions = positions
        self.stretch(d.context)
        self.embedding = weights.matrix("embedding", d.vocab_size, d.width)
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
        self.norm = weights.norm("norm", d.width)
        self.head = weights.head(d, self.embedding, tied)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
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
        model = cls(
            d,
            Weights(tensors, GGUF_NAMES),
            Positions(keys.number("rope.freq_base", 10000.0), dim, scaling),
            windows=seen(metadata.windows_of(keys, d, period=0), d.context),
        )
        model.told += refuse_strangers(gguf, tensors, d)
        return model

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        tensors = Tensors(folder)
        model = cls.of(folder.config, folder.architecture, tensors)
        tied = model.head is model.embedding
        model.told += refuse_strangers(folder, tensors, model.config, tied=tied)
        model.told += own_code_line(folder, model.config)
        return model

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
        self._served = context

    @property
    def notes(self) -> list[str]:
        original = self._positions.scaling.original_context
        if self._positions.scaling.kind != "longrope":
            return self.told
        if self._served <= original:
            return [*self.told, f"longrope: the factors for a context of at most {original} tokens"]
        return [
            *self.told,
            f"longrope: the factors for a context above {original} tokens, for short prompts too; "
            f"with a context of {original} or less the others are used",
        ]

    def kv(self, pages: int, page_size: int) -> KV:
        return self.places.kv(pages, page_size, self.config.kv_heads, self.config.head_dim)

    def release(self, layout: Layout) -> None:
        self._tensors.release(layout)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows as they go into the head."""
        c = self.config
        x = ops.embed(batch.ids, self.embedding)  # [T, d]
        for i, w in enumerate(self.layers):
            ops.mark(x, i)
            h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
            q = ops.rope(ops.linear(h, a.q), batch.pos, self.rope, c.heads)
            k = ops.rope(ops.linear(h, a.k), batch.pos, self.rope, c.kv_heads)
            v = ops.linear(h, a.v)
            group, at = self.places[i]
            h = ops.attention(q, k, v, batch, layer=at, group=group, heads=c.heads, scale=c.scale, window=w.window)
            x = ops.add(x, ops.linear(h, a.o))
            h = ops.rms_norm(x, w.ffn_norm, c.eps)
            x = ops.add(x, ops.linear(ops.swiglu(ops.linear(h, m.gate), ops.linear(h, m.up)), m.down))
        return head_rows(ops, batch, x, len(self.layers), self.norm, c.eps)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.linear(self.hidden(ops, batch, inputs), self.head)
