"""What every family reads from a config.json in the same way: sizes, rotary positions, windows, and the settings that would change what the weights mean, which are refused.

Older files write `rope_theta` and `rope_scaling`, newer ones `rope_parameters`; both become a base and a `Scaling`. A setting
that is not understood is refused, never skipped: it would change the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.models.parts import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, Dims, check_heads
from quire.models.rope import Scaling, yarn_magnitude
from quire.observe.errors import BadModelFile, Unsupported

if TYPE_CHECKING:
    from quire.weights.values import Values

KINDS = ("default", "linear", "llama3", "yarn")  # of rope scaling, for a family that says nothing else
_KNOWN = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
}
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
SILU = ("silu", "swish")
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # three names of one function


def dims_of(
    config: Values,
    architecture: str,
    *,
    context: int | None = None,
    head_dim: int | None = None,
    ffn: str | None = "intermediate_size",
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
) -> Dims:
    """The sizes. context where it is not what the file says; head_dim where the file has none and it is not width / heads;
    ffn and eps name the keys that hold them, eps with its default; ffn=None: no layer has a plain MLP."""
    refuse_quantized(config)
    heads, width = config.count("num_attention_heads", most=MAX_HEADS), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads, most=MAX_HEADS)
    size = config.count("head_dim", head_dim or max(1, width // heads), most=1 << 16)
    check_heads(config.where, heads, kv_heads, size)
    return Dims(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        context=context or config.count("max_position_embeddings", most=MAX_CONTEXT),
        layers=config.count("num_hidden_layers", most=MAX_LAYERS),
        width=width,
        ffn=config.count(ffn) if ffn else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
        eps=config.number(*eps),
    )


def check_activation(config: Values, key: str, allowed: tuple[str, ...]) -> None:
    """Raises where the MLP has another function than this architecture is served with."""
    act = config.text(key, allowed[0])
    if act not in allowed:
        raise Unsupported(f"{config.where}: {key} is {act[:40]!r}: this architecture is served with {allowed[0]}")


def refuse(config: Values, **without: object) -> None:
    """Raises for keys that are set to another value than the one given: settings that are not implemented."""
    for key, value in without.items():
        if key in config and config.get(key) != value:
            raise Unsupported(f"{config.where}: {key} is {str(config.get(key))[:40]}: that is not supported here")


def one_label(config: Values) -> None:
    """Raises for a classifier of several labels: what comes out of it is no score."""
    labels = config.inside("id2label")
    count = len(labels.raw) if labels is not None else config.count("num_labels", 2, most=1 << 16)
    if count != 1:
        raise Unsupported(
            f"{config.where}: a classifier of {count} labels is not served",
            cure="one with a single label is a reranker",
        )


def rope_of(
    config: Values, theta: float, *, partial: bool = False, kinds: tuple[str, ...] = KINDS
) -> tuple[float, Scaling]:
    """The base and the scaling; `theta` is the family's own default. partial: heads may be rotated in part, see rotated_of."""
    values = config.inside("rope_parameters") or config.inside("rope_scaling")
    if not partial:
        _whole_heads(config)
    base = config.number("rope_theta", theta)
    if values is None:
        return base, Scaling()
    if not partial:
        _whole_heads(values)
    return values.number("rope_theta", base), scaling_of(config, values, kinds)


def scaling_of(config: Values, values: Values, kinds: tuple[str, ...] = KINDS) -> Scaling:
    """How the rotary frequencies are scaled for longer contexts; `values` is the object that says so, `config` the file."""
    kind = values.text("rope_type", None) or values.text("type", "default")
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in kinds:
        raise Unsupported(
            f"{values.where}: rope scaling {kind!r} is not supported", cure=f"supported: {', '.join(kinds)}"
        )
    # `default` ignores what is left over from another kind, as transformers does; elsewhere a stranger may matter.
    strange = sorted(k for k in values.raw if k not in _ALWAYS | _KNOWN[kind] and values.get(k) is not None)
    if strange and kind != "default":
        raise Unsupported(f"{values.where}: {strange[0]} is not understood with rope scaling {kind!r}")
    context = config.count("max_position_embeddings", most=MAX_CONTEXT)
    if kind == "linear":
        return Scaling("linear", values.number("factor"))
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        if not low < high:
            raise BadModelFile(f"{values.where}: low_freq_factor {low} must be below high_freq_factor {high}")
        original = values.count("original_max_position_embeddings", most=MAX_CONTEXT)
        return Scaling("llama3", values.number("factor"), original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return _yarn(values, context)
    if kind == "longrope":
        return _longrope(config, values, context)
    return Scaling()


def _yarn(values: Values, context: int) -> Scaling:
    original = values.count("original_max_position_embeddings", context, most=MAX_CONTEXT)
    factor = values.number("factor", context / original)
    # Where both are given the rotation takes one of them and gives the other back; what that leaves to do is the family's.
    amounts = [values.number(key) if values.get(key) else None for key in ("mscale", "mscale_all_dim")]
    magnitude = None
    if amounts[0] is not None and amounts[1] is not None:
        magnitude = yarn_magnitude(factor, amounts[0]) / yarn_magnitude(factor, amounts[1])
    return Scaling(
        "yarn",
        factor,
        original,
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        truncate=values.flag("truncate", True),
        attention_factor=values.number("attention_factor", magnitude),
    )


def _longrope(config: Values, values: Values, context: int) -> Scaling:
    # The number beside the others goes before the one inside, as in transformers; 4096 is its default.
    inside = values.count("original_max_position_embeddings", 4096, most=MAX_CONTEXT)
    original = config.count("original_max_position_embeddings", inside, most=MAX_CONTEXT)
    return Scaling(
        "longrope",
        values.number("factor", context / original),
        original,
        attention_factor=values.number("attention_factor", None),
        short=_divisors(values, "short_factor"),
        long=_divisors(values, "long_factor"),
    )


def _divisors(values: Values, key: str) -> np.ndarray:
    listed = values.get(key)
    fine = isinstance(listed, list) and 0 < len(listed) <= 1 << 12
    if not fine or not all(type(n) in (int, float) and 0 < n < 1e30 for n in listed):
        raise BadModelFile(f"{values.where}: {key} is {str(listed)[:60]}: a list of positive numbers is needed")
    return np.array(listed, np.float32)


def context_of(config: Values, scaling: Scaling) -> int:
    """The longest sequence it was made for. Yarn is asked for to go beyond the number that is written down."""
    context = config.count("max_position_embeddings", most=MAX_CONTEXT)
    if scaling.kind == "yarn":
        return max(context, min(int(scaling.original_context * scaling.factor), MAX_CONTEXT))
    return context


def rotated_of(config: Values, head_dim: int, default: float = 1.0) -> int:
    """How many columns of a head are rotated, for a family that may rotate a part."""
    values = config.inside("rope_parameters") or config.inside("rope_scaling")
    share = config.number("partial_rotary_factor", default)
    if values is not None:
        share = values.number("partial_rotary_factor", share)
    dim = int(head_dim * share)
    if share > 1.0 or dim < 2 or dim % 2:
        raise BadModelFile(
            f"{config.where}: partial_rotary_factor is {share}: of heads of {head_dim} numbers that rotates {dim}"
        )
    return dim


def windows_of(config: Values, layers: int, period: int, default: int | None = None) -> tuple[int | None, ...]:
    """What each layer sees of the past, None: all of it. layer_types says which layers slide; without it every period-th
    sees all, and with 0 none does. default: the window of a file that names none."""
    slides = slides_of(config, layers)
    if slides is None:
        slides = tuple(period == 0 or bool((i + 1) % period) for i in range(layers))
    size = config.count("sliding_window", default, most=MAX_CONTEXT)
    if size is None and any(slides) and "layer_types" in config:
        raise BadModelFile(f"{config.where}: sliding_window is missing, and layer_types has layers that slide")
    return tuple(size if slide else None for slide in slides)


def late_windows_of(config: Values, layers: int) -> tuple[int | None, ...]:
    """Qwen's way: where use_sliding_window is set, layers from max_window_layers on have a window; layer_types overrules."""
    if not config.flag("use_sliding_window", False):
        return (None,) * layers
    windows = windows_of(config, layers, period=0)
    if "layer_types" in config:
        return windows
    first = config.raw.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        raise BadModelFile(f"{config.where}: max_window_layers is {str(first)[:40]}: it must be a whole number")
    return tuple(window if i >= first else None for i, window in enumerate(windows))


def slides_of(config: Values, layers: int) -> tuple[bool, ...] | None:
    """For each layer, whether its attention has a window; None where the file does not say."""
    kinds = ("full_attention", "sliding_attention")
    listed = config.get("layer_types")
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != layers or not all(isinstance(kind, str) for kind in listed):
        raise BadModelFile(f"{config.where}: layer_types is {str(listed)[:60]}: {layers} names are needed")
    strange = next((kind for kind in listed if kind not in kinds), None)
    if strange is not None:
        raise Unsupported(f"{config.where}: layer_types has {strange[:40]!r}", cure=f"supported: {', '.join(kinds)}")
    return tuple(kind == kinds[1] for kind in listed)


def refuse_quantized(config: Values) -> None:
    """Raises for a folder whose weights are quantized by a method that is not read, by its name."""
    from quire.weights.packed import scheme_of  # nothing that a GGUF needs

    scheme_of(config)


def _whole_heads(values: Values) -> None:
    share = values.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise Unsupported(
            f"{values.where}: partial_rotary_factor is {share}: this architecture rotates whole heads here"
        )
