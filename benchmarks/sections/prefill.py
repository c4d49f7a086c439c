"""One prompt of 128, 512 and 2048 tokens, beside `llama-bench -p N` with its default batch sizes.

Ours is from handing the request over to its first token, so the last row's output matrix and sampling are in it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import ours, peers
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.world import SMALL, World, figure

LENGTHS = (128, 512, 2048)


def what(tokens: int) -> str:
    return f"{tokens} tokens"


def quire(path: Path, threads: int, lengths: tuple[int, ...]) -> Sample:
    found = ours.measure(path, threads, [ours.prefill(n) for n in lengths])
    return {(what(n), ""): f["tokens/s"] for n, f in zip(lengths, found, strict=True)}


def llama(path: Path, threads: int, lengths: tuple[int, ...]) -> Sample:
    rows = peers.bench(path, threads, prompt=",".join(map(str, lengths)))
    return {(what(r["n_prompt"]), peers.attention(r)): r["avg_ts"] for r in rows}


def groups(world: World) -> list[Group]:
    return [group(world, shape, name) for shape, name in world.pairs()]


def group(world: World, shape: str, name: str) -> Group:
    path = world.path(shape, name)
    figures = []
    for n in LENGTHS:
        f = figure("prefill", shape, name, what(n))
        dot = world.peaks.dot(world.threads) if world.peaks is not None else None
        if dot is not None and not name.startswith("f16"):  # float weights are not multiplied as int8
            f.floor = world.cost(path).prefill_floor(dot[1], n)
        figures.append(f)
    small = shape == SMALL
    sides = [Side(OURS, lambda: quire(path, world.threads, LENGTHS), 5 if small else 30)]
    notes = []
    if peers.find("llama-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path, world.threads, LENGTHS), 20 if small else 120))
    else:
        notes.append(peers.missing("llama-bench"))
    return Group(f"prefill, {shape} {name}", figures, sides, world.turns(), notes)
