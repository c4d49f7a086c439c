"""One stream through the whole engine: prefill and decode tokens per second, and peak memory.

`python -m benchmarks.one_stream --child …` measures once in a fresh process and prints JSON. Without `--child` it
measures ours and `llama-bench` in turn, several rounds, and prints both with the ratio. Decode is greedy, from an empty
context, through scheduler, runner and sampler; llama-bench's figure has no sampling in it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers import find, missing
from benchmarks.record import ROOT, median, save, spread


def measure(path: str, threads: int, prefill: int, decode: int, depth: int) -> dict[str, float]:
    """One measurement in this process."""
    from quire.config import EngineConfig, Environment
    from quire.engine.build import build_engine
    from quire.engine.types import Request
    from quire.runner.params import SamplingParams

    started = time.perf_counter()
    config = EngineConfig(path=path, threads=threads, context=4096, max_seqs=1)
    engine, info = build_engine(config, Environment.read())
    loaded = time.perf_counter() - started

    def run(name: str, tokens: list[int], output: int) -> tuple[float, float]:
        """(seconds to the first token, seconds for the rest)"""
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.add(Request(id=name, tokens=tokens, sampling=sampling))
        begun, first = time.perf_counter(), 0.0
        while engine.busy:
            for event in engine.step():
                if event.tokens and not first:
                    first = time.perf_counter()
        return first - begun, time.perf_counter() - first

    vocabulary = info.vocab_size
    run("warm", [(i * 7919) % vocabulary for i in range(64)], 8)
    to_first, _ = run("prefill", [(i * 104729 + 1) % vocabulary for i in range(prefill)], 1)
    start = [(i * 15485863 + 3) % vocabulary for i in range(max(1, depth))]
    _, rest = run("decode", start, decode + 1)
    engine.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "prefill": prefill / to_first,
        "decode": decode / rest,
        "load_seconds": loaded,
        "peak_bytes": peak,
        "file_bytes": os.path.getsize(path),
        "kv_bytes": info.kv_bytes,
    }


def llama_bench(binary: str, path: str, threads: int, prefill: int, decode: int, depth: int) -> dict[str, float]:
    command = [binary, "-m", path, "-t", str(threads), "-p", str(prefill), "-n", str(decode), "-r", "1", "-o", "json"]
    if depth:
        command += ["-d", str(depth)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {("prefill" if row["n_prompt"] else "decode"): row["avg_ts"] for row in json.loads(done.stdout)}
    return {"prefill": found["prefill"], "decode": found["decode"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a name or a path; the default model when absent")
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--decode", type=int, default=128)
    parser.add_argument("--depth", type=int, default=0, help="context already there when decoding starts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a record to benchmarks/results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()

    from quire.config import DEFAULT_MODEL, available_cores

    threads = args.threads or available_cores()
    if args.child:
        print(json.dumps(measure(args.model, threads, args.prefill, args.decode, args.depth)))
        return
    from quire.weights.store import Store

    path = str(Store().resolve(args.model or DEFAULT_MODEL))
    peer = find("llama-bench")
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    sizes = ["--prefill", str(args.prefill), "--decode", str(args.decode), "--depth", str(args.depth)]
    child = [sys.executable, "-m", "benchmarks.one_stream", "--child", "--model", path, "--threads", str(threads)]
    for round_number in range(args.rounds):
        print(f"\rround {round_number + 1} of {args.rounds} ...", end="", file=sys.stderr, flush=True)
        done = subprocess.run(child + sizes, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            sys.exit(done.stderr)
        ours.append(json.loads(done.stdout.splitlines()[-1]))
        if peer:
            theirs.append(llama_bench(peer, path, threads, args.prefill, args.decode, args.depth))
    print(file=sys.stderr)
    report(args, threads, ours, theirs)
    if args.save:
        settings = {"threads": threads, "prefill": args.prefill, "decode": args.decode, "depth": args.depth}
        print(
            "saved",
            save(
                f"one-stream-depth{args.depth}",
                {"model": Path(path).name, **settings, "quire": ours, "llama.cpp": theirs},
            ),
        )


def report(
    args: argparse.Namespace, threads: int, ours: list[dict[str, float]], theirs: list[dict[str, float]]
) -> None:
    print(f"{args.model or 'default model'}, {threads} threads, median of {len(ours)} (lowest to highest), tokens/s")
    rows = [("decode", f"decode at depth {args.depth}")]
    if not args.depth:  # llama-bench would start its prefill at that depth too
        rows.insert(0, ("prefill", f"prefill {args.prefill}"))
    for key, label in rows:
        line = f"  {label:20} quire {spread([o[key] for o in ours])}"
        if theirs:
            ratios = [o[key] / t[key] for o, t in zip(ours, theirs, strict=True)]
            line += f"   llama.cpp {spread([t[key] for t in theirs])}   ratio {spread(ratios, 2)}"
        print(line)
    peak, file, pool = (median([o[k] for o in ours]) for k in ("peak_bytes", "file_bytes", "kv_bytes"))
    print(
        f"  peak memory          {peak / 2**20:.0f} MiB; model file {file / 2**20:.0f} MiB, KV pool {pool / 2**20:.0f} MiB: "
        f"{peak / (file + pool):.2f}x of both together"
    )
    print(f"  load                 {spread([o['load_seconds'] for o in ours], 2)} s")
    if not theirs:
        print(f"  {missing('llama-bench')}")


if __name__ == "__main__":
    main()
