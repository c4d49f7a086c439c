"""Where the time of a step goes on a GPU: kernels by name and the host's share, for kinds of steps of a whole engine.

    python -m benchmarks.gpu_profile [--shape llama-3.1-8b] [--kinds prompt mixed decode shared one]

    prompt   fresh prompts of 512 tokens, as many as a step takes
    mixed    a step of prompts beside 240 sequences that decode
    decode   256 sequences of 512 tokens and more
    shared   256 sequences that share 2,048 tokens and have 64 of their own
    one      a single sequence

Steps run one at a time (depth 0), so host and device add up; with --depth 1 they overlap as in an engine at work.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from typing import Any

from benchmarks.gpu import Bench, add_engine_options

KINDS = ("prompt", "mixed", "decode", "shared", "one")
STEPS = 6


def measure(b: Bench, name: str, top: int) -> None:
    """A few steps under the profiler, after as many without it."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    walls: list[float] = []
    tokens: list[int] = []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            before = time.perf_counter()
            work = b.engine.step()
            if not b.args.depth:
                torch.cuda.synchronize()
            walls.append(time.perf_counter() - before)
            tokens.append(len(work))
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    spans: list[tuple[float, float, str]] = []
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.device_time
            calls[event.name] += 1
            spans.append((event.time_range.start, event.time_range.end, event.name))
    busy = sum(spent.values())
    print(
        f"\n{name}: {1e3 * sum(walls) / STEPS:.2f} ms a step, device busy {busy / 1e3 / STEPS:.2f} ms; events {tokens}"
    )
    for kernel, us in spent.most_common(top):
        print(f"  {us / 1e3 / STEPS:8.3f} ms {calls[kernel] / STEPS:7.1f}x  {kernel[:100]}")
    for (before, after), us in sorted(idle(spans).items(), key=lambda gap: -gap[1])[:4]:
        print(f"  {us / 1e3 / STEPS:8.3f} ms idle between {before[:40]} and {after[:40]}")


def idle(spans: list[tuple[float, float, str]]) -> dict[tuple[str, str], float]:
    """Time in which no kernel and no copy ran, by what came before and after."""
    gaps: dict[tuple[str, str], float] = defaultdict(float)
    spans = sorted(spans)
    end, last = spans[0][1], spans[0][2]
    for start, until, name in spans[1:]:
        if start > end:
            gaps[last, name] += start - end
        if until > end:
            end, last = until, name
    return gaps


def prompt(b: Bench) -> None:
    for _ in range(2 * STEPS * (b.args.max_tokens // 512)):
        b.ask(b.prompt(512), 1)
    for _ in range(2):
        b.engine.step()


def decode(b: Bench, n: int = 256) -> None:
    for _ in range(n):
        b.ask(b.prompt(512), 64)
    while b.engine.stats().waiting:
        b.engine.step()
    for _ in range(4):
        b.engine.step()


def mixed(b: Bench) -> None:
    decode(b, 240)
    for _ in range(2 * STEPS * (b.args.max_tokens // 512)):
        b.ask(b.prompt(512), 1)
    b.engine.step()


def shared(b: Bench) -> None:
    prefix = b.prompt(2048)
    b.ask([*prefix, 1], 1)
    b.finish()
    for _ in range(256):
        b.ask(prefix + b.prompt(64), 64)
    while b.engine.stats().waiting:
        b.engine.step()
    for _ in range(4):
        b.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS)
    parser.add_argument("--top", type=int, default=14)
    args = parser.parse_args()
    args.depth = args.depth or 0
    b = Bench(args, (1.0, 1.0))
    prepare: dict[str, Any] = {"prompt": prompt, "mixed": mixed, "decode": decode, "shared": shared}
    prepare["one"] = lambda b: decode(b, 1)
    for name in args.kinds:
        prepare[name](b)
        measure(b, name, args.top)
        b.finish()


if __name__ == "__main__":
    main()
