"""What a step costs before and after the device: plan() + commit() for many decoding sequences, in microseconds.

    python -m benchmarks.scheduler [--sequences 256] [--steps 400] [--depth 0]

No model: tokens come from a counter. Sequences cross page boundaries and publish as in service.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections import deque

from quire.cache.pool import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.scheduler import Scheduler
from quire.engine.types import Request
from quire.runner.params import SamplingParams
from quire.runner.plan import Plan, Result, Row


def measure(sequences: int, steps: int, depth: int, prompt: int = 64) -> tuple[list[float], list[float]]:
    """Seconds of plan() and of commit() for each step in which every sequence decodes."""
    pages = sequences * (-(-(prompt + steps + depth + 2) // 16) + 1)
    scheduler = Scheduler(
        PrefixTree(Pool(pages), 16), slots=sequences, budget=max(512, 2 * sequences), context=1 << 20, draw=lambda: 1
    )
    sampling = SamplingParams(max_tokens=steps + depth + 2, ignore_eos=True)
    for i in range(sequences):
        tokens = [(i * 31 + j) % 50000 for j in range(prompt)]
        scheduler.add(Request(id=str(i), tokens=tokens, sampling=sampling, eos_ids=(2,)))
    flight: deque[tuple[Plan, Result]] = deque()
    plans: list[float] = []
    commits: list[float] = []
    serial = 0
    while scheduler.has_work:
        before = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter() - before
        steady = plan is not None and len(plan.work) == sequences and all(w.n == 1 for w in plan.work)
        if plan is not None:
            rows = []
            for work in plan.work:
                serial += 1
                rows.append(Row(work.n, [3 + serial % 50000] if work.sample else []))
            flight.append((plan, Result(rows)))
        if flight and (plan is None or len(flight) > depth):
            oldest, result = flight.popleft()
            before = time.perf_counter()
            scheduler.commit(oldest, result)
            committed = time.perf_counter() - before
            if steady:
                plans.append(planned)
                commits.append(committed)
    return plans, commits


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--depth", type=int, default=0)
    args = parser.parse_args()
    plans, commits = measure(args.sequences, args.steps, args.depth)
    both = sorted(p + c for p, c in zip(plans, commits, strict=True))
    print(f"{args.sequences} decoding sequences, {len(both)} steps, depth {args.depth}, {platform.machine()}")
    for name, values in (("plan", sorted(plans)), ("commit", sorted(commits)), ("both", both)):
        median, p99 = statistics.median(values), values[int(len(values) * 0.99)]
        print(f"  {name:7s} median {median * 1e6:7.0f} us   p99 {p99 * 1e6:7.0f} us")


if __name__ == "__main__":
    main()
