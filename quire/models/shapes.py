"""Shapes of known models, as data, and a model of such a shape without a file: its numbers are made where it is loaded.

For benchmarks and memory planning. A source is `shape:NAME` or the path of a Hugging Face `config.json`; `SHAPES` uses
the same keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.layouts import Bytes, Dense, Layout
from quire.models import Model, families
from quire.observe.errors import NotFound, Unsupported
from quire.weights.tensors import Tensors

if TYPE_CHECKING:
    from quire.weights.values import Values

SCHEME = "shape:"


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": experts, "num_experts_per_tok": 4, "sliding_window": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0, "tie_word_embeddings": False,
        "hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                         "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip


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
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "llama-3.1-70b": {
        "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
}  # fmt: skip


class ShapeTensors:
    """Weights that are only shapes: each a view of one number, as wide as is asked for. Random ones are made around it: 1 for a norm's
    gain, 0 for all else, as biases of 1 would send every row to the same experts."""

    def __init__(self) -> None:
        self._taken: dict[str, Dense] = {}
        self._cut: dict[str, tuple[Layout, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of everything asked for: two of a plain number, of others what a file takes."""
        parts = [*self._taken.values(), *(part for parts in self._cut.values() for part in parts)]
        return sum(getattr(layout.data, "stored", layout.nbytes) for layout in parts)

    def has(self, name: str) -> bool:
        return False

    def matrix(self, name: str, n: int, k: int) -> Dense:
        return self._make(name, (n, k))

    def vector(self, name: str, n: int) -> Dense:
        return self._make(name, (n,))

    def optional_vector(self, name: str, n: int) -> Dense | None:
        return None

    def release(self, layout: Layout) -> None:
        """Do nothing: tensors without numbers have no memory to give back."""

    def leftover(self) -> list[str]:
        return []

    def split(self, name: str, sizes: tuple[int, ...], k: int) -> tuple[Dense, ...]:
        return tuple(self._make(f"{name}, part {i}", (n, k)) for i, n in enumerate(sizes))

    def stack(self, name: str, count: int, n: int, k: int) -> tuple[Dense, ...]:
        return tuple(self._make(f"{name}, part {i}", (n, k)) for i in range(count))

    def vectors(self, name: str, count: int, n: int) -> tuple[Dense, ...]:
        return tuple(self._make(f"{name}, part {i}", (n,)) for i in range(count))

    def row(self, name: str, k: int) -> Dense:
        return self._make(name, (1, k))

    def cut(self, name: str, shape: tuple[int, ...], by: Callable[[Layout], tuple[Layout, ...]]) -> tuple[Layout, ...]:
        """The parts that `by` cuts a tensor of that shape into: distinct layouts, though all are views of one number."""
        if name not in self._cut:
            self._cut[name] = by(Dense(np.broadcast_to(np.zeros(1, np.uint16), shape), "bf16"))
        return self._cut[name]

    def octets(self, name: str, shape: tuple[int, ...]) -> Bytes:
        return np.broadcast_to(np.zeros(1, np.uint8), shape)

    def made(self, layouts: Iterable[Layout], *names: str) -> None:
        self._cut[names[0]] = tuple(layouts)

    def _make(self, name: str, shape: tuple[int, ...]) -> Dense:
        if name not in self._taken:
            around = 0x3F80 if len(shape) == 1 and "norm" in name else 0  # of bfloat16
            self._taken[name] = Dense(np.broadcast_to(np.array([around], np.uint16), shape), "bf16")
        return self._taken[name]


def load_shape(source: str) -> tuple[Model, int]:
    """A model of that shape, and the bytes of its weights."""
    from quire.weights.folder import architecture_of  # who loads a GGUF needs none of this

    values = read_shape(source)
    named = "architectures" in values or "model_type" in values
    architecture = architecture_of(values) if named else "LlamaForCausalLM"
    family: Any = next(
        (m for m in families(architecture) if architecture in m.HF_ARCHS and hasattr(m.Model, "of")), None
    )
    if family is None:
        raise Unsupported(
            f"the architecture {architecture[:80]!r} cannot be made from its shape",
            cure=f"supported: {', '.join(n for m in families() if hasattr(m.Model, 'of') for n in m.HF_ARCHS)}",
        )
    tensors = ShapeTensors()
    return family.Model.of(values, architecture, cast("Tensors", tensors)), tensors.nbytes


def read_shape(source: str) -> Values:
    """The configuration that a source names."""
    from quire.weights.values import Values

    if source.startswith(SCHEME):
        name = source.removeprefix(SCHEME)
        if name not in SHAPES:
            raise NotFound(f"no shape is named {name!r}", cure=f"there are: {', '.join(SHAPES)}; or name a config.json")
        return Values(source, SHAPES[name])
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix != ".json":
        raise Unsupported(f"{source} gives no shape to fill", cure=f"name {SCHEME}NAME or a config.json")
    try:
        return Values.read(path)
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
