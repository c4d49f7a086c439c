"""The Llama family: Llama, SmolLM2 and SmolLM3, Mistral, Qwen2, Yi and everything else of that shape.

Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP; biases where the configuration says so.
Query and key rows in a GGUF are stored for rotation of neighbouring pairs, in Hugging Face's files (and in GGUFs of qwen2)
for rotation of halves: `pairs`. The head is the embedding when the file has no other.
"""

from __future__ import annotations

from collections.abc import Collection
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
    Attention,
    Dims,
    Mlp,
    Weights,
    attention_of,
    mlp_of,
    rotation,
    seen,
)
from quire.observe.errors import BadModelFile
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values


@dataclass(frozen=True, slots=True)
class Stored:
    """The settings in which a GGUF architecture differs from llama."""

    pairs: bool = True
    still: int = 0  # every so many layers one has no positions; 0: all have them


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings in which a class of transformers differs from Llama."""

    biased: tuple[str, ...] | None = None  # projections that always have a bias; None: attention_bias and mlp_bias say
    window: str | None = None  # which layers slide: everywhere, late (from max_window_layers on), still (no positions)
    theta: float = 10000.0
    skips_rope: bool = False  # some layers have no positions: no_rope_layers


ARCHS: dict[str, Stored] = {"llama": Stored(), "qwen2": Stored(pairs=False), "smollm3": Stored(still=4)}
HF_ARCHS: dict[str, Variant] = {
    "LlamaForCausalLM": Variant(),
    "LLaMAForCausalLM": Variant(),  # as the first files wrote it
    "MistralForCausalLM": Variant(biased=(), window="everywhere"),
    "MinistralForCausalLM": Variant(biased=(), window="everywhere"),
    "Qwen2ForCausalLM": Variant(biased=("q", "k", "v"), window="late"),
    "SmolLM3ForCausalLM": Variant(window="still", theta=2000000.0, skips_rope=True),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block, and what it sees."""

    attn_norm: Dense
    attn: Attention
    ffn_norm: Dense
    mlp: Mlp
    window: int | None
    rope: Rope | None  # None: its queries and keys have no positions


class Model(Decoder):
    """A Llama-shaped model: its configuration, its weights and its layers."""

    def __init__(
        self,
        dims: Dims,
        weights: Weights,
        rope: Rope,
        *,
        windows: tuple[int | None, ...],
        still: Collection[int] = (),  # layers without positions
        biased: Collection[str] | None = None,  # projections with a bias; None: those that the file has one for
        tied: bool | None = None,
    ):
        super().__init__(dims, weights, windows=windows, tied=tied)
        self.layers = [
            Layer(
                attn_norm=weights.norm("attn_norm", dims.width, i),
                attn=attention_of(weights, i, dims, biased),
                ffn_norm=weights.norm("ffn_norm", dims.width, i),
                mlp=mlp_of(weights, i, dims, biased),
                window=windows[i],
                rope=None if i in still else rope,
            )
            for i in range(dims.layers)
        ]

    @classmethod
    def of_gguf(cls, keys: metadata.Keys, tensors: Tensors) -> Model:
        stored, d = ARCHS[keys.arch], metadata.dims_of(keys)
        return cls(
            d,
            Weights(tensors, GGUF_NAMES),
            metadata.rotation_of(keys, tensors, d, pairs=stored.pairs),
            windows=seen(metadata.windows_of(keys, d, period=0), d.context),
            still=range(stored.still - 1, d.layers, stored.still) if stored.still else (),
        )

    @classmethod
    def of(cls, config: Values, architecture: str, tensors: Tensors) -> Model:
        """The model that a config.json describes. No weight is looked at before the whole of it is understood."""
        variant = HF_ARCHS[architecture]
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, variant.theta)
        d = hf.dims_of(config, architecture, context=hf.context_of(config, scaling))
        biased = variant.biased
        if biased is None:
            attention, mlp = config.flag("attention_bias", False), config.flag("mlp_bias", False)
            biased = (("q", "k", "v", "o") if attention else ()) + (("gate", "up", "down") if mlp else ())
        still = _still(config, d.layers) if variant.skips_rope else frozenset()
        return cls(
            d,
            Weights(tensors, HF_NAMES),
            rotation(base, d.head_dim, scaling, pairs=False),
            windows=seen(_windows(config, variant, d.layers, still), d.context),
            still=still,
            biased=biased,
            tied=config.flag("tie_word_embeddings", False),
        )

    def block(self, ops: Ops, batch: Batch, x: Tensor, i: int) -> Tensor:
        c, w = self.config, self.layers[i]
        h, a, m = ops.rms_norm(x, w.attn_norm, c.eps), w.attn, w.mlp
        q, k, v = ops.linear(h, a.q, a.q_bias), ops.linear(h, a.k, a.k_bias), ops.linear(h, a.v, a.v_bias)
        if w.rope is not None:
            q = ops.rope(q, batch.pos, w.rope, c.heads)
            k = ops.rope(k, batch.pos, w.rope, c.kv_heads)
        group, at = self.kv_layout[i]
        h = ops.attention(q, k, v, batch, layer=at, group=group, heads=c.heads, scale=c.scale, window=w.window)
        x = ops.add(x, ops.linear(h, a.o, a.o_bias))
        h = ops.rms_norm(x, w.ffn_norm, c.eps)
        h = ops.swiglu(ops.linear(h, m.gate, m.gate_bias), ops.linear(h, m.up, m.up_bias))
        return ops.add(x, ops.linear(h, m.down, m.down_bias))


def _windows(config: Values, variant: Variant, layers: int, still: Collection[int]) -> tuple[int | None, ...]:
    """The attention window of each layer (None: everything before): in every layer, from some layer on, or where there are no positions."""
    if variant.window == "everywhere":
        return hf.windows_of(config, layers, period=0)
    if variant.window == "late":
        return hf.late_windows_of(config, layers)
    if variant.window == "still" and config.flag("use_sliding_window", False):
        windows = hf.windows_of(config, layers, period=0)
        return tuple(w if "layer_types" in config or i in still else None for i, w in enumerate(windows))
    return (None,) * layers


def _still(config: Values, layers: int) -> frozenset[int]:
    """Layers without positions: 0 in no_rope_layers, or every no_rope_layer_interval-th."""
    listed = config.get("no_rope_layers")
    if listed is None:
        step = config.count("no_rope_layer_interval", 4)
        return frozenset(range(step - 1, layers, step))
    if not isinstance(listed, list) or len(listed) != layers or any(n not in (0, 1) for n in listed):
        raise BadModelFile(f"{config.where}: no_rope_layers is {repr(listed)[:60]}: {layers} times 0 or 1 is needed")
    return frozenset(i for i, rotated in enumerate(listed) if not rotated)
