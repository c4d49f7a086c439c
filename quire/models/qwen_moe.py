"""Qwen's mixtures of experts: Qwen2-MoE (and Qwen1.5-MoE) with a shared expert behind a sigmoid, Qwen3-MoE with norms of queries and keys.

Some layers may have a plain MLP (mlp_only_layers, decoder_sparse_step); a GGUF has none of those.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.layouts import Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import MAX_LAYERS, Dims, Weights, mlp_of, own_code_line, refuse_unknown, rotation, seen
from quire.observe.errors import BadModelFile
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values


@dataclass(frozen=True, slots=True)
class Variant:
    """The settings in which Qwen2-MoE and Qwen3-MoE differ."""

    shared: bool  # an expert that every row goes through, behind a sigmoid
    normed: bool  # queries and keys have norms
    bias: tuple[str, bool]  # the key that says whether there are biases, and what is so without it
    biased: tuple[str, ...]  # those that have one then


QWEN2 = Variant(shared=True, normed=False, bias=("qkv_bias", True), biased=("q", "k", "v"))
QWEN3 = Variant(shared=False, normed=True, bias=("attention_bias", False), biased=("q", "k", "v", "o"))
ARCHS = {"qwen2moe": QWEN2, "qwen3moe": QWEN3}
HF_ARCHS = {"Qwen2MoeForCausalLM": QWEN2, "Qwen3MoeForCausalLM": QWEN3}


class Model:
    """Reads either kind of file; what it makes is a `mixture.MixtureDecoder`."""

    @staticmethod
    def from_gguf(gguf: GGUF) -> mixture.MixtureDecoder:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        variant, d = ARCHS[keys.arch], metadata.dims_of(keys, ffn=None)
        sizes = mixture.sizes_of_gguf(keys)
        if variant.shared:
            sizes = replace(sizes, shared=keys.count("expert_shared_feed_forward_length"))
        # Files seldom say it: all that were made of Qwen3 do, and none of Qwen2.
        routing = Routing(top=sizes.top, renormalize=keys.flag("expert_weights_norm", variant is QWEN3))
        scaling = metadata.scaling_of(keys, tensors, d.head_dim, d.context)
        weights = Weights(tensors, mixture.GGUF_NAMES)
        rope = rotation(keys.number("rope.freq_base", 1e6), d.head_dim, scaling, pairs=False)
        blocks = _blocks(weights, d, variant, sizes, routing, (), None, (None,) * d.layers)
        model = mixture.MixtureDecoder(d, weights, rope, blocks, tied=None)
        model.notes += refuse_unknown(gguf, tensors, d)
        return model

    @staticmethod
    def from_hf(folder: Folder) -> mixture.MixtureDecoder:
        tensors = Tensors(folder)
        model = Model.of(folder.config, folder.architecture, tensors)
        model.notes += refuse_unknown(folder, tensors, model.config, tied=model.tied) + own_code_line(
            folder, model.config
        )
        return model

    @staticmethod
    def of(config: Values, architecture: str, tensors: Tensors) -> mixture.MixtureDecoder:
        """The model that a config.json describes."""
        variant = HF_ARCHS[architecture]
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, 10000.0)
        layers, experts = config.count("num_hidden_layers", most=MAX_LAYERS), ("num_experts", "num_local_experts")
        plain = plain_layers(config, layers)
        d = hf.dims_of(
            config,
            architecture,
            context=hf.context_of(config, scaling),
            ffn="intermediate_size" if plain else None,
        )
        sizes = mixture.sizes_of_hf(config, count=experts, ffn="moe_intermediate_size")
        if variant.shared:
            sizes = replace(sizes, shared=config.count("shared_expert_intermediate_size"))
        routing = Routing(top=sizes.top, renormalize=config.flag("norm_topk_prob", False))
        weights = Weights(tensors, mixture.HF_NAMES)
        biased = variant.biased if config.flag(*variant.bias) else ()
        windows = seen(_windows(config, variant, layers), d.context)
        return mixture.MixtureDecoder(
            d,
            weights,
            rotation(base, d.head_dim, scaling, pairs=False),
            _blocks(weights, d, variant, sizes, routing, plain, biased, windows),
            tied=config.flag("tie_word_embeddings", False),
        )


def _blocks(
    weights: Weights,
    d: Dims,
    variant: Variant,
    sizes: mixture.Sizes,
    routing: Routing,
    plain: Collection[int],
    biased: tuple[str, ...] | None,
    windows: tuple[int | None, ...],
) -> list[mixture.Block]:
    normed = (d.head_dim, d.head_dim) if variant.normed else None

    def block(i: int) -> mixture.Block:
        if i in plain:
            ffn = mlp_of(weights, i, d, ())
        else:
            ffn = mixture.mixture_of(weights, i, sizes, d.width, routing, gated=variant.shared)
        return mixture.block_of(weights, i, d, ffn, biased=biased, normed=normed, window=windows[i])

    return [block(i) for i in range(d.layers)]


def plain_layers(config: Values, layers: int) -> frozenset[int]:
    """Layers with an MLP and no experts."""
    listed, step = config.get("mlp_only_layers") or [], config.count("decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < layers for i in listed):
        raise BadModelFile(f"{config.where}: mlp_only_layers is {str(listed)[:60]}: numbers of layers are needed")
    return frozenset(i for i in range(layers) if i in listed or (i + 1) % step)


def _windows(config: Values, variant: Variant, layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer. Without layer_types, Qwen2 has a window in every second layer before max_window_layers, Qwen3 in all."""
    if not config.flag("use_sliding_window", False):
        return (None,) * layers
    windows = hf.windows_of(config, layers, period=0, default=4096)
    if variant is QWEN3 or "layer_types" in config:
        return windows
    last = config.get("max_window_layers") if "max_window_layers" in config else 28
    if type(last) is not int or last < 0:
        raise BadModelFile(f"{config.where}: max_window_layers is {str(last)[:40]}: it must be a whole number")
    return tuple(window if i % 2 == 0 and i < last else None for i, window in enumerate(windows))
