"""Many streams decoding together: total tokens per second, through the whole engine, beside `llama-batched-bench`.

Each stream has its own short prompt, so nothing is shared; all of them decode greedily at once. Ours and theirs take
turns, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.peers import find, missing
from benchmarks.record import ROOT, save, spread


def measure(path: str, threads: int, streams: int, prompt: int, decode: int) -> float:
    """Tokens per second over all streams, from the step where the last one has its first token."""
    from quire.config import EngineConfig, Environment
    from quire.engine.build import build_engine
    from quire.engine.types import Request
    from quire.runner.params import SamplingParams

    config = EngineConfig(path=path, threads=threads, context=prompt + decode + 1, max_seqs=streams)
    engine, info = build_engine(config, Environment.read())
    sampling = SamplingParams(temperature=0.0, max_tokens=decode, ignore_eos=True)
    for s in range(streams):
        tokens = [(i * 104729 + s * 7919 + 1) % info.vocab_size for i in range(prompt)]
        engine.add(Request(id=str(s), tokens=tokens, sampling=sampling))
    begun: set[str] = set()
    counted, started = 0, 0.0
    while engine.busy:
        events = engine.step()
        if len(begun) == streams:
            counted += sum(len(e.tokens) for e in events)
        else:
            begun |= {e.id for e in events if e.tokens}
            started = time.perf_counter()
    engine.close()
    return counted / (time.perf_counter() - started)


def llama(binary: str, path: str, threads: int, streams: int, prompt: int, decode: int) -> float:
    sizes = ["-npp", str(prompt), "-ntg", str(decode), "-npl", str(streams), "-c", str(streams * (prompt + decode + 8))]
    command = [binary, "-m", path, "-t", str(threads), *sizes, "--output-format", "jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return float(rows[-1]["speed_tg"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="a name or a path; the default model when absent")
    parser.add_argument("--threads", type=int, default=0, help="0: every core")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write a record to benchmarks/results")
    parser.add_argument("--child", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()

    from quire.config import DEFAULT_MODEL, available_cores

    threads = args.threads or available_cores()
    if args.child:
        print(measure(args.model, threads, args.child, args.prompt, args.decode))
        return
    from quire.weights.store import Store

    path = str(Store().resolve(args.model or DEFAULT_MODEL))
    peer = find("llama-batched-bench")
    print(
        f"{args.model or 'default model'}, {threads} threads, {args.decode} tokens each, median of {args.rounds}, tokens/s"
    )
    records = {}
    for streams in args.streams:
        ours: list[float] = []
        theirs: list[float] = []
        sizes = ["--prompt", str(args.prompt), "--decode", str(args.decode), "--threads", str(threads)]
        child = [sys.executable, "-m", "benchmarks.many_streams", "--child", str(streams), "--model", path, *sizes]
        for _ in range(args.rounds):
            done = subprocess.run(child, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                sys.exit(done.stderr)
            ours.append(float(done.stdout.splitlines()[-1]))
            if peer:
                theirs.append(llama(peer, path, threads, streams, args.prompt, args.decode))
        line = f"  {streams:3} streams   quire {spread(ours)}"
        if theirs:
            ratios = [o / t for o, t in zip(ours, theirs, strict=True)]
            line += f"   llama.cpp {spread(theirs)}   ratio {spread(ratios, 2)}"
        print(line, flush=True)
        records[str(streams)] = {"quire": ours, "llama.cpp": theirs}
    if not peer:
        print(f"  {missing('llama-batched-bench')}")
    if args.save:
        print("saved", save("many-streams", {"model": Path(path).name, "threads": threads, "streams": records}))


if __name__ == "__main__":
    main()
