"""`make bench-cpu`: every figure that we claim on a CPU, beside llama.cpp on the same file and threads.

    python -m benchmarks.cpu                                      everything; takes hours
    python -m benchmarks.cpu --only decode prefill --formats q4_0 --shapes 1b --rounds 5
    python -m benchmarks.cpu --list                               what there is, and about how long each takes

Each figure is the median over the rounds (lowest to highest), each ratio of the same round. Sides take turns. A record
with every round's values goes to benchmarks/results, and is kept up to date while the run goes on: Ctrl-C loses nothing.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks import floors, peers
from benchmarks.figures import Group
from benchmarks.record import RESULTS, ROOT, Record
from benchmarks.sections import NAMES
from benchmarks.session import clock, run
from benchmarks.world import FORMATS, SHAPES, World


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="SECTION", help=", ".join(NAMES)
    )
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="FORMAT", help=", ".join(FORMATS)
    )
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    parser.add_argument(
        "--rounds", type=positive, help="of every section; without it, each has its own number (5 mostly)"
    )
    parser.add_argument("--threads", type=positive, help="default: every core")
    parser.add_argument("--models", type=Path, help="where the files are or are made; default: with the store's models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the record goes; default: benchmarks/results")
    parser.add_argument(
        "--plots",
        type=Path,
        default=ROOT / "benchmarks" / "notes" / "plots",
        help="where plots go; default: benchmarks/notes/plots",
    )
    parser.add_argument("--no-peaks", action="store_true", help="do not measure the machine's peaks: no floors")
    parser.add_argument(
        "--onnx", type=Path, help="an int4 model for onnxruntime-genai; see benchmarks/sections/onnx.py"
    )
    parser.add_argument("--onnx-python", default=sys.executable, help="a Python that has onnxruntime-genai")
    parser.add_argument("--list", action="store_true", help="say what would be measured, and measure nothing")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def world_of(args: argparse.Namespace) -> World:
    from quire.config import Environment, available_cores

    return World(
        folder=args.models or Environment.read().home / "benchmarks",
        threads=args.threads or available_cores(),
        shapes=tuple(SHAPES[s] for s in args.shapes),
        formats=tuple(args.formats),
        rounds=args.rounds,
        onnx=args.onnx,
        onnx_python=args.onnx_python,
        plots=args.plots,
    )


def collect(only: list[str], world: World) -> list[Group]:
    """What the sections asked for would measure, in the order of a whole run."""
    sections = [importlib.import_module(f"benchmarks.sections.{name}") for name in NAMES if name in only]
    return [group for section in sections for group in section.groups(world)]


def main(argv: list[str] | None = None) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # told to end is stopped: saved, and no child left behind
    args = parse(argv)
    world = world_of(args)
    if args.list:
        world.make = False
        for group in collect(args.only, world):
            seconds = sum(s.seconds for s in group.sides) * group.rounds
            print(f"{clock(seconds):>14}  {group.title}: {', '.join(f.what for f in group.figures)}")
        return
    version = peers.version()
    record = Record(args.out, {"threads": world.threads, "only": args.only, "rounds": args.rounds})
    record.put("llama.cpp", version)
    print(f"{world.threads} threads; llama.cpp {version or 'is absent: ours alone'}")
    if not args.no_peaks:
        peaks = floors.measure(world.threads)
        if isinstance(peaks, str):
            print(peaks)
            record.note(peaks)
        else:
            world.peaks = peaks
            record.put("peaks", asdict(peaks))
            print(about(peaks, world.threads))
    groups = collect(args.only, world)
    for file, why in world.without.items():
        print(f"without {file}: {why}")
        record.note(f"without {file}: {why}")
    finished = run(groups, record)
    if record.path is not None and record.path.exists():
        print(f"saved {record.path}")
    sys.exit(0 if finished else 130)


def about(peaks: floors.Peaks, threads: int) -> str:
    """The machine's peaks in one line."""
    n = str(threads)
    rates = ", ".join(f"{name} {v[n]:.0f}" for name, v in peaks.int8.items())
    floats = ", ".join(f"{name} {v[n]:.0f}" for name, v in peaks.fp32.items())
    reads = ", ".join(f"{mib} MiB {v[n]:.1f}" for mib, v in peaks.read.items())
    return f"at best, {threads} threads: int8 {rates} GOP/s; fp32 {floats} GFLOP/s; memory read {reads} GB/s"


if __name__ == "__main__":
    main()
