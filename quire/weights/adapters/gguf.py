"""A LoRA adapter in a GGUF file, as llama.cpp converts them: general.type is "adapter", adapter.type is "lora".

NAME.lora_a   [r, k]      NAME is a tensor of the base model, such as blk.0.attn_q.weight
NAME.lora_b   [n, r]      adapter.lora.alpha counts for all of them; 0 means that nothing is scaled
"""

from __future__ import annotations

import math

from quire.observe.errors import BadModelFile, Unsupported
from quire.weights.adapters.lora import Adapter, pair_up
from quire.weights.gguf.file import GGUF


def read_gguf_adapter(path: str) -> Adapter:
    """The adapter in a file."""
    file = GGUF.open(path)
    meta = file.metadata
    kind = meta.get_str("general.type", "model")
    if kind != "adapter":
        raise BadModelFile(
            f"{path} is no adapter: key 'general.type' is {kind[:40]!r}", cure="name a PEFT folder or a GGUF adapter"
        )
    made = meta.get_str("adapter.type", "")
    if made != "lora":
        raise Unsupported(f"{path}: key 'adapter.type' is {made[:40]!r}: only lora is supported")
    invoked = "adapter.alora.invocation_tokens"
    if invoked in meta:
        raise Unsupported(f"{path}: key {invoked!r} makes it an aLoRA (rows that switch it on), which is not supported")
    alpha = meta.get_float("adapter.lora.alpha")
    if not math.isfinite(alpha) or alpha < 0:
        raise BadModelFile(f"{path}: key 'adapter.lora.alpha' is {alpha}: it must be a number from 0 on")
    halves: dict[str, dict[str, str]] = {}
    for name in file.tensors:
        module, dot, half = name.rpartition(".lora_")
        if not dot or half not in ("a", "b"):
            raise Unsupported(
                f"{path}: tensor {name!r} is no half of a pair (NAME.lora_a or NAME.lora_b)",
                cure="only plain LoRA on matrices is supported",
            )
        halves.setdefault(module.removesuffix(".weight"), {})[half] = name
    scales = {
        module: alpha / max(1, file.tensors[own["a"]].shape[0]) if alpha else 1.0
        for module, own in halves.items()
        if "a" in own and file.tensors[own["a"]].shape
    }
    return pair_up(path, "gguf", file.architecture, file, halves, scales)
