"""LoRA adapters on disk: a PEFT folder (peft.py), or a GGUF file (gguf.py). Both become an `Adapter` (lora.py)."""

from __future__ import annotations

import os

from quire.observe.errors import NotFound
from quire.weights.adapters.lora import Adapter


def open_adapter(path: str | os.PathLike[str]) -> Adapter:
    """The adapter at that path. Raises NotFound, BadModelFile or Unsupported, with the file, the tensor and the numbers."""
    if os.path.isdir(path):
        from quire.weights.adapters.peft import read_peft

        return read_peft(os.fspath(path))
    if not os.path.exists(path):
        raise NotFound(
            f"there is no adapter at {os.fspath(path)!r}", cure="name a PEFT folder or a GGUF file", param="lora"
        )
    from quire.weights.adapters.gguf import read_gguf_adapter

    return read_gguf_adapter(os.fspath(path))
