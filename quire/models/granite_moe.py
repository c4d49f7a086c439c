"""Granite 3's mixtures of experts: Mixtral's blocks with Granite's four multipliers; experts lie in one tensor per block.

Queries and keys in a GGUF are stored for rotation of neighbouring pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.layouts import Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import Dims, Weights, own_code_line, refuse_unknown, rotation
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder

ARCHS = ("granitemoe",)
HF_ARCHS = ("GraniteMoeForCausalLM",)
HF_NAMES = {
    **mixture.HF_NAMES,
    "router": "model.layers.{}.block_sparse_moe.router.layer",
    "expert_gate_up": "model.layers.{}.block_sparse_moe.input_linear",
    "expert_down": "model.layers.{}.block_sparse_moe.output_linear",
}


class Model:
    """Reads either kind of file; what it makes is a `mixture.MixtureDecoder`."""

    @staticmethod
    def from_gguf(gguf: GGUF) -> mixture.MixtureDecoder:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys)
        sizes = mixture.sizes_of_gguf(keys, default=d.ffn)
        scaling = metadata.scaling_of(keys, tensors, d.head_dim, d.context)
        weights = Weights(tensors, mixture.GGUF_NAMES)
        rope = rotation(keys.number("rope.freq_base", 10000.0), d.head_dim, scaling, pairs=True)
        times = mixture.Multipliers(
            embedding=keys.number("embedding_scale", 1.0),
            residual=keys.number("residual_scale", 1.0),
            logits=1.0 / keys.number("logit_scale", 1.0),
            attention=keys.number("attention.scale", d.scale),
        )
        model = mixture.MixtureDecoder(d, weights, rope, _blocks(weights, d, sizes, None), tied=None, times=times)
        model.notes += refuse_unknown(gguf, tensors, d)
        return model

    @staticmethod
    def from_hf(folder: Folder) -> mixture.MixtureDecoder:
        config, tensors = folder.config, Tensors(folder)
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, 10000.0)
        d = hf.dims_of(config, folder.architecture, context=hf.context_of(config, scaling))
        sizes = mixture.sizes_of_hf(config, count=("num_local_experts", "num_experts"), ffn="intermediate_size")
        weights = Weights(tensors, HF_NAMES)
        biased = ("q", "k", "v", "o") if config.flag("attention_bias", False) else ()
        times = mixture.Multipliers(
            embedding=config.number("embedding_multiplier", 1.0),
            residual=config.number("residual_multiplier", 1.0),
            logits=1.0 / config.number("logits_scaling", 1.0),
            attention=config.number("attention_multiplier", 1.0),
        )
        model = mixture.MixtureDecoder(
            d,
            weights,
            rotation(base, d.head_dim, scaling, pairs=False),
            _blocks(weights, d, sizes, biased),
            tied=config.flag("tie_word_embeddings", False),
            times=times,
        )
        model.notes += refuse_unknown(folder, tensors, d, tied=model.tied) + own_code_line(folder, d)
        return model


def _blocks(weights: Weights, d: Dims, sizes: mixture.Sizes, biased: tuple[str, ...] | None) -> list[mixture.Block]:
    routing = Routing(top=sizes.top, renormalize=True)

    def block(i: int) -> mixture.Block:
        return mixture.block_of(weights, i, d, mixture.mixture_of(weights, i, sizes, d.width, routing), biased=biased)

    return [block(i) for i in range(d.layers)]
