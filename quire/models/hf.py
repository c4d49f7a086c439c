"""What every family reads from a config.json in the same way: rotary positions, and what would make the weights mean another thing.

Older files write `rope_theta` and `rope_scaling`, newer ones `rope_parameters`; both become a base and a `Scaling`. A setting
that is not understood is refused, never skipped: it would change the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile, Unsupported

if TYPE_CHECKING:
    from quire.weights.values import Values

KINDS = ("default", "linear", "llama3", "yarn")
_KNOWN = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
}
_ALWAYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


def rope_of(config: Values, theta: float) -> tuple[float, Scaling]:
    """The base and the scaling; `theta` is the family's own default."""
    base = config.number("rope_theta", theta)
    values = config.inside("rope_parameters") or config.inside("rope_scaling")
    _whole_heads(config)
    if values is None:
        return base, Scaling()
    _whole_heads(values)
    base = values.number("rope_theta", base)
    kind = values.text("rope_type", None) or values.text("type", "default")
    if kind not in KINDS:
        raise Unsupported(
            f"{values.where}: rope scaling {kind!r} is not supported", cure=f"supported: {', '.join(KINDS)}"
        )
    # `default` ignores what is left over from another kind, as transformers does; elsewhere a stranger may matter.
    strange = sorted(k for k in values.raw if k not in _ALWAYS | _KNOWN[kind] and values.get(k) is not None)
    if strange and kind != "default":
        raise Unsupported(f"{values.where}: {strange[0]} is not understood with rope scaling {kind!r}")
    context = config.count("max_position_embeddings", most=1 << 26)
    if kind == "linear":
        return base, Scaling("linear", values.number("factor"))
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        if not low < high:
            raise BadModelFile(f"{values.where}: low_freq_factor {low} must be below high_freq_factor {high}")
        original = values.count("original_max_position_embeddings", most=1 << 26)
        return base, Scaling("llama3", values.number("factor"), original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return base, _yarn(values, context)
    return base, Scaling()


def _yarn(values: Values, context: int) -> Scaling:
    if not values.flag("truncate", True):
        raise Unsupported(f"{values.where}: truncate is false: that variant of yarn is not supported")
    if "mscale" in values and "mscale_all_dim" in values and values.get("mscale") != values.get("mscale_all_dim"):
        raise Unsupported(f"{values.where}: mscale and mscale_all_dim that differ are not supported")
    equal = "mscale" in values and "mscale_all_dim" in values  # then the two corrections cancel
    original = values.count("original_max_position_embeddings", context, most=1 << 26)
    return Scaling(
        "yarn",
        values.number("factor", context / original),
        original,
        beta_fast=values.number("beta_fast", 32.0),
        beta_slow=values.number("beta_slow", 1.0),
        attention_factor=values.number("attention_factor", 1.0 if equal else None),
    )


def context_of(config: Values, scaling: Scaling) -> int:
    """The longest sequence it was made for. Yarn is asked for to go beyond the number that is written down."""
    context = config.count("max_position_embeddings", most=1 << 26)
    if scaling.kind == "yarn":
        return max(context, min(int(scaling.original_context * scaling.factor), 1 << 26))
    return context


def refuse_quantized(config: Values) -> None:
    """A folder whose weights are not plain numbers, by the name of its method."""
    for key in ("quantization_config", "compression_config"):
        values = config.inside(key)
        if values is not None:
            method = values.text("quant_method", "") or "an unnamed method"
            raise Unsupported(
                f"{config.where}: the weights are quantized ({key}: {method}), which is not read from safetensors yet",
                cure="use the model's plain version (bfloat16, float16 or float32), or a GGUF of it",
            )


def _whole_heads(values: Values) -> None:
    share = values.number("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise Unsupported(
            f"{values.where}: partial_rotary_factor is {share}: this architecture rotates whole heads here"
        )
