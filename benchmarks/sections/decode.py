"""One stream decoding, at an empty context and 2048 tokens deep, beside `llama-bench -n N -d DEPTH`.

Ours includes the scheduler, the sampler and the rest of the engine; llama-bench's figure has no sampling in it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import ours, peers
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.world import SMALL, World, figure

DEPTHS = (0, 2048)
TOKENS = {True: 128, False: 64}  # small, 1B


def what(depth: int) -> str:
    return f"depth {depth}"


def quire(path: Path, threads: int, tokens: int, depths: tuple[int, ...]) -> Sample:
    found = ours.measure(path, threads, [ours.decode(d, tokens) for d in depths])
    return {(what(d), ""): f["tokens/s"] for d, f in zip(depths, found, strict=True)}


def llama(path: Path, threads: int, tokens: int, depths: tuple[int, ...]) -> Sample:
    rows = peers.bench(path, threads, output=tokens, depths=",".join(map(str, depths)))
    return {(what(r["n_depth"]), peers.attention(r)): r["avg_ts"] for r in rows}


def groups(world: World) -> list[Group]:
    return [group(world, shape, name) for shape, name in world.pairs()]


def group(world: World, shape: str, name: str) -> Group:
    small = shape == SMALL
    path, tokens = world.path(shape, name), TOKENS[small]
    figures = []
    for depth in DEPTHS:
        f = figure("decode", shape, name, what(depth))
        if world.peaks is not None:
            f.floor = world.cost(path).decode_floor(world.peaks, world.threads, depth + tokens / 2)
        figures.append(f)
    sides = [Side(OURS, lambda: quire(path, world.threads, tokens, DEPTHS), 7 if small else 30)]
    notes = []
    if peers.find("llama-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path, world.threads, tokens, DEPTHS), 20 if small else 70))
    else:
        notes.append(peers.missing("llama-bench"))
    return Group(f"decode, {shape} {name}", figures, sides, world.turns(), notes)
