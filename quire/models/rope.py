"""Rotary frequencies: the plain ones and the scaling variants that stretch a model beyond its training context.

Everything becomes a `layouts.Rope`: one frequency per rotated pair, and one magnitude. Formulas are those of the papers
and of transformers' `modeling_rope_utils`, which the tests compare with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.layouts import Floats
from quire.observe.errors import BadModelFile


@dataclass(frozen=True, slots=True)
class Scaling:
    """How rotary frequencies are scaled for longer contexts. kind: none, linear, llama3, yarn or longrope."""

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: its ramp begins and ends at whole dimensions
    attention_factor: float | None = None  # yarn and longrope; None: from the factor
    factors: Floats | None = None  # per-frequency divisors stored in the file (llama3 in GGUF)
    short: Floats | None = None  # longrope: divisors for sequences within the original context
    long: Floats | None = None  # longrope: divisors for longer ones


def frequencies(base: float, dim: int, scaling: Scaling, context: int = 0) -> tuple[Floats, float]:
    """(radians per position for each pair [dim / 2], magnitude). context: the longest sequence, which longrope asks for."""
    plain = 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling.factors is not None:
        plain = plain / scaling.factors.astype(np.float64)
    match scaling.kind:
        case "none":
            return plain.astype(np.float32), 1.0
        case "linear":
            return (plain / scaling.factor).astype(np.float32), 1.0
        case "llama3":
            return _llama3(plain, scaling).astype(np.float32), 1.0
        case "yarn":
            return _yarn(plain, base, dim, scaling)
        case "longrope":
            return _longrope(plain, scaling, context)
    raise ValueError(f"unknown rope scaling {scaling.kind!r}")


def _llama3(plain: np.ndarray, s: Scaling) -> np.ndarray:
    """Long wavelengths are slowed by the factor, short ones kept, and those between blended."""
    wavelength = 2 * math.pi / plain
    low, high = s.original_context / s.low_freq_factor, s.original_context / s.high_freq_factor
    blend = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - blend) * plain / s.factor + blend * plain
    return np.where(wavelength > low, plain / s.factor, np.where(wavelength < high, plain, between))


def _yarn(plain: np.ndarray, base: float, dim: int, s: Scaling) -> tuple[Floats, float]:
    """Interpolate the slow dimensions, keep the fast ones, ramp between; scale the attention a little."""

    def dimension(rotations: float) -> float:
        return dim * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    blended = plain / s.factor * ramp + plain * (1.0 - ramp)
    magnitude = yarn_magnitude(s.factor) if s.attention_factor is None else s.attention_factor
    return blended.astype(np.float32), float(magnitude)


def yarn_magnitude(factor: float, amount: float = 1.0) -> float:
    """What yarn multiplies queries and keys by, so that attention stays as sharp over a longer context."""
    return 0.1 * amount * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(plain: np.ndarray, s: Scaling, context: int) -> tuple[Floats, float]:
    """One of two lists of divisors, for sequences within the original context and for longer ones."""
    divisors = s.long if context > s.original_context else s.short
    if divisors is None or divisors.size != plain.size:
        raise BadModelFile(
            f"longrope needs {plain.size} divisors of each kind: there are {0 if divisors is None else divisors.size}"
        )
    magnitude = s.attention_factor
    if magnitude is None:
        magnitude = math.sqrt(1.0 + math.log(s.factor) / math.log(s.original_context)) if s.factor > 1.0 else 1.0
    return (plain / divisors.astype(np.float64)).astype(np.float32), float(magnitude)
