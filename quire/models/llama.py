"""The Llama family: Llama, SmolLM2 and SmolLM3, Mistral, Qwen2 and everything else of that shape.

Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP; biases where the configuration says so.
Query and key rows in a GGUF are stored for rotation of neighbouring pairs, in Hugging Face's files for rotation of halves:
`pairs`. The head is the embedding when the file has no other. In a folder every tensor must be one that the model uses: a
stranger means that the weights are of another model than the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.backends.batch import Batch
from quire.backends.ops import KV, Ops, Tensor
from quire.layouts import Dense, Layout, Rope
from quire.models.hf import context_of, refuse_quantized, rope_of
from quire.models.rope import Scaling, frequencies
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

MAX_LAYERS = 1024
MAX_HEAD_DIM = 256

ARCHS = ("llama",)

GGUF_NAMES = {
    "embedding": "token_embd",
    "norm": "output_norm",
    "head": "output",
    "attn_norm": "blk.{}.attn_norm",
    "q": "blk.{}.attn_q",
    "k": "blk.{}.attn_k",
    "v": "blk.{}.attn_v",
    "o": "blk.{}.attn_output",
    "ffn_norm": "blk.{}.ffn_norm",
    "gate": "blk.{}.ffn_gate",
    "up": "blk.{}.ffn_up",
    "down": "blk.{}.ffn_down",
}
HF_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "o": "model.layers.{}.self_attn.o_proj",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}
ATTENTION, MLP = ("q", "k", "v", "o"), ("gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Variant:
    """How a class of transformers differs from Llama."""

    biased: tuple[str, ...] | None = None  # projections that always have a bias; None: attention_bias and mlp_bias say
    window: str | None = None  # the key that turns sliding_window on; "sliding_window" itself: whenever it is set
    theta: float = 10000.0
    skips_rope: bool = False  # some layers have no positions: no_rope_layers


HF_ARCHS: dict[str, Variant] = {
    "LlamaForCausalLM": Variant(),
    "MistralForCausalLM": Variant(biased=(), window="sliding_window"),
    "Qwen2ForCausalLM": Variant(biased=("q", "k", "v"), window="use_sliding_window"),
    "SmolLM3ForCausalLM": Variant(window="use_sliding_window", theta=2000000.0, skips_rope=True),
}


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
    window: int | None = None  # of attention; a context within it is all that is served
    biased: frozenset[str] | None = None  # projections with a bias; None: those that the file has one for
    tied: bool | None = None  # the head is the embedding; None: when the file has no head
    still: frozenset[int] = frozenset()  # layers whose queries and keys are not rotated

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
            window=window if 0 < window < context else None,
        )

    @classmethod
    def from_hf(cls, config: Values, architecture: str) -> Config:
        """Read and check a config.json."""
        variant = HF_ARCHS[architecture]
        refuse_quantized(config)
        act = config.text("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise Unsupported(f"{config.where}: hidden_act is {act[:40]!r}: this architecture is served with silu")
        heads, width = config.count("num_attention_heads", most=4096), config.count("hidden_size")
        kv_heads = config.count("num_key_value_heads", heads, most=4096)
        head_dim = config.count("head_dim", max(1, width // heads), most=1 << 16)
        if heads % kv_heads:
            raise BadModelFile(f"{config.where}: {heads} heads cannot share {kv_heads} key-value heads evenly")
        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            raise Unsupported(
                f"{config.where}: heads of {head_dim} numbers are not supported", cure=f"8, 16, … {MAX_HEAD_DIM} are"
            )
        base, scaling = rope_of(config, variant.theta)
        context, layers = context_of(config, scaling), config.count("num_hidden_layers", most=MAX_LAYERS)
        window = _window(config, variant)
        biased = variant.biased
        if biased is None:
            attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
            biased = (ATTENTION if attention else ()) + (MLP if mlp else ())
        return cls(
            architecture=architecture,
            vocab_size=config.count("vocab_size"),
            context=min(context, window or context),
            layers=layers,
            width=width,
            ffn=config.count("intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope_dim=head_dim,
            rope_base=base,
            scaling=scaling,
            eps=config.number("rms_norm_eps", 1e-6),
            window=window if window and window < context else None,
            biased=frozenset(biased),
            tied=config.flag("tie_word_embeddings", False),
            still=_still(config, layers) if variant.skips_rope else frozenset(),
        )


def _window(config: Values, variant: Variant) -> int | None:
    """Tokens that attention sees, where that is fewer than all."""
    if variant.window is None or (variant.window != "sliding_window" and not config.flag(variant.window, False)):
        return None
    return config.count("sliding_window", None, most=1 << 26)


def _still(config: Values, layers: int) -> frozenset[int]:
    """Layers without positions: 0 in no_rope_layers, or every no_rope_layer_interval-th."""
    listed = config.get("no_rope_layers")
    if listed is None:
        step = config.count("no_rope_layer_interval", 4)
        return frozenset(range(step - 1, layers, step))
    if not isinstance(listed, list) or len(listed) != layers or any(n not in (0, 1) for n in listed):
        raise BadModelFile(f"{config.where}: no_rope_layers is {repr(listed)[:60]}: {layers} times 0 or 1 is needed")
    return frozenset(i for i, rotated in enumerate(listed) if not rotated)


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
    gate_bias: Dense | None
    up_bias: Dense | None
    down_bias: Dense | None


class Model:
    """A Llama-shaped model: its configuration, its weights and its forward."""

    def __init__(self, config: Config, tensors: Tensors, names: Mapping[str, str] = GGUF_NAMES, pairs: bool = True):
        self.config = config
        self._tensors = tensors
        self._names = names
        c = config
        self.embedding = tensors.matrix(f"{names['embedding']}.weight", c.vocab_size, c.width)
        self.layers = [self._layer(i) for i in range(c.layers)]
        self.norm = tensors.vector(f"{names['norm']}.weight", c.width)
        head = f"{names['head']}.weight"
        tied = not tensors.has(head) if c.tied is None else c.tied
        self.head = self.embedding if tied else tensors.matrix(head, c.vocab_size, c.width)
        freq, magnitude = frequencies(c.rope_base, c.rope_dim, c.scaling)
        self.rope = Rope(frequencies=freq, dim=c.rope_dim, pairs=pairs, magnitude=magnitude)
        self._told: list[str] = []

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Model:
        tensors = Tensors(gguf)
        return cls(Config.from_gguf(gguf, tensors), tensors)

    @classmethod
    def from_hf(cls, folder: Folder) -> Model:
        config = Config.from_hf(folder.config, folder.architecture)  # before any weight is looked at
        tensors = Tensors(folder)
        model = cls(config, tensors, HF_NAMES, pairs=False)
        # Some files carry the frequencies that we compute, or a copy of the embedding where the head is tied to it.
        extra = [n for n in tensors.leftover() if not n.endswith(".rotary_emb.inv_freq")]
        if config.tied and "lm_head.weight" in extra:
            extra.remove("lm_head.weight")
            model._told.append(
                "the file's lm_head.weight is not used: the configuration ties the head to the embedding"
            )
        if extra:
            raise BadModelFile(
                f"{folder.file_of(extra[0])}: tensor {extra[0]!r} is not one that a {config.architecture} with this "
                f"configuration has ({config.layers} layers); {len(extra)} of {len(folder.tensors)} tensors are not",
                cure="config.json and the weights belong to different models, or a setting is missing from it",
            )
        if "auto_map" in folder.config:
            model._told.append(
                f"config.json names code of its own (auto_map), which is not run: as {config.architecture}"
            )
        return model

    def _layer(self, i: int) -> Layer:
        c, t = self.config, self._tensors
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim

        def matrix(role: str, n: int, k: int) -> Layout:
            return t.matrix(f"{self._names[role].format(i)}.weight", n, k)

        def vector(role: str) -> Dense:
            return t.vector(f"{self._names[role].format(i)}.weight", c.width)

        def bias(role: str, n: int) -> Dense | None:
            name = f"{self._names[role].format(i)}.bias"
            if c.biased is None:
                return t.optional_vector(name, n)
            return t.vector(name, n) if role in c.biased else None

        return Layer(
            attn_norm=vector("attn_norm"),
            q=matrix("q", q, c.width),
            k=matrix("k", kv, c.width),
            v=matrix("v", kv, c.width),
            o=matrix("o", c.width, q),
            ffn_norm=vector("ffn_norm"),
            gate=matrix("gate", c.ffn, c.width),
            up=matrix("up", c.ffn, c.width),
            down=matrix("down", c.width, c.ffn),
            q_bias=bias("q", q),
            k_bias=bias("k", kv),
            v_bias=bias("v", kv),
            o_bias=bias("o", c.width),
            gate_bias=bias("gate", c.ffn),
            up_bias=bias("up", c.ffn),
            down_bias=bias("down", c.width),
        )

    def kv(self, pages: int, page_size: int) -> KV:
        c = self.config
        return KV(layers=c.layers, pages=pages, page_size=page_size, kv_heads=c.kv_heads, head_dim=c.head_dim)

    def release(self, layout: Layout) -> None:
        self._tensors.release(layout)

    @property
    def notes(self) -> list[str]:
        told = list(self._told)
        if self.config.window is not None:
            told.append(f"attention window: {self.config.window} tokens, which bounds the context here")
        unused = self._tensors.leftover()
        if unused:
            told.append(f"{len(unused)} tensors in the file are not used by this model: {', '.join(unused[:4])}")
        return told

    def forward(self, ops: Ops, batch: Batch, inputs: Mapping[str, Tensor]) -> Tensor:
        """Logits of batch.logit_rows."""
        c = self.config
        scale = 1.0 / math.sqrt(c.head_dim)
        x = ops.embed(batch.ids, self.embedding)  # [T, d]
        for i, w in enumerate(self.layers):
            h = ops.rms_norm(x, w.attn_norm, c.eps)
            q, k = ops.linear(h, w.q, w.q_bias), ops.linear(h, w.k, w.k_bias)
            if i not in c.still:
                q = ops.rope(q, batch.pos, self.rope, c.heads)
                k = ops.rope(k, batch.pos, self.rope, c.kv_heads)
            v = ops.linear(h, w.v, w.v_bias)
            a = ops.attention(q, k, v, batch, layer=i, heads=c.heads, scale=scale)
            x = ops.add(x, ops.linear(a, w.o, w.o_bias))
            h = ops.rms_norm(x, w.ffn_norm, c.eps)
            gated = ops.swiglu(ops.linear(h, w.gate, w.gate_bias), ops.linear(h, w.up, w.up_bias))
            x = ops.add(x, ops.linear(gated, w.down, w.down_bias))
        return ops.linear(ops.rms_norm(ops.take(x, batch.logit_rows), self.norm, c.eps), self.head)
