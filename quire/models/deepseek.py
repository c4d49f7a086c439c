"""DeepSeek V2 and V3 (and R1, and GGUFs that call themselves deepseek2): latent attention, and mixtures with shared experts.

A token's key and value of every head come from one latent vector, by a matrix of each head. Here that matrix goes to the other side:
queries are taken into the latent space before attention, results out of it after it, and the cache keeps one vector per token,
    [latent | rotated part], for all heads
so kv_b is cut by heads into its key part (transposed) and its value part. Newer GGUFs hold the two already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Layout, Rope, Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import (
    MAX_CONTEXT,
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
from quire.models.rope import yarn_magnitude
from quire.observe.errors import Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

ARCHS = ("deepseek2",)
HF_ARCHS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
_ROLES = {  # what a role is called in a GGUF, and in a folder
    "q_a": ("q_a", "q_a_proj"),
    "q_a_norm": ("q_a_norm", "q_a_layernorm"),
    "q_b": ("q_b", "q_b_proj"),
    "kv_a": ("kv_a_mqa", "kv_a_proj_with_mqa"),
    "kv_a_norm": ("kv_a_norm", "kv_a_layernorm"),
    "kv_b": ("kv_b", "kv_b_proj"),
    "k_b": ("k_b", ""),
    "v_b": ("v_b", ""),
}
GGUF_NAMES = mixture.GGUF_NAMES | {role: f"blk.{{}}.attn_{name}" for role, (name, _) in _ROLES.items()}
HF_NAMES = mixture.HF_NAMES | {
    role: f"model.layers.{{}}.self_attn.{name}" for role, (_, name) in _ROLES.items() if name
}
HF_NAMES |= {f"shared_{part}": f"model.layers.{{}}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}


@dataclass(frozen=True, slots=True)
class Latent:
    """The sizes of latent attention."""

    heads: int
    plain: int  # columns of a query that are not rotated
    rotated: int
    value: int  # columns of a head's value
    rank: int  # of the latent vector
    q_rank: int | None  # of queries; None: they have one matrix
    eps: float  # of the norms of both

    @property
    def key(self) -> int:
        """The row that the KV cache keeps of a token: its latent and its rotated key."""
        return self.rank + self.rotated

    def check(self, where: str) -> Latent:
        """Raises for sizes that no backend computes."""
        if self.plain < 1 or self.rotated % 2 or self.key % 8:
            raise Unsupported(
                f"{where}: latent attention with {self.plain} plain and {self.rotated} rotated columns and a rank of "
                f"{self.rank} is not supported"
            )
        return self


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights of one block's attention."""

    q_a: Layout | None  # [q_rank, d]
    q_a_bias: Dense | None
    q_a_norm: Dense | None
    q_plain: Layout  # [H * plain, q_rank or d]
    q_rotated: Layout  # [H * rotated, q_rank or d]
    latent: Layout  # [rank, d]
    latent_bias: Dense | None
    latent_norm: Dense
    k_rotated: Layout  # [rotated, d]
    k_bias: Dense | None
    k_in: Layout  # [H * rank, plain]: queries into the latent space
    v_out: Layout  # [H * value, rank]: results out of it
    o: Layout
    o_bias: Dense | None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block."""

    attn_norm: Dense
    attn: Attention
    ffn_norm: Dense
    ffn: Mlp | mixture.Mixture


class Model:
    """A DeepSeek model: its configuration, its weights and its forward."""

    def __init__(
        self,
        dims: Dims,
        latent: Latent,
        weights: Weights,
        rope: Rope,
        scale: float,  # of attention scores
        ffns: list[Mlp | mixture.Mixture],
        *,
        tied: bool | None,
        biased: bool = False,
    ):
        self.config = dims
        self.latent = latent
        self.notes: list[str] = []
        self.rope = rope
        self.scale = scale
        self.tensors = weights.tensors
        self.embedding = weights.matrix("embedding", dims.vocab_size, dims.width)
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", dims.width, i),
                attn=_attention(weights, i, dims.width, latent, biased),
                ffn_norm=weights.norm("ffn_norm", dims.width, i),
                ffn=ffns[i],
            )
            for i in range(dims.layers)
        ]
        self.norm = weights.norm("norm", dims.width)
        self.head = weights.head(dims, self.embedding, tied)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d, latent = _sizes_of_gguf(keys)
        sizes = mixture.sizes_of_gguf(keys)
        shared = gguf.metadata.get_int(f"{keys.arch}.expert_shared_count", 0, low=0, high=mixture.MAX_EXPERTS)
        sizes = replace(sizes, shared=sizes.ffn * shared)
        routing = mixture.routing_of_gguf(keys, sizes, sigmoid=False)
        dense = gguf.metadata.get_int(f"{keys.arch}.leading_dense_block_count", 0, low=0, high=d.layers)
        scaling = metadata.scaling_of(keys, tensors, latent.rotated, d.context)
        scale = 1.0 / math.sqrt(latent.plain + latent.rotated)
        if scaling.kind == "yarn":
            # All of what yarn does to magnitudes is in the scale of scores: the multiplier is 0.1 * mscale_all_dim.
            multiplier = keys.zero_or("rope.scaling.yarn_log_multiplier") or 0.0
            scale *= yarn_magnitude(scaling.factor, 10.0 * multiplier) ** 2
            scaling = replace(scaling, attention_factor=1.0)
        weights = Weights(tensors, GGUF_NAMES)
        rope = rotation(keys.number("rope.freq_base", 10000.0), latent.rotated, scaling, pairs=True)
        ffns = _ffns(weights, d, sizes, routing, dense, "bias" if weights.has("router_bias", dense, "bias") else None)
        model = cls(d, latent, weights, rope, scale, ffns, tied=None)
        # Files of one season hold kv_b beside the two parts of it.
        model.notes += refuse_unknown(gguf, tensors, d, known=lambda name: name.endswith(".attn_kv_b.weight"))
        return model

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        config, tensors = folder.config, Tensors(folder)
        third = folder.architecture == "DeepseekV3ForCausalLM"
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, moe_layer_freq=1, mlp_bias=False)
        base, scaling = hf.rope_of(config, 10000.0)
        d, latent = _sizes_of_hf(config, folder.architecture, hf.context_of(config, scaling))
        scale = _score_scale(config, scaling.factor) / math.sqrt(latent.plain + latent.rotated)
        sizes = mixture.sizes_of_hf(config, count=("n_routed_experts",), ffn="moe_intermediate_size")
        shared = config.count("n_shared_experts", 1 if third else 2, most=mixture.MAX_EXPERTS)
        sizes = replace(sizes, shared=sizes.ffn * shared)
        routing = _sigmoid(config, sizes) if third else _softmax(config, sizes)
        dense = mixture.dense_layers(config, d.layers, 3 if third else 0)
        weights = Weights(tensors, HF_NAMES)
        model = cls(
            d,
            latent,
            weights,
            rotation(base, latent.rotated, scaling, pairs=not third or config.flag("rope_interleave", True)),
            scale,
            _ffns(weights, d, sizes, routing, dense, "e_score_correction_bias" if third else None),
            tied=config.flag("tie_word_embeddings", False),
            biased=config.flag("attention_bias", False),
        )
        tied, known = model.head is model.embedding, mixture.beyond(config, d.layers)
        model.notes += refuse_unknown(folder, tensors, d, tied=tied, known=known) + own_code_line(folder, d)
        return model

    def kv(self, pages: int, page_size: int) -> KV:
        return KV(self.config.layers, pages, page_size, 1, self.latent.key, latent=self.latent.rank)

    def release(self, layout: Layout) -> None:
        self.tensors.release(layout)

    def hidden(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rows batch.logit_rows as they go into the head."""
        c = self.config
        x = ops.embed(batch.ids, self.embedding)  # [T, d]
        for i, w in enumerate(self.layers):
            ops.mark(x, i)
            x = ops.add(x, self._attend(ops, ops.rms_norm(x, w.attn_norm, c.eps), batch, i, w.attn))
            x = ops.add(x, mixture.feed(ops, ops.rms_norm(x, w.ffn_norm, c.eps), w.ffn))
        return head_rows(ops, batch, x, len(self.layers), self.norm, c.eps)

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        return ops.linear(self.hidden(ops, batch, inputs), self.head)

    def _attend(self, ops: Ops, h: Tensor, batch: Batch, layer: int, w: Attention) -> Tensor:
        heads, eps = self.latent.heads, self.latent.eps
        source = h
        if w.q_a is not None and w.q_a_norm is not None:
            source = ops.rms_norm(ops.linear(h, w.q_a, w.q_a_bias), w.q_a_norm, eps)
        inside = ops.head_linear(ops.linear(source, w.q_plain), w.k_in, heads)  # [T, H * rank]
        turned = ops.rope(ops.linear(source, w.q_rotated), batch.pos, self.rope, heads)
        latent = ops.rms_norm(ops.linear(h, w.latent, w.latent_bias), w.latent_norm, eps)
        k_turned = ops.rope(ops.linear(h, w.k_rotated, w.k_bias), batch.pos, self.rope, 1)
        q, k = ops.join(inside, turned, heads), ops.join(latent, k_turned, 1)
        out = ops.latent_attention(q, k, batch, layer=layer, heads=heads, scale=self.scale)  # [T, H * rank]
        return ops.linear(ops.head_linear(out, w.v_out, heads), w.o, w.o_bias)


def _sizes_of_hf(config: Values, architecture: str, context: int) -> tuple[Dims, Latent]:
    hf.refuse_quantized(config)
    heads = config.count("num_attention_heads", most=MAX_HEADS)
    if config.count("num_key_value_heads", heads, most=MAX_HEADS) != heads:
        raise Unsupported(f"{config.where}: num_key_value_heads is not num_attention_heads: not supported here")
    latent = Latent(
        heads=heads,
        plain=config.count("qk_nope_head_dim", 128, most=1 << 16),
        rotated=config.count("qk_rope_head_dim", 64, most=1 << 16),
        value=config.count("v_head_dim", 128, most=1 << 16),
        rank=config.count("kv_lora_rank", 512, most=1 << 16),
        q_rank=config.count("q_lora_rank", None),
        eps=1e-6,  # whatever rms_norm_eps says
    ).check(config.where)
    return _dims(
        latent,
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        context=context,
        layers=config.count("num_hidden_layers", most=MAX_LAYERS),
        width=config.count("hidden_size"),
        ffn=config.count("intermediate_size"),
        eps=config.number("rms_norm_eps", 1e-6),
    ), latent


def _sizes_of_gguf(keys: metadata.Keys) -> tuple[Dims, Latent]:
    rotated = keys.count("rope.dimension_count", most=1 << 16)
    # Newer files say under `key_length` what their cache keeps, and have the heads' own sizes beside it.
    key = "key_length_mla" if keys.has("attention.key_length_mla") else "key_length"
    eps = keys.number(metadata.RMS_EPS, 1e-6)
    latent = Latent(
        heads=keys.count("attention.head_count", most=MAX_HEADS),
        plain=keys.count(f"attention.{key}", most=1 << 16) - rotated,
        rotated=rotated,
        value=keys.count(f"attention.{key.replace('key', 'value')}", most=1 << 16),
        rank=keys.count("attention.kv_lora_rank", most=1 << 16),
        q_rank=keys.count("attention.q_lora_rank", None) if keys.zero_or("attention.q_lora_rank") else None,
        eps=eps,
    ).check(f"metadata {keys.arch}.attention")
    return _dims(
        latent,
        architecture=keys.arch,
        vocab_size=metadata.vocabulary(keys.gguf),
        context=keys.count("context_length", most=MAX_CONTEXT),
        layers=keys.count("block_count", most=MAX_LAYERS),
        width=keys.count("embedding_length"),
        ffn=keys.count("feed_forward_length"),
        eps=eps,
    ), latent


def _dims(
    latent: Latent, *, architecture: str, vocab_size: int, context: int, layers: int, width: int, ffn: int, eps: float
) -> Dims:
    return Dims(architecture, vocab_size, context, layers, width, ffn, latent.heads, 1, latent.key, eps)


def _score_scale(config: Values, factor: float) -> float:
    """What yarn multiplies scores by: squared, since it is meant for queries and keys."""
    values = config.inside("rope_parameters") or config.inside("rope_scaling")
    if values is None or (values.text("rope_type", None) or values.text("type", "default")) == "default":
        return 1.0
    amount = values.number("mscale_all_dim", 0.0) if values.get("mscale_all_dim") else 0.0
    return yarn_magnitude(factor, amount) ** 2


def _softmax(config: Values, sizes: mixture.Sizes) -> Routing:
    """V2's way: softmax scores, and groups by their best expert where topk_method says so."""
    hf.refuse(config, scoring_func="softmax", norm_topk_prob=False)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise Unsupported(f"{config.where}: topk_method is {method[:40]!r}: that is not supported here")
    limited = method != "greedy"
    routing = Routing(
        top=sizes.top,
        scale=config.number("routed_scaling_factor", 1.0),
        groups=config.count("n_group", most=mixture.MAX_EXPERTS) if limited else 1,
        top_groups=config.count("topk_group", most=mixture.MAX_EXPERTS) if limited else 1,
    )
    return mixture.check_groups(config.where, routing, sizes)


def _sigmoid(config: Values, sizes: mixture.Sizes) -> Routing:
    hf.refuse(config, scoring_func="sigmoid", topk_method="noaux_tc")
    return mixture.routing_of_hf(config, sizes)


def _ffns(
    weights: Weights, d: Dims, sizes: mixture.Sizes, routing: Routing, dense: int, bias: str | None
) -> list[Mlp | mixture.Mixture]:
    """A plain MLP in the first layers, a mixture in the others. bias: what the router's is called."""

    def ffn(i: int) -> Mlp | mixture.Mixture:
        if i < dense:
            return mlp_of(weights, i, d, ())
        chosen = weights.tensors.vector(weights.name("router_bias", i, bias), sizes.count) if bias else None
        return mixture.mixture_of(weights, i, sizes, d.width, replace(routing, bias=chosen))

    return [ffn(i) for i in range(d.layers)]


def _attention(weights: Weights, layer: int, width: int, c: Latent, biased: bool) -> Attention:
    t = weights.tensors

    def bias(role: str, *sizes: int) -> tuple[Dense | None, ...]:
        if not biased:
            return (None,) * len(sizes)
        ends = np.cumsum(sizes)[:-1].tolist()
        whole = weights.name(role, layer, "bias")
        made = t.cut(whole, (sum(sizes),), lambda w: tuple(replace(w, data=x) for x in np.split(w.data, ends)))
        return tuple(part if isinstance(part, Dense) else None for part in made)

    low = c.q_rank is not None
    rank = c.q_rank if c.q_rank is not None else width
    q_plain, q_rotated = t.cut(
        weights.name("q_b" if low else "q", layer),
        (c.heads * (c.plain + c.rotated), rank),
        lambda w: by_head(w, c.heads, c.plain),
    )
    latent, k_rotated = weights.split("kv_a", (c.rank, c.rotated), width, layer)
    k_in, v_out = _in_and_out(weights, layer, c)
    latent_bias, k_bias = bias("kv_a", c.rank, c.rotated)
    return Attention(
        q_a=weights.matrix("q_a", rank, width, layer) if low else None,
        q_a_bias=bias("q_a", rank)[0] if low else None,
        q_a_norm=weights.norm("q_a_norm", rank, layer) if low else None,
        q_plain=q_plain,
        q_rotated=q_rotated,
        latent=latent,
        latent_bias=latent_bias,
        latent_norm=weights.norm("kv_a_norm", c.rank, layer),
        k_rotated=k_rotated,
        k_bias=k_bias,
        k_in=k_in,
        v_out=v_out,
        o=weights.matrix("o", width, c.heads * c.value, layer),
        o_bias=bias("o", width)[0],
    )


def _in_and_out(weights: Weights, layer: int, c: Latent) -> tuple[Layout, Layout]:
    t = weights.tensors
    if "k_b" in weights.names and weights.has("k_b", layer):
        k = t.cut(weights.name("k_b", layer), (c.heads, c.rank, c.plain), _flat)[0]
        v = t.cut(weights.name("v_b", layer), (c.heads, c.value, c.rank), _flat)[0]
        return k, v

    def cut(w: Layout) -> tuple[Layout, ...]:
        key, value = by_head(w, c.heads, c.plain)
        return transposed(key, c.heads), value

    k_in, v_out = t.cut(weights.name("kv_b", layer), (c.heads * (c.plain + c.value), c.rank), cut)
    return k_in, v_out


def by_head(w: Layout, heads: int, first: int) -> tuple[Layout, Layout]:
    """The matrix split in two copies: the first rows of every head, and the other rows of every head."""
    rows = w.data.reshape(heads, -1, w.data.shape[-1])
    cut = (rows[:, :first], rows[:, first:])
    a, b = (np.ascontiguousarray(part).reshape(-1, w.data.shape[-1]) for part in cut)
    return replace(w, data=a), replace(w, data=b)


def transposed(w: Layout, heads: int) -> Dense:
    """Each head's matrix transposed and dequantized, since blocks of codes cannot be transposed."""
    plain = w if isinstance(w, Dense) else Dense(w.dequantize(), "f32")
    turned = plain.data.reshape(heads, -1, plain.data.shape[1]).swapaxes(1, 2)
    return Dense(np.ascontiguousarray(turned).reshape(-1, turned.shape[2]), plain.dtype)


def _flat(w: Layout) -> tuple[Layout, ...]:
    """A stack as one matrix: the same bytes."""
    return (replace(w, data=w.data.reshape(-1, w.data.shape[-1])),)
