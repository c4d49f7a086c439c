"""What the host does for a step beside the device: planning, launching, reading, committing, and handing the news on.

    python -m benchmarks.host [--sequences 1 64 256 1024] [--kinds greedy drawn] [--runners device host] [--rounds 3]

The engine is the real one (scheduler, prefix tree, runner, depth 1 as on a GPU); the device computes nothing and answers at
once, so that every microsecond is the host's. All sequences decode, from --prompt tokens of context on for --steps steps;
pages are taken and published as in service. What a real device adds to a launch (copies, a graph, sampling kernels) is not
in here: `python -m benchmarks.gpu` times it all. Medians over the steps of all rounds; the parts beside a step are of its events.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from benchmarks.host_times import STEP, HostTimes
from benchmarks.record import machine, median, save
from quire.backends.batch import Batch
from quire.backends.ops import KV
from quire.cache.pages import Pool
from quire.cache.prefix_tree import PrefixTree
from quire.engine.constraints.enforce import ConstraintMasks
from quire.engine.engine import Engine
from quire.engine.limits import standard
from quire.engine.scheduler import Scheduler
from quire.engine.transport import wire
from quire.engine.transport.pending import Pending
from quire.engine.types import Event, Request
from quire.layouts import Floats
from quire.runner.params import SamplingParams

VOCAB = 512
PAGE = 16
BUDGET = 8192
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.8, top_p=0.95),
}


# ---- a device that computes nothing


def null_device(kv: KV, sequences: int, context: int) -> Any:
    """A device runner whose graphs do nothing, and whose sampler takes the first token."""
    import torch

    from quire.backends.torch.sampler import DeviceSampler, SamplingMetadata
    from quire.runner.device.runner import DeviceRunner

    tokens = torch.zeros(max(sequences, BUDGET), dtype=torch.int64)

    class Sampler:
        def greedy(self, logits: torch.Tensor) -> torch.Tensor:
            return tokens[: logits.shape[0]]

        def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
            return tokens[: logits.shape[0] if metadata.rows is None else metadata.rows.shape[0]]

        def logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
            return torch.zeros(logits.shape[0], 2 + 2 * top, dtype=torch.float64)

        def warm_up(self, logits: torch.Tensor) -> None:
            pass

    class Program:
        device = torch.device("cpu")
        shares, graphs, adapts, sparse = True, False, False, False
        sampler: DeviceSampler = Sampler()
        _logits = torch.zeros(max(sequences, BUDGET), VOCAB)

        def __init__(self) -> None:
            self.kv = kv

        def hidden_buffers(self, most: int) -> None:
            """It keeps no rows."""

        def launch(self, batch: Any) -> torch.Tensor:
            return self._logits[: batch.logit_rows.shape[0]]

        def compile_only(self) -> AbstractContextManager[None]:
            return nullcontext()

    class Graph:
        def replay(self) -> None:
            pass

    class Graphs(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return Graph()

    runner: Any = DeviceRunner(
        Program(), kv=kv, vocab_size=VOCAB, max_seqs=sequences, max_tokens=BUDGET, max_context=context,
        max_rows=max(sequences, 512), padded=True,
    )  # fmt: skip
    runner._decode.ladder.graphs = runner._prefill.ladder.graphs = Graphs()
    runner._decode.ladder.tokens.zero_()  # where a graph would leave them
    return runner


def null_host(kv: KV, sequences: int, context: int) -> Any:
    """A runner on the host whose program gives the same logits to everybody."""
    from quire.runner.runner import Runner

    class Program:
        _logits = np.zeros((max(sequences, BUDGET), VOCAB), np.float32)

        def run(self, batch: Batch, inputs: Mapping[str, Floats] = {}) -> Floats:
            return self._logits[: batch.logit_rows.size]

    return Runner(
        Program(), kv=kv, vocab_size=VOCAB, max_seqs=sequences, max_tokens=BUDGET, max_context=context,
        max_rows=max(sequences, 512),
    )  # fmt: skip


RUNNERS = {"device": null_device, "host": null_host}


def engine_of(kind: str, sequences: int, context: int, depth: int) -> Engine:
    """An engine as `build_engine` joins it, over one that computes nothing."""
    pages = sequences * (-(-context // PAGE) + 1)
    kv = KV(layers=1, pages=pages, page_size=PAGE, kv_heads=1, head_dim=16)
    masks = ConstraintMasks(VOCAB)
    scheduler = Scheduler(
        PrefixTree(Pool(pages), PAGE),
        slots=sequences,
        budget=BUDGET,
        context=context,
        draw=lambda: 1,
        limits=(*standard(max(sequences, 512), PAGE), masks.limit),
    )
    return Engine(scheduler, RUNNERS[kind](kv, sequences, context), depth, masks=masks)


# ---- measuring


def steps(
    args: argparse.Namespace, runner: str, kind: str, sequences: int
) -> tuple[dict[str, list[float]], list[Event]]:
    """Microseconds of each part of every step in which all sequences decode; and the events of one such step."""
    import msgspec

    context = args.prompt + args.steps + 16
    engine = engine_of(runner, sequences, context, args.depth)
    engine.settle()
    times = HostTimes(engine)
    draw = random.Random(0)
    sampling = msgspec.structs.replace(KINDS[kind], max_tokens=args.steps + 8, ignore_eos=True)
    for i in range(sequences):
        tokens = [draw.randrange(VOCAB) for _ in range(args.prompt)]
        engine.add(Request(id=f"request-{i}", tokens=tokens, sampling=sampling, eos_ids=(2,)))
    found: dict[str, list[float]] = {name: [] for name in (*STEP, "rest of the step", "stats")}
    news: list[Event] = []
    before: Any = None
    while engine.busy:
        times.clear()
        start = time.perf_counter()
        events = engine.step()
        took = time.perf_counter() - start
        if any(event.error for event in events):
            raise RuntimeError(next(event.error for event in events if event.error))
        start = time.perf_counter()
        told = engine.stats()
        asked, before = told != before, told
        stats = time.perf_counter() - start
        full = asked and len(events) == sequences and not any(e.finish for e in events)
        if full and times.seconds["plan"] and times.seconds["launch"]:
            parts = {name: sum(times.seconds[name]) for name in STEP}
            parts |= {"rest of the step": took - sum(parts.values()), "stats": stats}
            for name, seconds in parts.items():
                found[name].append(1e6 * seconds)
            news = events
    engine.close()
    return found, news


def beside(news: list[Event], rounds: int = 50) -> dict[str, list[float]]:
    """Microseconds to hand a step's events on: to another process and back, and to streams that wait for them."""
    found: dict[str, list[float]] = {"encode": [], "decode": []}
    for _ in range(rounds):
        start = time.perf_counter()
        data = wire.encode(wire.Events(events=news))
        middle = time.perf_counter()
        wire.decode_from_engine(data)
        end = time.perf_counter()
        found["encode"].append(1e6 * (middle - start))
        found["decode"].append(1e6 * (end - middle))
    found["streams"] = asyncio.run(_streams(news, rounds))
    return found


async def _streams(news: list[Event], rounds: int) -> list[float]:
    """A reader for each request: from the delivery until all of them have their event."""
    pending, read = Pending(len(news)), 0

    async def reader(request: Request) -> None:
        nonlocal read
        async for _ in pending.events(request, lambda _: None, lambda _: None):
            read += 1

    tasks = [asyncio.create_task(reader(Request(id=event.id, tokens=[1]))) for event in news]
    await asyncio.sleep(0)
    found = []
    for i in range(rounds):
        start = time.perf_counter()
        pending.deliver(news)
        while read < (i + 1) * len(news):
            await asyncio.sleep(0)
        found.append(1e6 * (time.perf_counter() - start))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def texts(news: list[Event], rounds: int = 20) -> list[float]:
    """Microseconds to make text of a step's events, with the default model's tokenizer; nothing where it is not in the store."""
    from quire.chat.choice import ChoiceStream
    from quire.chat.loading import tokenizer_of
    from quire.config import DEFAULT_MODEL
    from quire.observe.errors import QuireError
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.store.store import Store

    try:
        with open_checkpoint(str(Store().resolve(DEFAULT_MODEL))) as checkpoint:
            tokenizer = tokenizer_of(checkpoint)
    except QuireError:
        return []
    choices = [ChoiceStream(0, tokenizer, SamplingParams()) for _ in news]
    found = []
    for i in range(rounds):
        words = [Event(id=event.id, tokens=[1000 + (i * 131 + j) % 20000]) for j, event in enumerate(news)]
        start = time.perf_counter()
        for choice, event in zip(choices, words, strict=True):
            choice.chunks(event)
        found.append(1e6 * (time.perf_counter() - start))
    return found


def p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(len(ordered) * 0.99)]


def line(row: Mapping[str, Any]) -> str:
    """A measured row for the terminal: microseconds, median and 99th percentile."""
    names = [name for name in STEP if any(row["microseconds"][name])]
    parts = [f"{name} {median(row['microseconds'][name]):.0f}" for name in names]
    sums = [sum(parts) for parts in zip(*(row["microseconds"][name] for name in names), strict=True)]
    also = [f"{name} {median(values):.0f}" for name, values in row["beside"].items() if values]
    return (
        f"{row['sequences']:5} {row['runner']:6} {row['kind']:6}  {'  '.join(parts)}  = {median(sums):.0f} "
        f"(p99 {p99(sums):.0f})   beside: {'  '.join(also)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--runners", nargs="+", choices=list(RUNNERS), default=["device"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=188)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true")
    args = parser.parse_args()
    about = machine()
    print(f"{about['cpu']}, Python {about['python']}, {about['commit']}: microseconds of a step, medians")
    rows: list[dict[str, Any]] = []
    for runner in args.runners:
        for kind in args.kinds if runner == "device" else ["greedy"]:
            for sequences in args.sequences:
                spent: dict[str, list[float]] = {}
                news: list[Event] = []
                for _ in range(args.rounds):
                    found, news = steps(args, runner, kind, sequences)
                    for name, values in found.items():
                        spent.setdefault(name, []).extend(values)
                also = {name: spent.pop(name) for name in ("rest of the step", "stats")}
                also |= beside(news) | {"text": texts(news)}
                row = {"sequences": sequences, "runner": runner, "kind": kind, "microseconds": spent, "beside": also}
                rows.append(row)
                print(line(row), flush=True)
    if not args.no_record:
        for row in rows:
            for part in ("microseconds", "beside"):
                row[part] = {n: {"median": median(v), "p99": p99(v)} for n, v in row[part].items() if v}
        load = os.getloadavg()[0]  # what others kept busy: with more of it than there are cores, times are theirs too
        settings = {name: getattr(args, name) for name in ("prompt", "steps", "depth", "rounds")}
        print(save("host", {"settings": settings, "load": load, "rows": rows}))


if __name__ == "__main__":
    main()
