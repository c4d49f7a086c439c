"""Shapes of known models, as data, and a model of such a shape without a file: its numbers are made where it is loaded.

For benchmarks and memory planning. A source is `shape:NAME` or the path of a Hugging Face `config.json`; `SHAPES` uses
the same keys. Only the Llama family so far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from quire.layouts import Dense, Layout
from quire.models import Model, llama
from quire.models.rope import Scaling
from quire.observe.errors import BadModelFile, NotFound, Unsupported
from quire.weights.tensors import Tensors

SCHEME = "shape:"
MAX_CONFIG = 1 << 20  # bytes

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "llama-3.1-8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "llama-3.1-70b": {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
}  # fmt: skip


class ShapeTensors:
    """Weights that are only shapes: each a view of one number, as wide as is asked for."""

    def __init__(self, tied: bool):
        self._tied = tied
        self._taken: dict[str, Dense] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of everything asked for, at two bytes a number."""
        return sum(layout.nbytes for layout in self._taken.values())

    def has(self, name: str) -> bool:
        return name == "output.weight" and not self._tied

    def matrix(self, name: str, n: int, k: int) -> Dense:
        return self._make(name, (n, k))

    def vector(self, name: str, n: int) -> Dense:
        return self._make(name, (n,))

    def optional_vector(self, name: str, n: int) -> Dense | None:
        return None

    def release(self, layout: Layout) -> None:
        """There is nothing to give back."""

    def leftover(self) -> list[str]:
        return []

    def _make(self, name: str, shape: tuple[int, ...]) -> Dense:
        if name not in self._taken:
            self._taken[name] = Dense(np.broadcast_to(np.zeros(1, np.uint16), shape), "bf16")
        return self._taken[name]


def load_shape(source: str) -> tuple[Model, int]:
    """A model of that shape, and the bytes of its weights."""
    values = _read(source)
    tensors = ShapeTensors(bool(values.get("tie_word_embeddings", False)))
    return llama.Model(_config(source, values), cast("Tensors", tensors)), tensors.nbytes


def _read(source: str) -> dict[str, Any]:
    if source.startswith(SCHEME):
        name = source.removeprefix(SCHEME)
        if name not in SHAPES:
            raise NotFound(f"no shape is named {name!r}", cure=f"there are: {', '.join(SHAPES)}; or name a config.json")
        return SHAPES[name]
    path = Path(source)
    if path.suffix != ".json":
        raise Unsupported(f"{source} gives no shape to fill", cure=f"name {SCHEME}NAME or a config.json")
    try:
        text = path.read_bytes()[: MAX_CONFIG + 1]
        values = json.loads(text) if len(text) <= MAX_CONFIG else None
    except FileNotFoundError:
        raise NotFound(f"there is no file {source}") from None
    except (OSError, ValueError) as e:
        raise BadModelFile(f"{source} cannot be read: {e}") from None
    if not isinstance(values, dict):
        raise BadModelFile(f"{source} is not a model's configuration")
    if values.get("model_type", "llama") not in ("llama", "mistral"):
        raise Unsupported(f"the architecture {values['model_type']!r} cannot be made from its shape yet")
    return values


def _config(source: str, values: dict[str, Any]) -> llama.Config:
    def count(key: str, default: int | None = None) -> int:
        value = values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 1 << 26:
            raise BadModelFile(f"{source}: {key} is {value!r}: it must be a positive whole number")
        return value

    heads, width = count("num_attention_heads"), count("hidden_size")
    head_dim, kv_heads = count("head_dim", width // heads), count("num_key_value_heads", heads)
    if heads % kv_heads or head_dim % 8 or head_dim > llama.MAX_HEAD_DIM:
        raise Unsupported(f"{source}: {heads} heads of {head_dim} over {kv_heads} key-value heads are not supported")
    return llama.Config(
        architecture="llama",
        vocab_size=count("vocab_size"),
        context=count("max_position_embeddings"),
        layers=count("num_hidden_layers"),
        width=width,
        ffn=count("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=head_dim,
        rope_base=float(values.get("rope_theta", 10000.0)),
        scaling=_scaling(source, values.get("rope_scaling") or {}),
        eps=float(values.get("rms_norm_eps", 1e-5)),
    )


def _scaling(source: str, values: dict[str, Any]) -> Scaling:
    kind = values.get("rope_type", values.get("type", "none"))
    if kind in ("none", "default"):
        return Scaling()
    if kind != "llama3":
        raise Unsupported(f"{source}: rope scaling {kind!r} cannot be made from a shape yet")
    return Scaling(
        kind=kind,
        factor=float(values["factor"]),
        original_context=int(values["original_max_position_embeddings"]),
        low_freq_factor=float(values["low_freq_factor"]),
        high_freq_factor=float(values["high_freq_factor"]),
    )
