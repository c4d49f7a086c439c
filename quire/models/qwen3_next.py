"""Qwen3-Next: three layers in four are gated delta nets, which carry a state instead of keys; the fourth attends to everything.

Attention rotates a part of each head and is gated by a sigmoid; delta nets are in delta.py. Every layer has a mixture of experts with
a shared one behind a sigmoid, or a plain MLP. A folder keeps norms as what they are more than 1 (but not the delta net's); a GGUF
has the 1 added. Queries are mixed with their gates in both. Layers that predict further tokens are left alone and told.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Layout, Rope, Routing
from quire.models import delta, hf, metadata, mixture
from quire.models.delta import DeltaNet, Shape, delta_net_of, rows_of
from quire.models.parts import (
    MAX_HEADS,
    MAX_LAYERS,
    Dims,
    Mlp,
    Weights,
    head_rows,
    mlp_of,
    own_code_line,
    refuse_unknown,
    rotation,
)
from quire.models.qwen_moe import plain_layers
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

ARCHS = ("qwen3next",)
HF_ARCHS = ("Qwen3NextForCausalLM",)
KINDS = ("full_attention", "linear_attention")
GGUF_NAMES = {
    **mixture.GGUF_NAMES,
    "ffn_norm": "blk.{}.post_attention_norm",
    **delta.GGUF_NAMES,
}
HF_NAMES = {**mixture.HF_NAMES, **delta.HF_NAMES}


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of attention over everything; its gate is as wide as its queries."""

    q: Layout
    gate: Layout
    k: Layout
    v: Layout
    o: Layout
    q_norm: Dense  # [head_dim]
    k_norm: Dense


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block."""

    attn_norm: Dense
    mix: Attention | DeltaNet
    ffn_norm: Dense
    ffn: Mlp | mixture.Mixture


class Model:
    """A Qwen3-Next model: its configuration, its weights and its forward."""

    def __init__(
        self,
        dims: Dims,
        shape: Shape,
        weights: Weights,
        rope: Rope,
        *,
        full: Collection[int],  # layers that attend
        sizes: mixture.Sizes,
        routing: Routing,
        plain: Collection[int] = (),  # layers with an MLP and no experts
        plus: float,  # what the file left out of its norms
        tied: bool | None,
    ):
        self.config = d = dims
        self.shape = shape
        self.rope = rope
        self.tensors = weights.tensors
        if not full:
            raise Unsupported(f"a {d.architecture} without a layer that attends is not supported")
        self.notes = [f"state: {d.layers - len(full)} of {d.layers} layers carry one instead of keys and values"]
        self.embedding = weights.matrix("embedding", d.vocab_size, d.width)
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", d.width, i, plus),
                mix=_attention(weights, i, d, plus) if i in full else delta_net_of(weights, i, d, shape),
                ffn_norm=weights.norm("ffn_norm", d.width, i, plus),
                ffn=mlp_of(weights, i, d, ())
                if i in plain
                else mixture.mixture_of(weights, i, sizes, d.width, routing, gated=True),
            )
            for i in range(d.layers)
        ]
        self.norm = weights.norm("norm", d.width, plus=plus)
        self.head = weights.head(d, self.embedding, tied)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys, ffn=None)
        ahead = keys.meta.get_int(f"{keys.arch}.nextn_predict_layers", 0)
        if not 0 <= ahead < d.layers:
            raise BadModelFile(
                f"metadata {keys.arch}.nextn_predict_layers is {ahead}: there are {d.layers} layers in all"
            )
        layers = d.layers - ahead
        extra = tuple(f"blk.{i}." for i in range(layers, d.layers))
        d = replace(d, layers=layers)
        heads, inner = keys.count("ssm.time_step_rank", most=MAX_HEADS), keys.count("ssm.inner_size")
        if inner % heads:
            raise BadModelFile(f"metadata {keys.arch}.ssm.inner_size is {inner}: not {heads} equal heads")
        shape = Shape(
            taps=keys.count("ssm.conv_kernel", most=64),
            key_heads=keys.count("ssm.group_count", most=MAX_HEADS),
            heads=heads,
            key_dim=keys.count("ssm.state_size", most=1 << 16),
            value_dim=inner // heads,
        ).check(f"metadata {keys.arch}.ssm")
        every = keys.count("full_attention_interval", 4, most=MAX_LAYERS)
        sizes = replace(mixture.sizes_of_gguf(keys), shared=keys.count("expert_shared_feed_forward_length"))
        dim = metadata.rope_dim_of(keys, d)
        model = cls(
            d,
            shape,
            Weights(tensors, GGUF_NAMES),
            rotation(
                keys.number("rope.freq_base", 10000.0),
                dim,
                metadata.scaling_of(keys, tensors, dim, d.context),
                pairs=False,
            ),
            full=range(every - 1, d.layers, every),
            sizes=sizes,
            routing=Routing(top=sizes.top, renormalize=keys.flag("expert_weights_norm", True)),
            plus=0.0,
            tied=None,
        )
        model.notes += refuse_unknown(gguf, tensors, d, known=lambda name: bool(extra) and name.startswith(extra))
        return model

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        config, tensors = folder.config, Tensors(folder)
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, attention_bias=False)
        base, scaling = hf.rope_of(config, 10000.0, partial=True)
        layers = config.count("num_hidden_layers", most=MAX_LAYERS)
        plain = plain_layers(config, layers)
        d = hf.dims_of(
            config,
            folder.architecture,
            context=hf.context_of(config, scaling),
            head_dim=256,
            ffn="intermediate_size" if plain else None,
        )
        shape = Shape(
            taps=config.count("linear_conv_kernel_dim", 4, most=64),
            key_heads=config.count("linear_num_key_heads", 16, most=MAX_HEADS),
            heads=config.count("linear_num_value_heads", 32, most=MAX_HEADS),
            key_dim=config.count("linear_key_head_dim", 128, most=1 << 16),
            value_dim=config.count("linear_value_head_dim", 128, most=1 << 16),
        ).check(config.where)
        sizes = mixture.sizes_of_hf(config, count=("num_experts",), ffn="moe_intermediate_size")
        sizes = replace(sizes, shared=config.count("shared_expert_intermediate_size"))
        model = cls(
            d,
            shape,
            Weights(tensors, HF_NAMES),
            rotation(base, hf.rotated_of(config, d.head_dim, 0.25), scaling, pairs=False),
            full=_full(config, layers),
            sizes=sizes,
            routing=Routing(top=sizes.top, renormalize=config.flag("norm_topk_prob", True)),
            plain=plain,
            plus=1.0,
            tied=config.flag("tie_word_embeddings", False),
        )
        tied = model.head is model.embedding
        model.notes += refuse_unknown(folder, tensors, d, tied=tied, known=lambda name: name.startswith("mtp."))
        model.notes += own_code_line(folder, d)
        return model

    def kv(self, pages: int, page_size: int) -> KV:
        """Keys and values of the layers that attend; then the states of the others, whose pages are one state each."""
        d = self.config
        carry = sum(isinstance(w.mix, DeltaNet) for w in self.layers)
        full = KV(d.layers - carry, pages, page_size, d.kv_heads, d.head_dim)
        return replace(full, more=(KV(carry, pages, page_size, 0, 0, state=self.shape.state),)) if carry else full

    def release(self, layout: Layout) -> None:
        self.tensors.release(layout)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows as they go into the head."""
        eps = self.config.eps
        x = ops.embed(batch.ids, self.embedding)  # [T, d]
        counts = {Attention: 0, DeltaNet: 0}
        for i, w in enumerate(self.layers):
            ops.mark(x, i)
            h, at = ops.rms_norm(x, w.attn_norm, eps), counts[type(w.mix)]
            if isinstance(w.mix, Attention):
                mixed = self._attend(ops, h, batch, w.mix, at)
            else:
                mixed = delta.carry(ops, h, batch, w.mix, self.shape, layer=at, group=1, eps=eps)
            x = ops.add(x, mixed)
            x = ops.add(x, mixture.feed(ops, ops.rms_norm(x, w.ffn_norm, eps), w.ffn))
            counts[type(w.mix)] += 1
        return head_rows(ops, batch, x, len(self.layers), self.norm, eps)

    def _attend(self, ops: Ops, h: Tensor, batch: Batch, w: Attention, at: int) -> Tensor:
        c = self.config
        gate = ops.linear(h, w.gate)  # first: queries, keys and values then follow one another in a merged product
        q = ops.rms_norm(ops.linear(h, w.q), w.q_norm, c.eps, heads=c.heads)
        k = ops.rms_norm(ops.linear(h, w.k), w.k_norm, c.eps, heads=c.kv_heads)
        v = ops.linear(h, w.v)
        q = ops.rope(q, batch.pos, self.rope, c.heads)
        k = ops.rope(k, batch.pos, self.rope, c.kv_heads)
        y = ops.attention(q, k, v, batch, layer=at, heads=c.heads, scale=c.scale)
        return ops.linear(ops.sigmoid_gate(y, gate), w.o)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.linear(self.hidden(ops, batch, inputs), self.head)


def _full(config: Values, layers: int) -> tuple[int, ...]:
    """The layers that attend: as listed, or every fourth."""
    listed = config.get("layer_types")
    if listed is None:
        every = config.count("full_attention_interval", 4, most=MAX_LAYERS)
        return tuple(range(every - 1, layers, every))
    if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(kind, str) for kind in listed):
        raise BadModelFile(f"{config.where}: layer_types is {str(listed)[:60]}: {layers} names are needed")
    strange = next((kind for kind in listed if kind not in KINDS), None)
    if strange is not None:
        raise Unsupported(f"{config.where}: layer_types has {strange[:40]!r}", cure=f"supported: {', '.join(KINDS)}")
    return tuple(i for i, kind in enumerate(listed) if kind == KINDS[0])


def _attention(weights: Weights, layer: int, d: Dims, plus: float) -> Attention:
    both = np.arange(2 * d.q_width).reshape(d.heads, 2, d.head_dim)  # a head's query, then its gate
    q, gate = rows_of(weights, "q", layer, d.width, both[:, 0], both[:, 1])
    return Attention(
        q=q,
        gate=gate,
        k=weights.matrix("k", d.kv_width, d.width, layer),
        v=weights.matrix("v", d.kv_width, d.width, layer),
        o=weights.matrix("o", d.width, d.q_width, layer),
        q_norm=weights.norm("q_norm", d.head_dim, layer, plus),
        k_norm=weights.norm("k_norm", d.head_dim, layer, plus),
    )
