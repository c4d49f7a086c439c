"""Random LoRA adapters as PEFT saves them and as a converter writes them to GGUF, and models compiled with room for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire import models
from quire.backends.adapting import adaptable
from quire.backends.cases import ragged
from quire.backends.choose import open_backend
from quire.layouts import Floats
from quire.models.adapter_targets import AdapterTargets
from quire.weights.adapters.read import open_adapter
from quire.weights.checkpoint import open_checkpoint
from quire.weights.gguf.file import GGUF
from tests.unit.models import tiny

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def save(
    model: Any, path: Path, targets: Sequence[str] = EVERY, *, r: int = 4, seed: int = 0, dtype: Any = None, **more: Any
) -> Any:
    """A random adapter of the model in a folder; returns the model with it, as PEFT computes it."""
    import peft
    import torch

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=r, target_modules=list(targets), task_type="CAUSAL_LM", **{"lora_alpha": 2 * r, **more})
    made = peft.get_peft_model(copy.deepcopy(model), config).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.12)
                if dtype is not None:
                    parameter.copy_(parameter.to(dtype))
    if dtype is not None:
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.to(dtype)
    made.save_pretrained(path, save_embedding_layers=False)
    return made.float()


def convert(model: Any, folder: Path, path: Path, arch: str = "llama", pairs: bool = True, **keys: Any) -> Path:
    """The PEFT adapter in a folder as a GGUF file, as llama.cpp's converter writes it."""
    import gguf
    from safetensors.numpy import load_file

    config = __import__("json").loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_string("general.type", keys.get("type", "adapter"))
    writer.add_string("adapter.type", keys.get("adapter", "lora"))
    writer.add_float32("adapter.lora.alpha", float(keys.get("alpha", config["lora_alpha"])))
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    for name, data in load_file(folder / "adapter_model.safetensors").items():
        module, half = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        last = module.rsplit(".", 1)[1]
        if half == "B" and pairs and last in heads:
            data = tiny.permute(data, heads[last])
        writer.add_tensor(f"{tiny.gguf_name(module + '.weight')}.lora_{half.lower()}", np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Adapted:
    """A model with some adapters in its slots, on one backend; every row's logits are wanted."""

    def __init__(
        self, path: Path, adapters: Sequence[Path], backend: str, most: int = 256, threads: int = 2, **where: Any
    ):
        checkpoint = open_checkpoint(path)
        self.model = models.load(checkpoint)
        self.pages = -(-most // 16)
        kv = self.model.kv(self.pages, 16)
        self.targets = AdapterTargets(
            self.model, checkpoint.architecture, isinstance(checkpoint, GGUF), kv, slots=max(1, len(adapters)), rank=64
        )
        opened = open_backend(backend, threads=threads, **where)
        forward = adaptable(self.model.forward, self.targets.by_weight)
        self.program: Any = opened.compile(forward, kv=kv, max_tokens=most, max_rows=most)
        for slot, adapter in enumerate(adapters):
            self.program.place(slot, self.targets.fit(open_adapter(adapter)))

    def logits(self, tokens: list[int], slot: int, chunk: int = 1 << 30) -> Floats:
        """[len(tokens), vocabulary] of one sequence that uses that slot; -1: none."""
        parts = []
        for at in range(0, len(tokens), chunk):
            part = tokens[at : at + chunk]
            parts.append(self.mixed([(at, part, slot, list(range(-(-(at + len(part)) // 16))))])[0])
        return np.concatenate(parts)

    def mixed(self, rows: list[tuple[int, list[int], int, list[int]]]) -> list[Floats]:
        """One step of several sequences, each (first position, tokens, slot, pages)."""
        ids = np.concatenate([np.array(tokens, np.int32) for _, tokens, _, _ in rows])
        batch = ragged([(start, len(tokens), pages) for start, tokens, _, pages in rows], ids=ids)
        slots = np.concatenate([np.full(len(tokens), slot, np.int32) for _, tokens, slot, _ in rows])
        batch.adapters = slots if (slots >= 0).any() else None
        return np.split(self.program.run(batch).copy(), batch.q_start[1:-1])
