"""The Llama family: Llama, SmolLM2, Mistral and everything else of that shape.

Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Query and key rows in a GGUF are stored
for rotation of neighbouring pairs, so `pairs` is True there. The head is the embedding when the file has no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Layout, Rope
from quire.models.rope import Scaling, frequencies
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf import GGUF
from quire.weights.tensors import Tensors

ARCHS = ("llama",)
MAX_LAYERS = 1024
MAX_HEAD_DIM = 256


@dataclass(frozen=True, slots=True)
class Config:
    architecture: str
    vocab_size: int
    context: int
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    scaling: Scaling
    eps: float

    @classmethod
    def from_gguf(cls, gguf: GGUF, tensors: Tensors) -> Config:
        """Read and check the metadata; every number that is not possible is an error that names its key."""
        arch, meta = gguf.architecture, gguf.metadata

        def count(key: str, default: int | None = None, most: int = 1 << 24) -> int:
            value = meta.get_int(f"{arch}.{key}") if default is None else meta.get_int(f"{arch}.{key}", default)
            if not 0 < value <= most:
                raise BadModelFile(f"metadata {arch}.{key} is {value}: it must be between 1 and {most}")
            return value

        def number(key: str, default: float) -> float:
            value = meta.get_float(f"{arch}.{key}", default)
            if not (math.isfinite(value) and value > 0):
                raise BadModelFile(f"metadata {arch}.{key} is {value}: it must be a positive number")
            return value

        if meta.get_int(f"{arch}.expert_count", 0) > 0:
            raise Unsupported("mixture-of-experts models of the llama architecture are not supported yet")
        heads = count("attention.head_count", most=4096)
        width = count("embedding_length")
        kv_heads = count("attention.head_count_kv", heads, most=4096)
        head_dim = count("attention.key_length", max(1, width // heads), most=MAX_HEAD_DIM)
        if meta.get_int(f"{arch}.attention.value_length", head_dim) != head_dim:
            raise Unsupported("keys and values of different sizes are not supported by this architecture")
        rope_dim = count("rope.dimension_count", head_dim, most=MAX_HEAD_DIM)
        if heads % kv_heads:
            raise BadModelFile(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
        if head_dim % 8 or rope_dim % 2 or rope_dim > head_dim:
            raise Unsupported(f"head size {head_dim} with {rope_dim} rotated dimensions is not supported")
        context = count("context_length", most=1 << 26)
        window = meta.get_int(f"{arch}.attention.sliding_window", 0)
        return cls(
            architecture=arch,
            vocab_size=_vocabulary(gguf),
            context=min(context, window) if window > 0 else context,
            layers=count("block_count", most=MAX_LAYERS),
            width=width,
            ffn=count("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            rope_base=number("rope.freq_base", 10000.0),
            scaling=_scaling(gguf, tensors, rope_dim, context),
            eps=number("attention.layer_norm_rms_epsilon", 1e-5),
        )


def _vocabulary(gguf: GGUF) -> int:
    """Rows of the embedding: the one number that the weights themselves bear out."""
    info = gguf.tensors.get("token_embd.weight")
    if info is None:
        raise BadModelFile("tensor 'token_embd.weight' is missing from the file")
    if len(info.shape) != 2:
        raise BadModelFile(f"tensor 'token_embd.weight' has {len(info.shape)} dimensions: it must have 2")
    return info.shape[0]


def _scaling(gguf: GGUF, tensors: Tensors, rope_dim: int, context: int) -> Scaling:
    arch, meta = gguf.architecture, gguf.metadata
    kind = meta.get_str(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise Unsupported(f"rope scaling {kind!r} is not supported", cure="supported: none, linear, llama3, yarn")
    factor = meta.get_float(f"{arch}.rope.scaling.factor", 1.0)
    if not (math.isfinite(factor) and factor > 0):
        raise BadModelFile(f"metadata {arch}.rope.scaling.factor is {factor}: it must be a positive number")
    factors = tensors.optional_vector("rope_freqs.weight", rope_dim // 2)
    divisors = factors.dequantize() if factors else None
    if divisors is not None and not (np.isfinite(divisors) & (divisors > 0)).all():
        raise BadModelFile("tensor 'rope_freqs.weight' holds divisors that are not positive numbers")
    original = meta.get_int(f"{arch}.rope.scaling.original_context_length", context)
    if kind == "yarn" and original <= 0:
        raise BadModelFile(f"metadata {arch}.rope.scaling.original_context_length is {original}")
    attention = meta.get_float(f"{arch}.rope.scaling.attn_factor", 0.0)
    return Scaling(
        kind=kind,
        factor=factor,
        original_context=original,
        beta_fast=meta.get_float(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.get_float(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=attention if attention > 0 else None,
        factors=divisors,
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block."""

    attn_norm: Dense
    q: Layout
    k: Layout
    v: Layout
    o: Layout
    ffn_norm: Dense
    gate: Layout
    up: Layout
    down: Layout
    q_bias: Dense | None
    k_bias: Dense | None
    v_bias: Dense | None
    o_bias: Dense | None


class Model:
    """A Llama-shaped model: its configuration, its weights and its forward."""

    def __init__(self, config: Config, tensors: Tensors):
        self.config = config
        self._tensors = tensors
        c = config
        self.embedding = tensors.matrix("token_embd.weight", c.vocab_size, c.width)
        self.layers = [self._layer(i) for i in range(c.layers)]
        self.norm = tensors.vector("output_norm.weight", c.width)
        tied = not tensors.has("output.weight")
        self.head = self.embedding if tied else tensors.matrix("output.weight", c.vocab_size, c.width)
        freq, magnitude = frequencies(c.rope_base, c.rope_dim, c.scaling)
        self.rope = Rope(frequencies=freq, dim=c.rope_dim, pairs=True, magnitude=magnitude)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        tensors = Tensors(gguf)
        return cls(Config.from_gguf(gguf, tensors), tensors)

    def _layer(self, i: int) -> Layer:
        c, t, at = self.config, self._tensors, f"blk.{i}."
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        return Layer(
            attn_norm=t.vector(at + "attn_norm.weight", c.width),
            q=t.matrix(at + "attn_q.weight", q, c.width),
            k=t.matrix(at + "attn_k.weight", kv, c.width),
            v=t.matrix(at + "attn_v.weight", kv, c.width),
            o=t.matrix(at + "attn_output.weight", c.width, q),
            ffn_norm=t.vector(at + "ffn_norm.weight", c.width),
            gate=t.matrix(at + "ffn_gate.weight", c.ffn, c.width),
            up=t.matrix(at + "ffn_up.weight", c.ffn, c.width),
            down=t.matrix(at + "ffn_down.weight", c.width, c.ffn),
            q_bias=t.optional_vector(at + "attn_q.bias", q),
            k_bias=t.optional_vector(at + "attn_k.bias", kv),
            v_bias=t.optional_vector(at + "attn_v.bias", kv),
            o_bias=t.optional_vector(at + "attn_output.bias", c.width),
        )

    def kv(self, pages: int, page_size: int) -> KV:
        c = self.config
        return KV(layers=c.layers, pages=pages, page_size=page_size, kv_heads=c.kv_heads, head_dim=c.head_dim)

    def release(self, layout: Layout) -> None:
        self._tensors.release(layout)

    @property
    def notes(self) -> list[str]:
        unused = self._tensors.leftover()
        if not unused:
            return []
        return [f"{len(unused)} tensors in the file are not used by this model: {', '.join(unused[:4])}"]

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        c = self.config
        scale = 1.0 / math.sqrt(c.head_dim)
        x = ops.embed(batch.ids, self.embedding)  # [T, d]
        for i, w in enumerate(self.layers):
            h = ops.rms_norm(x, w.attn_norm, c.eps)
            q = ops.rope(ops.linear(h, w.q, w.q_bias), batch.pos, self.rope, c.heads)
            k = ops.rope(ops.linear(h, w.k, w.k_bias), batch.pos, self.rope, c.kv_heads)
            v = ops.linear(h, w.v, w.v_bias)
            a = ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=scale)
            x = ops.add(x, ops.linear(a, w.o, w.o_bias))
            h = ops.rms_norm(x, w.ffn_norm, c.eps)
            x = ops.add(x, ops.linear(ops.swiglu(ops.linear(h, w.gate), ops.linear(h, w.up)), w.down))
        return ops.linear(ops.rms_norm(ops.take(x, batch.logit_rows), self.norm, c.eps), self.head)
