"""Mutated configurations and metadata of every family, and mutated adapters: a model that runs, or an error that names the file.

    python -m tests.fuzz.models --runs 20000 --seed 7

A run changes a few values of a folder's config.json (or of a file beside it), numbers in a GGUF's header, or bytes of an adapter, and loads what is
there. What loads is compiled for the native backend and runs three tokens.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quire import models
from quire.backends.batch import Table
from quire.backends.cases import single
from quire.backends.choose import open_backend
from quire.models.pooling import pooling_of
from quire.weights.adapters.read import open_adapter
from quire.weights.checkpoint import open_checkpoint
from tests.fuzz import kit
from tests.unit.models import encoders, families, folders, mixtures

DENSE = (
    "mistral, window",
    "qwen2, late windows",
    "smollm3, windows",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3, long factors",
)
DENSE += ("granite", "olmo2", "cohere, norms by head", "cohere2", "glm4", "glm")
GGUFS = ("mistral, window", "gemma3", "phi3, long factors", "cohere2", "deepseek3", "gpt-oss", "qwen3next", "glm4moe")
GGUF = "m.gguf"
LEFT_ALONE = {"transformers_version", "dtype", "torch_dtype", "bos_token_id", "pad_token_id", "initializer_range"}


def make(folder: Path, kinds: Iterable[str] | None = None) -> dict[str, Path]:
    """A folder for each family, two encoders and two adapters; `kinds`: only some."""
    wanted = None if kinds is None else set(kinds)
    found: dict[str, Path] = {}

    def put(kind: str, build: Any) -> None:
        if wanted is None or kind in wanted:
            found[kind] = folder / f"{len(found)}"
            build(found[kind])

    put("llama", lambda p: folders.save(folders.build("llama", num_hidden_layers=1), p))
    for name in DENSE:
        put(name, lambda p, name=name: folders.save(families.build(name), p))
    for name in mixtures.KINDS:
        put(name, lambda p, name=name: folders.save(mixtures.build(name), p))
    for name in ("bert", "roberta", "distilbert-score"):
        put(name, lambda p, name=name: encoders.save(encoders.build(name), p, pooling="cls"))
    for name in GGUFS:
        put(f"gguf, {name}", lambda p, name=name: _gguf(p, name))
    put("adapter", lambda p: _adapter(p))
    return found


def _gguf(path: Path, name: str) -> None:
    path.mkdir()
    writer = mixtures if name in mixtures.KINDS else families
    writer.write_gguf(name, writer.build(name), path / GGUF)


def _adapter(path: Path) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"]}
    values |= {"rank_pattern": {"o_proj": 4}, "alpha_pattern": {}, "use_rslora": False, "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps(values))
    rng = np.random.default_rng(0)
    module = "base_model.model.model.layers.0.self_attn.{}_proj.lora_{}.weight"
    tensors = {module.format(m, s): rng.standard_normal(n).astype(np.float32)
               for m in "qo" for s, n in (("A", (4, 96)), ("B", (96, 4)))}  # fmt: skip
    save_file(tensors, path / "adapter_model.safetensors")


def mutate(path: Path, rng: random.Random) -> str:
    """Change one file; says which and how."""
    names = [p.relative_to(path) for p in sorted(path.rglob("*.json"))]
    file = path / GGUF
    if file.exists():
        data = bytearray(file.read_bytes())
        for _ in range(rng.choice((1, 1, 2))):
            at, size = rng.randrange(24, 1400), rng.choice((1, 4, 4, 8))
            data[at : at + size] = (rng.choice(kit.EXTREMES) % 2**64).to_bytes(8, "little")[:size]
        file.write_bytes(data)
        return f"{GGUF}, numbers"
    weights = path / "adapter_model.safetensors"
    if weights.exists() and rng.random() < 0.6:
        data = weights.read_bytes()
        weights.write_bytes(kit.mangle(data[:1200], rng) + data[1200:])
        return "adapter_model.safetensors, mangled"
    name = rng.choice([*[n for n in names if n.name in ("config.json", "adapter_config.json")] * 4, *names])
    values = json.loads((path / name).read_text())
    fixed = {k: values.pop(k) for k in LEFT_ALONE if isinstance(values, dict) and k in values}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        values = kit.stir(values, rng) if isinstance(values, dict | list) else values
    (path / name).write_text(json.dumps({**fixed, **values} if isinstance(values, dict) else values))
    return f"{name}, stirred"


def look(path: Path) -> None:
    """Load and run what is there. Raises QuireError."""
    if (path / "adapter_config.json").exists():
        for module in open_adapter(path).modules:
            module.a.dequantize()
            module.b.dequantize()
        return
    with open_checkpoint(path / GGUF if (path / GGUF).exists() else path) as checkpoint:
        model = models.load(checkpoint)
        assert 0 < model.config.context <= 1 << 26
        encoder = isinstance(model, models.Encoder)
        pooling_of(checkpoint, encoder)
        kv = model.kv(2, 16)
        batch = single(3, np.array([1, 2, 3], np.int32))
        batch.more = (Table(batch.pages, batch.write),) * len(kv.more)
        inputs = model.inputs if encoder else {}
        forward = model.hidden if encoder else model.forward
        program = open_backend("native", threads=1).compile(forward, kv=kv, max_tokens=16, max_rows=16, inputs=inputs)
        given = model.given(batch.pos, np.zeros(3, np.int32)) if encoder else {}
        assert program.run(batch, given).shape[0] == batch.logit_rows.size


def fuzz(
    numbers: Iterable[int],
    seed: int,
    folder: Path,
    kinds: Iterable[str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Counter[str]:
    made = make(folder, kinds)

    def put(rng: random.Random) -> kit.Mutant:
        kind = rng.choice(sorted(made))
        return kit.put_folder(made[kind], folder / "mutant", kind, mutate, rng)

    return kit.drive(numbers, seed, put, look, tell=tell)


if __name__ == "__main__":
    kit.main(__doc__, fuzz, runs=2000, kinds=True)
