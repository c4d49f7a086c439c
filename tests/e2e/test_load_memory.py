"""Loading needs the model and one shard of memory, never the model twice: peaks measured in processes of their own.

What counts is everything that is resident, pages of the mapped files too, above what the process had when its modules were in.
The kernel's own high-water mark is read, so that no moment is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.weights.gguf.file import GGUF

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs, which Linux has")
ROOT = Path(__file__).resolve().parents[2]
LOAD = """
import json, sys
from pathlib import Path
from quire.config import EngineConfig, Environment
from quire.engine.construction.build import build_engine

def status(key):
    return next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(key))

def load(path):
    config = EngineConfig(path=path, backend="native", threads=2, max_seqs=1, max_batch_tokens=16, context=64, kv_memory=4 << 20)
    return build_engine(config, Environment(home=Path(sys.argv[1])))

load(sys.argv[2])[0].close()  # a small one: modules, threads and tables are in from here on
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the high-water mark begins anew
engine, info = load(sys.argv[3])
print(json.dumps({"peak": status("VmHWM") - before, "after": status("VmRSS") - before, "held": info.weight_bytes}))
"""
SLACK = 20 << 20  # KV, arena, what is being packed, the allocator
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
VOCAB, LAYERS = 4096, 12


def tensors(layers: int) -> dict[str, tuple[int, ...]]:
    d, f = SIZES["hidden_size"], SIZES["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, d)}
    for i in range(layers):
        block = f"model.layers.{i}."
        found |= {f"{block}self_attn.{role}_proj.weight": (d, d) for role in "qkvo"}
        found |= {f"{block}mlp.{role}_proj.weight": (f, d) for role in ("gate", "up")}
        found |= {f"{block}mlp.down_proj.weight": (d, f)}
        found |= {f"{block}{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (d,), "lm_head.weight": (VOCAB, d)}


def save(path: Path, layers: int, shards: int) -> int:
    """A Llama in bfloat16, in shards of about one size; what the largest one has."""
    path.mkdir()
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "num_hidden_layers": layers}
    config |= {**SIZES, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    shapes = tensors(layers)
    names, total = list(shapes), sum(2 * int(np.prod(s)) for s in shapes.values())
    random, where, largest = np.random.default_rng(0), {}, 0
    for n in range(1, shards + 1):
        file, header, data, at = f"model-{n:05}-of-{shards:05}.safetensors", {}, [], 0
        while names and (at < total / shards or n == shards):
            name = names.pop(0)
            size = 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [at, at + size]}
            data.append(random.integers(0x3C00, 0x3D00, size // 2, np.uint16).tobytes())  # small numbers
            where[name] = file
            at += size
        text = json.dumps(header).encode()
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
        largest = max(largest, at)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return largest


def measured(tmp_path: Path, small: Path, large: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(small), str(large)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_folder_in_shards(tmp_path: Path):
    save(tmp_path / "small", 1, 1)
    shard = save(tmp_path / "m", LAYERS, 8)
    found = measured(tmp_path, tmp_path / "small", tmp_path / "m")
    print(found, shard)
    assert found["held"] > 6 * shard  # or the bound would say nothing
    assert found["peak"] < found["held"] + shard + SLACK, found
    assert found["after"] < found["held"] + SLACK, found


def test_a_gguf(tmp_path: Path, model_path: Path):
    save(tmp_path / "small", 1, 1)
    with GGUF.open(model_path) as file:
        largest = max(info.nbytes for info in file.tensors.values())
    found = measured(tmp_path, tmp_path / "small", model_path)
    print(found, largest)
    assert found["held"] > 2 * largest
    assert found["peak"] < found["held"] + largest + SLACK, found
    assert found["after"] < found["held"] + SLACK, found
