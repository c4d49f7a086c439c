"""What every family reads from a GGUF's metadata in the same way: sizes, rotary positions, windows.

Keys are those of the GGUF specification under the architecture's name; `Keys` asks for them without it, and whatever is
impossible is an error that names the whole key.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from quire.layouts import Rope
from quire.models.parts import MAX_CONTEXT, MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, Dims, check_heads, rotation
from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.gguf.file import GGUF
from quire.weights.tensors import Tensors

T = TypeVar("T")
RMS_EPS = "attention.layer_norm_rms_epsilon"


class _Required:
    """Marks a getter called without a default."""


_REQUIRED = _Required()


class Keys:
    """A GGUF's metadata under the name of its architecture. A getter without a default insists on the key."""

    def __init__(self, gguf: GGUF):
        self.gguf = gguf
        self.arch = gguf.architecture
        self.meta = gguf.metadata

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.meta

    def count(self, key: str, default: T | _Required = _REQUIRED, most: int = 1 << 24) -> int | T:
        """A whole number from 1 to `most`."""
        value = self.meta.get_int(f"{self.arch}.{key}", None)
        if value is None:
            return self._absent(key, default)
        if not 0 < value <= most:
            raise BadModelFile(f"metadata {self.arch}.{key} is {value}: it must be between 1 and {most}")
        return value

    def number(self, key: str, default: T | _Required = _REQUIRED) -> float | T:
        """A positive, finite number."""
        value = self.meta.get_float(f"{self.arch}.{key}", None)
        if value is None:
            return self._absent(key, default)
        if not (math.isfinite(value) and value > 0):
            raise BadModelFile(f"metadata {self.arch}.{key} is {value}: it must be a positive number")
        return value

    def zero_or(self, key: str) -> float | None:
        """A positive number; None where it is 0 or not there, which mean the same for these keys."""
        return None if self.meta.get_float(f"{self.arch}.{key}", 0.0) == 0.0 else self.number(key)

    def text(self, key: str, default: str) -> str:
        return self.meta.get_str(f"{self.arch}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return self.meta.get_bool(f"{self.arch}.{key}", default)

    def _absent(self, key: str, default: T | _Required) -> T:
        if isinstance(default, _Required):
            self.meta.get_int(f"{self.arch}.{key}")  # says that it is missing
            raise AssertionError(key)
        return default


def dims_of(keys: Keys, *, eps: str = RMS_EPS, ffn: str | None = "feed_forward_length") -> Dims:
    """The sizes. eps and ffn name the keys that hold them; ffn=None: no layer has a plain MLP."""
    heads, width = keys.count("attention.head_count", most=MAX_HEADS), keys.count("embedding_length")
    kv_heads = keys.count("attention.head_count_kv", heads, most=MAX_HEADS)
    head_dim = keys.count("attention.key_length", max(1, width // heads), most=1 << 16)
    if keys.count("attention.value_length", head_dim, most=1 << 16) != head_dim:
        raise Unsupported("keys and values of different sizes are not supported by this architecture")
    check_heads(f"metadata {keys.arch}.attention", heads, kv_heads, head_dim)
    return Dims(
        architecture=keys.arch,
        vocab_size=vocabulary(keys.gguf),
        context=keys.count("context_length", most=MAX_CONTEXT),
        layers=keys.count("block_count", most=MAX_LAYERS),
        width=width,
        ffn=keys.count(ffn) if ffn else 0,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=keys.number(eps, 1e-5),
    )


def vocabulary(gguf: GGUF) -> int:
    """Rows of the embedding: the one number that the weights themselves bear out."""
    info = gguf.tensors.get("token_embd.weight")
    if info is None:
        raise BadModelFile("tensor 'token_embd.weight' is missing from the file")
    if len(info.shape) != 2:
        raise BadModelFile(f"tensor 'token_embd.weight' has {len(info.shape)} dimensions: it must have 2")
    return info.shape[0]


def rope_dim_of(keys: Keys, d: Dims) -> int:
    """How many columns of a head are rotated."""
    dim = keys.count("rope.dimension_count", d.head_dim, most=MAX_HEAD_DIM)
    if dim % 2 or dim > d.head_dim:
        raise Unsupported(f"head size {d.head_dim} with {dim} rotated dimensions is not supported")
    return dim


def scaling_of(keys: Keys, tensors: Tensors, rope_dim: int, context: int) -> Scaling:
    """How the rotary frequencies are scaled for longer contexts: in a GGUF, llama3's way is one divisor for each of them."""
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise Unsupported(f"rope scaling {kind!r} is not supported", cure="supported: none, linear, llama3, yarn")
    return Scaling(
        kind=kind,
        factor=keys.number("rope.scaling.factor", 1.0),
        original_context=keys.count("rope.scaling.original_context_length", context, most=MAX_CONTEXT),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=keys.zero_or("rope.scaling.attn_factor"),
        factors=divisors_of(tensors, "rope_freqs.weight", rope_dim),
    )


def rotation_of(keys: Keys, tensors: Tensors, d: Dims, *, pairs: bool, base: float = 10000.0) -> Rope:
    """How queries and keys are rotated. base: where the file does not say."""
    dim = rope_dim_of(keys, d)
    return rotation(keys.number("rope.freq_base", base), dim, scaling_of(keys, tensors, dim, d.context), pairs=pairs)


def divisors_of(tensors: Tensors, name: str, rope_dim: int) -> np.ndarray | None:
    """One divisor for each frequency, or None where the file has none."""
    kept = tensors.optional_vector(name, rope_dim // 2)
    divisors = kept.dequantize() if kept else None
    if divisors is not None and not (np.isfinite(divisors) & (divisors > 0)).all():
        raise BadModelFile(f"tensor {name!r} holds divisors that are not positive numbers")
    return divisors


def windows_of(keys: Keys, d: Dims, period: int, default: int = 0) -> tuple[int | None, ...]:
    """What each layer sees of the past, None: all of it. Every period-th layer sees all, unless the file says which do;
    with 0 none does."""
    size, key = keys.meta.get_int(f"{keys.arch}.attention.sliding_window", default), "attention.sliding_window_pattern"
    if not 0 <= size <= MAX_CONTEXT:
        raise BadModelFile(f"metadata {keys.arch}.attention.sliding_window is {size}: it must not be negative")
    if size == 0:
        return (None,) * d.layers
    if isinstance(keys.meta.get(f"{keys.arch}.{key}"), np.ndarray):
        slides = [bool(v) for v in keys.meta.get_array(f"{keys.arch}.{key}", kinds="iub")]
        if len(slides) < d.layers:
            raise BadModelFile(f"metadata {keys.arch}.{key} has {len(slides)} values for {d.layers} layers")
    else:
        period = keys.meta.get_int(f"{keys.arch}.{key}", period)
        slides = [period == 0 or bool((i + 1) % period) for i in range(d.layers)]
    return tuple(size if slides[i] else None for i in range(d.layers))
