"""OLMoE: a mixture of experts in every block, and one norm over all queries, one over all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.layouts import Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import Dims, Weights, own_code_line, refuse_unknown, rotation
from quire.observe.errors import Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder

ARCHS = ("olmoe",)
HF_ARCHS = ("OlmoeForCausalLM",)


class Model:
    """Reads either kind of file; what it makes is a `mixture.MixtureDecoder`."""

    @staticmethod
    def from_gguf(gguf: GGUF) -> mixture.MixtureDecoder:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        if keys.zero_or("attention.clamp_kqv") is not None:
            raise Unsupported(f"metadata {keys.arch}.attention.clamp_kqv is set: that is not supported here")
        d = metadata.dims_of(keys)
        sizes = mixture.sizes_of_gguf(keys, default=d.ffn)
        routing = Routing(top=sizes.top, renormalize=keys.flag("expert_weights_norm", False))
        scaling = metadata.scaling_of(keys, tensors, d.head_dim, d.context)
        weights = Weights(tensors, mixture.GGUF_NAMES)
        rope = rotation(keys.number("rope.freq_base", 10000.0), d.head_dim, scaling, pairs=False)
        model = mixture.MixtureDecoder(d, weights, rope, _blocks(weights, d, sizes, routing, ()), tied=None)
        model.notes += refuse_unknown(gguf, tensors, d)
        return model

    @staticmethod
    def from_hf(folder: Folder) -> mixture.MixtureDecoder:
        config, tensors = folder.config, Tensors(folder)
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, clip_qkv=None)
        base, scaling = hf.rope_of(config, 10000.0)
        d = hf.dims_of(config, folder.architecture, context=hf.context_of(config, scaling), eps=("rms_norm_eps", 1e-5))
        sizes = mixture.sizes_of_hf(config, count=("num_experts", "num_local_experts"), ffn="intermediate_size")
        routing = Routing(top=sizes.top, renormalize=config.flag("norm_topk_prob", False))
        weights = Weights(tensors, mixture.HF_NAMES)
        biased = ("q", "k", "v", "o") if config.flag("attention_bias", False) else ()
        model = mixture.MixtureDecoder(
            d,
            weights,
            rotation(base, d.head_dim, scaling, pairs=False),
            _blocks(weights, d, sizes, routing, biased),
            tied=config.flag("tie_word_embeddings", False),
        )
        model.notes += refuse_unknown(folder, tensors, d, tied=model.tied) + own_code_line(folder, d)
        return model


def _blocks(
    weights: Weights, d: Dims, sizes: mixture.Sizes, routing: Routing, biased: tuple[str, ...]
) -> list[mixture.Block]:
    def block(i: int) -> mixture.Block:
        ffn = mixture.mixture_of(weights, i, sizes, d.width, routing)
        return mixture.block_of(weights, i, d, ffn, biased=biased, normed=(d.q_width, d.kv_width))

    return [block(i) for i in range(d.layers)]
