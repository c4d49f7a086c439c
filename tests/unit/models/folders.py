"""Tiny random models as transformers saves them: a folder with config.json, safetensors and, if wanted, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.models import tiny

CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
}


def build(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config, model = (getattr(transformers, name) for name in CLASSES[kind])
    sizes = {**tiny.TINY, "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes}
    made = model(config(**sizes)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(3.0) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def save(
    model: Any, path: Path, *, shard: str = "5GB", dtype: Any = None, config: dict[str, Any] | None = None
) -> Path:
    """The model as a folder; `config` changes what config.json says afterwards."""
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(path, max_shard_size=shard)
    if config is not None:
        edit(path / "config.json", **config)
    return path


def edit(path: Path, **changes: Any) -> None:
    """Other values in a JSON file; None takes a key out."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
