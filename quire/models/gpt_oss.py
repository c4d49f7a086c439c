"""gpt-oss: attention with sinks, every second layer behind a window, biases everywhere, experts with a clamped activation.

Experts are MXFP4 in the files that were published: in a folder codes and exponents are two tensors, in which rows of gate and up
alternate; or plain numbers, transposed, in which columns do. A GGUF has them apart and in its own order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire.formats import mxfp4
from quire.layouts import Dense, Experts, Layout, Routing
from quire.models import hf, metadata, mixture
from quire.models.parts import Dims, Weights, own_code_line, refuse_unknown, rotation, seen
from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.folder import Folder
    from quire.weights.values import Values

ARCHS = ("gpt-oss",)
HF_ARCHS = ("GptOssForCausalLM",)
ALL = ("q", "k", "v", "o")
LIMIT, WINDOW, THETA = 7.0, 128, 150000.0
GGUF_NAMES = {**mixture.GGUF_NAMES, "ffn_norm": "blk.{}.post_attention_norm", "sinks": "blk.{}.attn_sinks"}
HF_NAMES = {**mixture.HF_NAMES, "router": "model.layers.{}.mlp.router"}
EXPERTS = "model.layers.{}.mlp.experts."
# What a folder without a word on positions means: the values it was made with.
YARN = Scaling("yarn", 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)


class Model:
    """Reads either kind of file; what it makes is a `mixture.MixtureDecoder`."""

    @staticmethod
    def from_gguf(gguf: GGUF) -> mixture.MixtureDecoder:
        keys, tensors = metadata.Keys(gguf), Tensors(gguf)
        d = metadata.dims_of(keys, ffn=None)
        sizes, limit = mixture.sizes_of_gguf(keys), keys.number("swiglu_clamp_exp", LIMIT)
        # The ramp of its yarn has no whole ends, which no key says.
        scaling = replace(metadata.scaling_of(keys, tensors, d.head_dim, d.context), truncate=False)
        weights = Weights(tensors, GGUF_NAMES)
        windows = seen(metadata.windows_of(keys, d, period=2, default=WINDOW), d.context)

        def stacked(layer: int) -> Experts:
            plain = mixture.experts_of(weights, layer, sizes, d.width)
            biases = [
                tensors.vectors(weights.name(f"expert_{role}", layer, "bias"), sizes.count, n)
                for role, n in (("gate", sizes.ffn), ("up", sizes.ffn), ("down", d.width))
            ]
            return Experts(plain.gate, plain.up, plain.down, *biases, limit=limit)

        blocks = [
            _block(weights, i, d, sizes, stacked(i), weights.norm("sinks", d.heads, i), None, windows[i])
            for i in range(d.layers)
        ]
        rope = rotation(keys.number("rope.freq_base", THETA), d.head_dim, scaling, pairs=False)
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
    def of(values: Values, architecture: str, tensors: Tensors) -> mixture.MixtureDecoder:
        """The model that a config.json describes."""
        config, packed = _unquantized(values)
        hf.check_activation(config, "hidden_act", hf.SILU)
        hf.refuse(config, swiglu_alpha=1.702)
        base, scaling = hf.rope_of(config, THETA)
        if "rope_parameters" not in config and "rope_scaling" not in config:
            scaling = YARN
        d = hf.dims_of(
            config,
            architecture,
            context=hf.context_of(config, scaling),
            head_dim=64,
            ffn=None,
            eps=("rms_norm_eps", 1e-5),
        )
        sizes = mixture.sizes_of_hf(config, count=("num_local_experts", "num_experts"), ffn="intermediate_size")
        limit = config.number("swiglu_limit", LIMIT)
        windows = seen(hf.windows_of(config, d.layers, period=2, default=WINDOW), d.context)
        weights = Weights(tensors, HF_NAMES)
        biased = ALL if config.flag("attention_bias", True) else ()
        blocks = [
            _block(
                weights,
                i,
                d,
                sizes,
                _joined(tensors, i, sizes, d, limit) if packed else _transposed(tensors, i, sizes, d, limit),
                tensors.vector(f"model.layers.{i}.self_attn.sinks", d.heads),
                biased,
                windows[i],
            )
            for i in range(d.layers)
        ]
        rope = rotation(base, d.head_dim, scaling, pairs=False)
        return mixture.MixtureDecoder(d, weights, rope, blocks, tied=config.flag("tie_word_embeddings", False))


def _block(
    weights: Weights,
    layer: int,
    d: Dims,
    sizes: mixture.Sizes,
    experts: Experts,
    sinks: Dense,
    biased: tuple[str, ...] | None,
    window: int | None,
) -> mixture.Block:
    ffn = mixture.Mixture(
        router=weights.matrix("router", sizes.count, d.width, layer),
        router_bias=weights.tensors.vector(weights.name("router", layer, "bias"), sizes.count),
        experts=experts,
        routing=Routing(top=sizes.top, renormalize=True),
    )
    return replace(mixture.block_of(weights, layer, d, ffn, biased=biased, window=window), sinks=sinks)


def _unquantized(config: Values) -> tuple[Values, bool]:
    """The configuration without its word on quantization, and whether experts are MXFP4. Other methods are refused."""
    quantized = config.inside("quantization_config")
    if quantized is None:
        return config, False
    if (method := quantized.text("quant_method", "")) != "mxfp4":
        raise Unsupported(
            f"{config.where}: the weights are quantized (quantization_config: {method[:40]}): of gpt-oss mxfp4 is read",
            cure="use the version that was published, or a GGUF of it",
        )
    rest = {key: value for key, value in config.raw.items() if key != "quantization_config"}
    return type(config)(config.where, rest), True


def _biases(tensors: Tensors, layer: int, sizes: mixture.Sizes, d: Dims) -> tuple[tuple[Dense, ...], ...]:
    """The biases of gate, up and down; those of gate and up alternate in one tensor."""
    name, down = (EXPERTS.format(layer) + part for part in ("gate_up_proj_bias", "down_proj_bias"))
    both = tensors.cut(name, (sizes.count, 2 * sizes.ffn), lambda w: _every_other(w, rows=True))
    numbers = tuple(part for part in both if isinstance(part, Dense))
    return numbers[: sizes.count], numbers[sizes.count :], tensors.vectors(down, sizes.count, d.width)


def _every_other(stack: Layout, rows: bool) -> tuple[Layout, ...]:
    """The even rows of each part of a stack, then the odd rows of each part (or columns, which then become rows)."""
    return tuple(
        replace(stack, data=part[first::2] if rows else part[:, first::2].T) for first in (0, 1) for part in stack.data
    )


def _transposed(tensors: Tensors, layer: int, sizes: mixture.Sizes, d: Dims, limit: float) -> Experts:
    """Experts of plain numbers: gate_up_proj [E, d, 2 f], down_proj [E, f, d]."""
    e, f, prefix = sizes.count, sizes.ffn, EXPERTS.format(layer)
    both = tensors.cut(f"{prefix}gate_up_proj", (e, d.width, 2 * f), lambda w: _every_other(w, rows=False))
    down = tensors.cut(
        f"{prefix}down_proj", (e, f, d.width), lambda w: tuple(replace(w, data=part.T) for part in w.data)
    )
    return Experts(both[:e], both[e:], down, *_biases(tensors, layer, sizes, d), limit=limit)


def _joined(tensors: Tensors, layer: int, sizes: mixture.Sizes, d: Dims, limit: float) -> Experts:
    """Experts of MXFP4: for [n, k] of each expert, codes [n, k / 32, 16] and exponents [n, k / 32]."""
    if d.width % mxfp4.BLOCK or sizes.ffn % mxfp4.BLOCK:
        raise BadModelFile(
            f"MXFP4 experts of {sizes.ffn} x {d.width} numbers are not made of whole blocks of {mxfp4.BLOCK}"
        )

    def stack(name: str, n: int, k: int, steps: tuple[slice, ...]) -> tuple[Layout, ...]:
        names = [f"{EXPERTS.format(layer)}{name}_{part}" for part in ("blocks", "scales")]
        codes = tensors.octets(names[0], (sizes.count, n, k // mxfp4.BLOCK, 16))
        exponents = tensors.octets(names[1], (sizes.count, n, k // mxfp4.BLOCK))
        made = tuple(mxfp4.join(codes[e, at], exponents[e, at]) for at in steps for e in range(sizes.count))
        tensors.made(made, *names)
        return made

    both = stack("gate_up_proj", 2 * sizes.ffn, d.width, (slice(0, None, 2), slice(1, None, 2)))
    down = stack("down_proj", d.width, sizes.ffn, (slice(None),))
    gate, up = both[: sizes.count], both[sizes.count :]
    return Experts(gate, up, down, *_biases(tensors, layer, sizes, d), limit=limit)
