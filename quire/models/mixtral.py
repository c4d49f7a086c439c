"""Mixtral: Mistral's blocks with a mixture of experts in place of the MLP.

A GGUF of it calls itself llama, with experts: `owns`. Queries and keys are stored there for rotation of neighbouring pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.layouts import Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import Dims, Weights, own_code_line, refuse_unknown, rotation, seen
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder

ARCHS = ("llama",)
HF_ARCHS = ("MixtralForCausalLM",)
HF_NAMES = {
    **mixture.HF_NAMES,
    "router": "model.layers.{}.block_sparse_moe.gate",
    "expert_gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "expert_up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "expert_down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
}
OLD_NAMES = {  # as files were written before experts were stacked
    **mixture.GGUF_NAMES,
    "expert_gate": "blk.{}.ffn_gate.{}",
    "expert_up": "blk.{}.ffn_up.{}",
    "expert_down": "blk.{}.ffn_down.{}",
}


def owns(gguf: GGUF) -> bool:
    """Whether a file of the llama architecture has experts."""
    return gguf.metadata.get_int(f"{gguf.architecture}.expert_count", 0) > 0


class Model:
    """Reads either kind of file; what it makes is a `mixture.MixtureDecoder`."""

    @staticmethod
    def from_gguf(gguf: GGUF) -> mixture.MixtureDecoder:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys)
        sizes = mixture.sizes_of_gguf(keys, default=d.ffn)
        old = tensors.has("blk.0.ffn_gate.0.weight")
        weights = Weights(tensors, OLD_NAMES if old else mixture.GGUF_NAMES)
        windows = seen(metadata.windows_of(keys, d, period=0), d.context)
        rope = metadata.rotation_of(keys, tensors, d, pairs=True)
        model = mixture.MixtureDecoder(d, weights, rope, _blocks(weights, d, sizes, windows, None), tied=None)
        model.notes += refuse_unknown(gguf, tensors, d)
        return model

    @staticmethod
    def from_hf(folder: Folder) -> mixture.MixtureDecoder:
        config, tensors = folder.config, Tensors(folder)
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, 1e6)
        d = hf.dims_of(config, folder.architecture, context=hf.context_of(config, scaling), eps=("rms_norm_eps", 1e-5))
        sizes = mixture.sizes_of_hf(config, count=("num_local_experts", "num_experts"), ffn="intermediate_size")
        weights = Weights(tensors, HF_NAMES)
        windows = seen(hf.windows_of(config, d.layers, period=0), d.context)
        model = mixture.MixtureDecoder(
            d,
            weights,
            rotation(base, d.head_dim, scaling, pairs=False),
            _blocks(weights, d, sizes, windows, ()),
            tied=config.flag("tie_word_embeddings", False),
        )
        model.notes += refuse_unknown(folder, tensors, d, tied=model.tied) + own_code_line(folder, d)
        return model


def _blocks(
    weights: Weights,
    d: Dims,
    sizes: mixture.Sizes,
    windows: tuple[int | None, ...],
    biased: tuple[str, ...] | None,
) -> list[mixture.Block]:
    routing = Routing(top=sizes.top, renormalize=True)

    def block(i: int) -> mixture.Block:
        ffn = mixture.mixture_of(weights, i, sizes, d.width, routing)
        return mixture.block_of(weights, i, d, ffn, biased=biased, window=windows[i])

    return [block(i) for i in range(d.layers)]
