"""The engine on a GPU, end to end: scheduler, cache and sampler on, random weights of a known shape, token-id prompts.

    python -m benchmarks.gpu [--shape llama-3.1-8b] [--dtype bfloat16] [--quantize fp8] [--kv-dtype fp8]
                             [--rows one ttft 64 256 many shared]
    python -m benchmarks.gpu --rows 50 100 long:32768    any number of sequences, and a prompt of that many tokens
    python -m benchmarks.gpu --also-deterministic    what the same bits in any batch cost, beside the usual figures

Prints one table and writes a JSON record. Greedy, no end-of-sequence token. Each figure is told beside its floor: bytes
that must be read over the copy rate measured in the same process, or operations over a measured matrix product.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu_floors
from benchmarks.host_times import HostTimes
from benchmarks.record import machine, median, save

ROWS = ("one", "ttft", "64", "256", "many", "shared")


@dataclass
class Line:
    """One row of the table."""

    name: str
    value: str
    floor: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    costs: list[float] = field(default_factory=list)  # times, of whatever unit: what a price is the ratio of


class Bench:
    """An engine and what is asked of it."""

    def __init__(self, args: argparse.Namespace, rates: tuple[float, float]):
        from quire.config import EngineConfig, Environment
        from quire.engine.construction.build import build_engine

        self.args = args
        if args.skinny is not None:
            from quire.backends.cuda.ops import CudaKernels

            CudaKernels.skinny_rows = args.skinny
        if args.expanded:
            from quire.backends.cuda.backend import CudaBackend

            CudaBackend.packs = False
        self._random = random.Random(0)
        self._names = 0
        config = EngineConfig(
            path=f"shape:{args.shape}",
            load_format="dummy",
            backend=args.backend,
            device=args.device,
            dtype=args.dtype,
            quantize=args.quantize,
            kv_dtype=args.kv_dtype,
            context=args.context,
            max_seqs=args.max_seqs,
            max_batch_tokens=args.max_tokens,
            depth=args.depth,
            deterministic=args.deterministic,
        )
        self.engine, self.info = build_engine(config, Environment(home=Path("/nowhere")))
        self.engine.settle()
        self.host = HostTimes(self.engine)
        self.copy_rate, self.matmul_rate = rates

    def prompt(self, n: int) -> list[int]:
        return [self._random.randrange(self.info.vocab_size) for _ in range(n)]

    def ask(self, tokens: list[int], out: int) -> str:
        from quire.engine.types import Request
        from quire.runner.params import SamplingParams

        self._names += 1
        name = str(self._names)
        sampling = SamplingParams(temperature=0.0, max_tokens=out)
        self.engine.add(Request(id=name, tokens=tokens, sampling=sampling))
        return name

    def run(self) -> Iterator[tuple[float, int, int]]:
        """Until nothing is left: (when, tokens that came, requests that ended) of every step."""
        while self.engine.busy:
            events = self.engine.step()
            for event in events:
                if event.error:
                    raise RuntimeError(event.error)
            came, ended = sum(len(e.tokens) for e in events), sum(e.finish is not None for e in events)
            yield time.perf_counter(), came, ended

    def finish(self) -> float:
        """Seconds until nothing is left."""
        start = time.perf_counter()
        for _ in self.run():
            pass
        return time.perf_counter() - start


def start(b: Bench, began: float) -> Line:
    b.ask(b.prompt(64), 1)
    b.finish()
    total = time.perf_counter() - began
    return Line(
        "engine start to first token", f"{total:.1f} s", "", {"seconds": total, "load": b.info.load_seconds}, [total]
    )


def one(b: Bench) -> Line:
    """One stream, 512 in, 256 out."""
    rates = []
    for _ in range(b.args.repeat):
        b.ask(b.prompt(512), 256)
        times = [when for when, came, _ in b.run() if came]
        rates.append((len(times) - 1) / (times[-1] - times[0]))
    rate = median(rates)
    floor = 1e3 * (read_bytes(b) + kv_bytes(b, 640)) / b.copy_rate
    return Line(
        "one stream, 512 in / 256 out, decode",
        f"{rate:.1f} tok/s ({1e3 / rate:.2f} ms)",
        f"{floor:.2f} ms: {floor * rate / 10:.0f}%",
        {"tokens_per_second": rates, "host_ms": b.host.milliseconds(200)},
        [1 / rate],
    )


def ttft(b: Bench) -> Line:
    lengths = [n for n in (512, 2048, 8192) if n < b.info.context]
    all_times = {}
    for n in lengths:
        times = []
        for _ in range(b.args.repeat + 1):
            b.ask(b.prompt(n), 1)
            times.append(1e3 * b.finish())
        all_times[n] = times[1:]
    value = " / ".join(f"{median(all_times[n]):.1f}" for n in lengths)
    floors = " / ".join(f"{1e3 * prompt_ops(b, n) / b.matmul_rate:.1f}" for n in lengths)
    name = "time to first token, " + " / ".join(map(str, lengths)) + " prompt"
    costs = [median(all_times[n]) for n in lengths]
    return Line(name, f"{value} ms", f"{floors} ms", {"milliseconds": all_times}, costs)


def decode(b: Bench, n: int) -> Line:
    """n sequences from 512 to 700 tokens: the steps in which all of them decode."""
    for _ in range(n):
        b.ask(b.prompt(512), 188)
    b.host.clear()
    steps = [(when, came, ended) for when, came, ended in b.run()]
    full = [i for i, (_, came, ended) in enumerate(steps) if came == n and not ended]
    first, last = full[8], full[-1]
    step = (steps[last][0] - steps[first][0]) / (last - first)
    floor = (read_bytes(b, n) + n * kv_bytes(b, 606)) / b.copy_rate
    return Line(
        f"{n} sequences, decode step (512 to 700 context)",
        f"{1e3 * step:.2f} ms ({n / step:,.0f} tok/s)",
        f"{1e3 * floor:.2f} ms: {100 * floor / step:.0f}%",
        {"milliseconds": 1e3 * step, "steps": last - first, "host_ms": b.host.milliseconds(last - first)},
        [step],
    )


def long(b: Bench, n: int) -> Line:
    """One prompt of n tokens, then 64 more: the time to the first, and of each step after it."""
    first, steps = [], []
    for _ in range(b.args.repeat):
        b.ask(b.prompt(n), 64)
        began = time.perf_counter()
        times = [when for when, came, _ in b.run() if came]
        first.append(times[0] - began)
        steps.append((times[-1] - times[0]) / (len(times) - 1))
    floors = prompt_ops(b, n) / b.matmul_rate, (read_bytes(b) + kv_bytes(b, n + 32)) / b.copy_rate
    got = median(first), median(steps)
    return Line(
        f"a prompt of {n:,}: first token, then a decode step",
        f"{got[0]:.2f} s, {1e3 * got[1]:.2f} ms",
        f"{floors[0]:.2f} s: {100 * floors[0] / got[0]:.0f}%, {1e3 * floors[1]:.2f} ms: {100 * floors[1] / got[1]:.0f}%",
        {"first_seconds": first, "step_seconds": steps},
        list(got),
    )


def many(b: Bench) -> Line:
    count = b.args.requests
    for _ in range(count):
        b.ask(b.prompt(512), 256)
    b.host.clear()
    seconds = b.finish()
    rate = count * 256 / seconds
    return Line(
        f"{count:,} requests, 512 in / 256 out",
        f"{rate:,.0f} out tok/s ({3 * rate:,.0f} total)",
        "",
        {"out_tokens_per_second": rate, "seconds": seconds, "host_seconds": b.host.totals()},
        [seconds],
    )


def shared(b: Bench) -> Line:
    prefix = b.prompt(2048)
    for _ in range(256):
        b.ask(prefix + b.prompt(64), 128)
    b.host.clear()
    seconds = b.finish()
    rate = 256 * 128 / seconds
    return Line(
        "256 requests sharing 2,048 + 64 own, 128 out",
        f"{rate:,.0f} out tok/s",
        "",
        {"out_tokens_per_second": rate, "seconds": seconds, "host_seconds": b.host.totals()},
        [seconds],
    )


def read_bytes(b: Bench, rows: int = 1) -> float:
    """Bytes of weights that a decode step of so many rows reads, as they lie on the device."""
    from quire.models.shapes import SHAPES

    size = 4 if b.args.dtype == "float32" else 2
    return gpu_floors.weight_bytes(SHAPES[b.args.shape], b.info.weight_bytes, rows, b.args.quantize, size)


def kv_bytes(b: Bench, tokens: int) -> float:
    from quire.models.shapes import SHAPES

    return b.info.kv_bytes / (b.info.pages * b.info.page_size) * gpu_floors.seen(SHAPES[b.args.shape], tokens)


def prompt_ops(b: Bench, tokens: int) -> float:
    """Operations of the products and of causal attention over a prompt; the head runs over one row."""
    from quire.models.shapes import SHAPES

    return gpu_floors.prompt_operations(SHAPES[b.args.shape], tokens)


def ceilings(device: str, quantize: str) -> tuple[float, float]:
    """Copy and matrix rates of this device, measured now, while its memory is still free; of fp8 products for fp8."""
    if device == "cpu":
        return 1e10, 1e11  # guesses: floors mean nothing there
    import torch

    from benchmarks.gpu_timing import copy_rate, matmul_rate

    kind = torch.float8_e4m3fn if quantize.startswith("fp8") else torch.bfloat16
    rates = [(copy_rate(), matmul_rate(kind)) for _ in range(2)]  # the first warms the clocks up
    return rates[-1]


def compilations() -> list[str]:
    """Names of the kernels that Triton compiles, or takes from its cache, from now on. There should be none."""
    from triton import knobs

    names: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **about: names.append(about["fn"].name)
    return names


def told(line: Line) -> str:
    """The host's share, where it was measured."""
    parts = [f"host {key.removeprefix('host_')} {line.numbers[key]}" for key in line.numbers if key.startswith("host_")]
    return ", ".join(parts)


def row(text: str) -> str:
    """The name of a row, checked."""
    if text in ROWS or text.removeprefix("long:").isdigit():
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is not {', '.join(ROWS)}, a number of sequences, or long:TOKENS")


def measure(name: str, b: Bench) -> Line:
    """One row of the table."""
    named: dict[str, Callable[[Bench], Line]] = {"one": one, "ttft": ttft, "many": many, "shared": shared}
    if name in named:
        return named[name](b)
    return long(b, int(name.removeprefix("long:"))) if name.startswith("long:") else decode(b, int(name))


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What is measured: also for gpu_profile."""
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none", help="fp8, fp8-block, int8 or int4")
    parser.add_argument("--kv-dtype", default="auto", help="fp8 or int8")
    parser.add_argument("--context", type=int, default=9216)
    parser.add_argument("--max-seqs", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--skinny", type=int, default=None, help="rows up to which products are skinny kernels")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in any batch")
    parser.add_argument(
        "--expanded", action="store_true", help="four-bit weights in the ways of before: MXFP4 as plain numbers"
    )


def deterministic_record() -> list[dict[str, Any]]:
    """The rows of this same command in that mode, from a process of its own: a device's memory holds one engine."""
    asked = [word for word in sys.argv[1:] if not word.startswith("--also")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.json"
        own = ["--deterministic", "--no-save", "--record", str(path)]
        subprocess.run([sys.executable, "-m", "benchmarks.gpu", *asked, *own], check=True)
        return json.loads(path.read_text())["rows"]


def print_table(lines: list[Line], other: list[dict[str, Any]] | None) -> None:
    if other is None:
        print("\n| | measured | floor |\n|---|---|---|")
        for line in lines:
            print(f"| {line.name} | {line.value} | {line.floor} |")
        return
    known = {row["name"]: row for row in other}
    print("\n| | measured | floor | the same bits in any batch | price |\n|---|---|---|---|---|")
    for line in lines:
        mate = known[line.name]
        price = " / ".join(f"{b / a:.2f}x" for a, b in zip(line.costs, mate["costs"], strict=True))
        print(f"| {line.name} | {line.value} | {line.floor} | {mate['value']} | {price} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    add_engine_options(parser)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--rows", nargs="*", default=list(ROWS), type=row, metavar="ROW", help=f"{', '.join(ROWS)}, a number, or long:N"
    )
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--also-deterministic", action="store_true", help="measure that mode too, and tell its price")
    parser.add_argument("--record", type=Path, help="write the record here as well")
    args = parser.parse_args()
    other = deterministic_record() if args.also_deterministic else None
    rates = ceilings(args.device, args.quantize)
    began = time.perf_counter()
    bench = Bench(args, rates)
    lines = [start(bench, began)]
    for line in bench.info.decisions:
        print(line)
    print(
        f"copy {bench.copy_rate / 1e12:.2f} TB/s, {'fp8' if args.quantize.startswith('fp8') else 'bf16'} product {bench.matmul_rate / 1e12:.0f} TFLOP/s\n"
    )
    compiled = compilations()
    for name in args.rows:
        lines.append(measure(name, bench))
        if compiled:
            print(f"compiled while it ran: {len(compiled)} kernels: {', '.join(sorted(set(compiled)))}")
            lines[-1].numbers["compiled"] = len(compiled)
            compiled.clear()
        print(f"{lines[-1].name}: {lines[-1].value}   {told(lines[-1])}", flush=True)
    print_table(lines, other)
    body = {
        "shape": args.shape,
        "deterministic": args.deterministic,
        "backend": bench.info.backend,
        "decisions": bench.info.decisions,
        "copy_rate": bench.copy_rate,
        "matmul_rate": bench.matmul_rate,
        "rows": [
            {"name": line.name, "value": line.value, "floor": line.floor, "costs": line.costs, **line.numbers}
            for line in lines
        ],
        **({} if other is None else {"deterministic_rows": other}),
    }
    if args.record:
        args.record.write_text(json.dumps({"machine": machine(), **body}, indent=1) + "\n")
    if not args.no_save:
        kinds = (args.quantize, "none"), (args.kv_dtype, "auto")
        how = [f"{'kv-' if plain == 'auto' else ''}{kind}" for kind, plain in kinds if kind != plain]
        how += ["deterministic"] if args.deterministic else []
        how += ["expanded"] if args.expanded else []
        print(save("-".join(["gpu", args.shape, *how]), body))


if __name__ == "__main__":
    main()
