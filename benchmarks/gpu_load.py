"""How fast a folder of safetensors reaches a GPU: ours, and safetensors' own loader as the peer, on the same files.

    python -m benchmarks.gpu_load [--shape llama-3.1-8b] [--folder FOLDER] [--rounds 3] [--quantize fp8] [--expand]
    python -m benchmarks.gpu_load --shape gpt-oss-20b --folder build/gpu_load_gpt_oss

The folder is made if it is not there: bf16 (experts of gpt-oss in MXFP4), random numbers, four shards and an index. Every round is a process of its own for
each side, with the files in the page cache. The weights' share of our start is the difference to the same engine with numbers
that are made on the device.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.record import save

SHARDS = 4
SIDES = ("folder", "made", "safetensors")


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and types of a Llama's tensors, or of a gpt-oss's."""
    d, inner, hd = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * hd, shape["num_key_value_heads"] * hd
    experts = shape.get("num_local_experts", 0)
    yield "model.embed_tokens.weight", (shape["vocab_size"], d), "BF16"
    for i in range(shape["num_hidden_layers"]):
        at = f"model.layers.{i}."
        yield at + "input_layernorm.weight", (d,), "BF16"
        for name, n, k in (("q", q, d), ("k", kv, d), ("v", kv, d), ("o", d, q)):
            yield f"{at}self_attn.{name}_proj.weight", (n, k), "BF16"
            if experts:
                yield f"{at}self_attn.{name}_proj.bias", (n,), "BF16"
        yield at + "post_attention_layernorm.weight", (d,), "BF16"
        if experts:
            yield at + "self_attn.sinks", (shape["num_attention_heads"],), "BF16"
            yield at + "mlp.router.weight", (experts, d), "BF16"
            yield at + "mlp.router.bias", (experts,), "BF16"
            for name, n, k in (("gate_up", 2 * inner, d), ("down", d, inner)):
                yield f"{at}mlp.experts.{name}_proj_blocks", (experts, n, k // 32, 16), "U8"
                yield f"{at}mlp.experts.{name}_proj_scales", (experts, n, k // 32), "U8"
                yield f"{at}mlp.experts.{name}_proj_bias", (experts, n), "BF16"
            continue
        for name, n, k in (("gate", inner, d), ("up", inner, d), ("down", d, inner)):
            yield f"{at}mlp.{name}_proj.weight", (n, k), "BF16"
    yield "model.norm.weight", (d,), "BF16"
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], d), "BF16"


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
    scales = memoryview(bytes([120]) * len(data))  # exponents: no number is too large
    index: dict[str, str] = {}
    for i in range(SHARDS):
        own, file = names[i * per : (i + 1) * per], f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        header, at = {}, 0
        for tensor, dims, kind in own:
            size = math.prod(dims) * (2 if kind == "BF16" else 1)
            header[tensor] = {"dtype": kind, "shape": dims, "data_offsets": [at, at + size]}
            index[tensor], at = file, at + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor, entry in header.items():
                left = entry["data_offsets"][1] - entry["data_offsets"][0]
                while left:
                    left -= out.write((scales if tensor.endswith("_scales") else data)[: min(left, len(data))])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"} | shape
    (folder / "config.json").write_text(json.dumps(config))


def ours(source: str, quantize: str, expand: bool) -> float:
    """Seconds until an engine is up, once its kernels are in Triton's cache. With random numbers made on the device in place of a folder: all but the weights."""
    import torch

    from quire.backends.torch import feed, weights
    from quire.config import EngineConfig, Environment
    from quire.engine.construction.build import build_engine

    torch.zeros(1, device="cuda")
    if expand:
        feed.packed_rows = weights.packed_rows = lambda layout: ()
    config = EngineConfig(
        path=source,
        load_format="dummy" if source.startswith("shape:") else "auto",
        quantize=quantize,
        context=1024,
        max_seqs=2,
        max_batch_tokens=64,
        kv_memory=1 << 28,
    )
    began = time.perf_counter()
    engine, _ = build_engine(config, Environment(home=Path("/nowhere")))
    engine.settle()
    return time.perf_counter() - began


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
    parser.add_argument("--expand", action="store_true", help="expand packed blocks on the host, as before")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        source = str(args.folder) if args.side == "folder" else f"shape:{args.shape}"
        seconds = theirs(args.folder) if args.side == "safetensors" else ours(source, args.quantize, args.expand)
        print(json.dumps({"seconds": seconds, **memory()}))
        return
    if not (args.folder / "config.json").exists():
        print(f"writing {args.folder} ...", flush=True)
        make(args.folder, args.shape)
    size = sum(path.stat().st_size for path in args.folder.glob("*.safetensors"))
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for i in range(args.rounds):
        for side in SIDES if i % 2 else SIDES[::-1]:
            command = [sys.executable, "-m", "benchmarks.gpu_load", "--side", side, "--folder", str(args.folder)]
            command += ["--shape", args.shape, "--quantize", args.quantize, *(["--expand"] if args.expand else [])]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            rounds[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"round {i + 1}, {side}: {rounds[side][-1]}", flush=True)
    mid = {side: statistics.median(r["seconds"] for r in rounds[side]) for side in rounds}
    weights = mid["folder"] - mid["made"]
    print(
        f"{size / 1e9:.1f} GB: an engine in {mid['folder']:.2f} s, without the weights {mid['made']:.2f} s: "
        f"{weights:.2f} s for them ({size / 1e9 / weights:.1f} GB/s); safetensors alone {mid['safetensors']:.2f} s"
    )
    print(save(f"gpu-load-{args.shape}", {"bytes": size, "quantize": args.quantize, "rounds": rounds}))


if __name__ == "__main__":
    main()
