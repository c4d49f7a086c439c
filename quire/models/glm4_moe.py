"""GLM-4.5 and its like: half of each head is rotated, experts are chosen as DeepSeek V3 does, beside one that every row goes through.

The first layers have a plain MLP. Layers behind the last one, which predict further tokens, are left alone and told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.layouts import Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import Dims, Weights, mlp_of, own_code_line, refuse_unknown, rotation
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder

ARCHS = ("glm4moe",)
HF_ARCHS = ("Glm4MoeForCausalLM",)
GGUF_NAMES = {**mixture.GGUF_NAMES, "ffn_norm": "blk.{}.post_attention_norm"}
HF_NAMES = mixture.HF_NAMES | {
    f"shared_{part}": f"model.layers.{{}}.mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}


class Model:
    """Reads either kind of file; what it makes is a `mixture.MixtureDecoder`."""

    @staticmethod
    def from_gguf(gguf: GGUF) -> mixture.MixtureDecoder:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys)
        beyond = gguf.metadata.get_int(f"{keys.arch}.nextn_predict_layers", 0, low=0, high=d.layers - 1)
        d = replace(d, layers=d.layers - beyond)
        dense = gguf.metadata.get_int(f"{keys.arch}.leading_dense_block_count", 0, low=0, high=d.layers)
        sizes = mixture.sizes_of_gguf(keys)
        sizes = replace(sizes, shared=sizes.ffn * keys.count("expert_shared_count", 1))
        routing = mixture.routing_of_gguf(keys, sizes, sigmoid=True)
        weights = Weights(tensors, GGUF_NAMES)
        rope = metadata.rotation_of(keys, tensors, d, pairs=False)
        normed = weights.has("q_norm")
        blocks = _blocks(weights, d, sizes, routing, dense, None, normed, "bias")
        model = mixture.MixtureDecoder(d, weights, rope, blocks, tied=None)
        ahead = tuple(f"blk.{i}." for i in range(d.layers, d.layers + beyond))
        model.notes += refuse_unknown(gguf, tensors, d, known=lambda name: name.startswith(ahead))
        return model

    @staticmethod
    def from_hf(folder: Folder) -> mixture.MixtureDecoder:
        config, tensors = folder.config, Tensors(folder)
        hf.check_activation(config, "hidden_act", hf.SILU)
        base, scaling = hf.rope_of(config, 10000.0, partial=True)
        d = hf.dims_of(config, folder.architecture, context=hf.context_of(config, scaling), eps=("rms_norm_eps", 1e-5))
        dim = hf.rotated_of(config, d.head_dim, 0.5)
        sizes = mixture.sizes_of_hf(config, count=("n_routed_experts",), ffn="moe_intermediate_size")
        sizes = replace(sizes, shared=sizes.ffn * config.count("n_shared_experts", 1, most=mixture.MAX_EXPERTS))
        routing = mixture.routing_of_hf(config, sizes)
        dense = mixture.dense_layers(config, d.layers, 1)
        weights = Weights(tensors, HF_NAMES)
        biased = ("q", "k", "v") if config.flag("attention_bias", False) else ()
        normed = config.flag("use_qk_norm", False)
        model = mixture.MixtureDecoder(
            d,
            weights,
            rotation(base, dim, scaling, pairs=False),
            _blocks(weights, d, sizes, routing, dense, biased, normed, "e_score_correction_bias"),
            tied=config.flag("tie_word_embeddings", False),
        )
        known = mixture.beyond(config, d.layers)
        model.notes += refuse_unknown(folder, tensors, d, tied=model.tied, known=known) + own_code_line(folder, d)
        return model


def _blocks(
    weights: Weights,
    d: Dims,
    sizes: mixture.Sizes,
    routing: Routing,
    dense: int,
    biased: tuple[str, ...] | None,
    normed: bool,
    bias: str,
) -> list[mixture.Block]:
    def block(i: int) -> mixture.Block:
        if i < dense:
            ffn = mlp_of(weights, i, d, ())
        else:
            chosen = weights.tensors.vector(weights.name("router_bias", i, bias), sizes.count)
            ffn = mixture.mixture_of(weights, i, sizes, d.width, replace(routing, bias=chosen))
        norms = (d.head_dim, d.head_dim) if normed else None
        return mixture.block_of(weights, i, d, ffn, biased=biased, normed=norms)

    return [block(i) for i in range(d.layers)]
