"""Two checkouts beside each other: whether a change of the code costs speed, measured in turns on one machine.

    python -m benchmarks.checkouts OLD [NEW] [--rounds 5] [--model smollm2:135m] [--json FILE]

OLD and NEW are folders with a checkout whose extension is built (NEW: this one). Each round runs every figure in OLD, in NEW and in OLD
again, each in a fresh process: the second OLD over the first is what the machine alone does to a ratio. Figures: decode and prefill of one
stream, decode at a depth, eight streams, and the tokens per second that HTTP passes on from an engine that makes them at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LATENCY = {
    "decode": ("decode", ["--prompt-tokens", "16", "--output-tokens", "96"]),
    "decode, 1,024 deep": ("decode", ["--prompt-tokens", "16", "--output-tokens", "64", "--depth", "1024"]),
    "prefill of 512": ("prefill", ["--prompt-tokens", "512", "--output-tokens", "2"]),
    "8 streams": ("decode", ["--prompt-tokens", "32", "--output-tokens", "64", "--batch", "8"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=ROOT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2:135m")
    parser.add_argument("--json", type=Path, help="write every round's values there")
    args = parser.parse_args()
    values: dict[str, list[tuple[float, float, float]]] = {}
    for turn in range(args.rounds):
        for name in (*LATENCY, "HTTP"):
            three = [measure(name, tree.resolve(), args.model) for tree in (args.old, args.new, args.old)]
            values.setdefault(name, []).append((three[0], three[1], three[2]))
            print(f"round {turn + 1}: {name}: " + " / ".join(f"{v:,.1f}" for v in three), file=sys.stderr, flush=True)
    print("| tokens/s | old | new | new over old (lowest to highest) | old over old |")
    print("|---|---|---|---|---|")
    medians: list[float] = []
    for name, rounds in values.items():
        ratios = sorted(new / statistics.fmean((one, two)) for one, new, two in rounds)
        same = sorted(two / one for one, _, two in rounds)
        medians.append(statistics.median(ratios))
        old, new = (statistics.median(r[i] for r in rounds) for i in (0, 1))
        print(
            f"| {name} | {old:,.1f} | {new:,.1f} | {medians[-1]:.3f}x ({ratios[0]:.3f} to {ratios[-1]:.3f}) "
            f"| {statistics.median(same):.3f}x ({same[0]:.3f} to {same[-1]:.3f}) |"
        )
    print(f"geometric mean: {math.exp(statistics.fmean(map(math.log, medians))):.3f}x")
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))


def measure(name: str, tree: Path, model: str) -> float:
    """Tokens per second of one figure in a checkout."""
    if name == "HTTP":
        said = run(tree, ["-m", "benchmarks.http", "--only", "rate", "--seconds", "3"])
        return float(json.loads(said)["rate"]["tokens_per_second"])
    kind, options = LATENCY[name]
    record = run(tree, ["-m", "quire", "bench", "latency", model, "--rounds", "3", "--json", "-", *options])
    return float(json.loads(record)["results"][f"{kind}_tokens_per_second"]["p50"])


def run(tree: Path, words: list[str]) -> str:
    """What a command says that runs the code of that checkout."""
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environ, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{tree}: {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
