"""How fast a folder of safetensors reaches a GPU: ours, and safetensors' own loader as the peer, on the same files.

    python -m benchmarks.gpu_load [--shape llama-3.1-8b] [--folder FOLDER] [--rounds 3] [--quantize fp8]

The folder is made if it is not there: bf16, random numbers, four shards and an index. Every round is a process of its own for
each side, with the files in the page cache; what is timed is the weights alone (the engine's start is in benchmarks.gpu).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import save

SHARDS = 4


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's tensors."""
    d, inner, hd = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * hd, shape["num_key_value_heads"] * hd
    yield "model.embed_tokens.weight", (shape["vocab_size"], d)
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (d,)
        for name, n, k in (("q", q, d), ("k", kv, d), ("v", kv, d), ("o", d, q)):
            yield f"{at}self_attn.{name}_proj.weight", (n, k)
        yield at + "post_attention_layernorm.weight", (d,)
        for name, n, k in (("gate", inner, d), ("up", inner, d), ("down", d, inner)):
            yield f"{at}mlp.{name}_proj.weight", (n, k)
    yield "model.norm.weight", (d,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], d)


def make(folder: Path, name: str) -> None:
    """Config, shards and index. The same block of numbers again and again: only their number matters."""
    import numpy as np

    from quire.models.shapes import SHAPES

    shape = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors(shape))
    per = -(-len(names) // SHARDS)
    block = (np.random.default_rng(0).standard_normal(1 << 25).astype(np.float32) * 0.02).view(np.uint32) >> 16
    data = memoryview(block.astype(np.uint16).tobytes())
    index: dict[str, str] = {}
    for i in range(SHARDS):
        own, file = names[i * per : (i + 1) * per], f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        header, at = {}, 0
        for tensor, dims in own:
            size = 2
            for n in dims:
                size *= n
            header[tensor] = {"dtype": "BF16", "shape": dims, "data_offsets": [at, at + size]}
            index[tensor], at = file, at + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            while at:
                at -= out.write(data[: min(at, len(data))])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = shape | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def ours(folder: Path, quantize: str) -> float:
    """Seconds that the weights took, by the engine's own watch."""
    import re

    from quire.config import EngineConfig, Environment
    from quire.engine.build import build_engine

    config = EngineConfig(
        path=str(folder), quantize=quantize, context=1024, max_seqs=2, max_batch_tokens=64, kv_memory=1 << 28
    )
    engine, info = build_engine(config, Environment(home=Path("/nowhere")))
    engine.settle()
    told = next(line for line in info.decisions if line.startswith("loaded in"))
    found = re.search(r"weights (\d+) ms", told)
    assert found is not None, told
    print(told, file=sys.stderr)
    return int(found.group(1)) / 1000


def theirs(folder: Path) -> float:
    """safetensors' own way to a device, shard after shard."""
    import torch
    from safetensors.torch import load_file  # pyright: ignore[reportMissingImports]

    torch.zeros(1, device="cuda")
    began = time.perf_counter()
    kept = [load_file(path, device="cuda") for path in sorted(folder.glob("*.safetensors"))]
    torch.cuda.synchronize()
    assert kept
    return time.perf_counter() - began


def memory() -> dict[str, int]:
    """MiB of this process's own memory at its peak is not kept apart by the system; now, and with the mapped files."""
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("Rss", "Vm"))
    )
    return {name: int(status[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon", "RssFile")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu_load"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        seconds = ours(args.folder, args.quantize) if args.side == "ours" else theirs(args.folder)
        print(json.dumps({"seconds": seconds, **memory()}))
        return
    if not (args.folder / "config.json").exists():
        print(f"writing {args.folder} ...", flush=True)
        make(args.folder, args.shape)
    size = sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for i in range(args.rounds):
        for side in ("ours", "theirs") if i % 2 else ("theirs", "ours"):
            command = [sys.executable, "-m", "benchmarks.gpu_load", "--side", side, "--folder", str(args.folder)]
            done = subprocess.run([*command, "--quantize", args.quantize], check=True, stdout=subprocess.PIPE)
            rounds[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {i + 1}, {side}: {rounds[side][-1]}", flush=True)
    mid = {side: statistics.median(r["seconds"] for r in rounds[side]) for side in rounds}
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(rounds["ours"], rounds["theirs"], strict=True)]
    print(
        f"{size / 1e9:.1f} GB: ours {mid['ours']:.2f} s ({size / 1e9 / mid['ours']:.1f} GB/s), safetensors {mid['theirs']:.2f} s; "
        f"{statistics.median(ratios):.2f}x its speed ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    print(save(f"gpu-load-{args.shape}", {"bytes": size, "quantize": args.quantize, "rounds": rounds}))


if __name__ == "__main__":
    main()
