"""Several streams decoding together, total tokens per second, beside `llama-batched-bench`.

Each stream has its own short prompt, so nothing is shared. Ours counts from the step in which the last stream has its
first token.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import ours, peers
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.world import LARGE, SMALL, World, figure

PROMPT, TOKENS = 16, 64
WANTED = {
    (SMALL, "q4_0"): [1, 8, 32],
    (SMALL, "q4_1"): [1, 8, 32],
    (SMALL, "q4_k_m"): [1, 8, 32],
    (LARGE, "q4_0"): [8],
    (LARGE, "q4_k_m"): [8],
}


def what(n: int) -> str:
    return f"{n} stream{'s' if n > 1 else ''}"


def quire(path: Path, threads: int, numbers: list[int]) -> Sample:
    tests = [ours.streams(n, PROMPT, TOKENS) for n in numbers]
    found = ours.measure(path, threads, tests, max_seqs=max(numbers))
    return {(what(n), ""): f["tokens/s"] for n, f in zip(numbers, found, strict=True)}


def llama(path: Path, threads: int, numbers: list[int]) -> Sample:
    found = peers.batched(path, threads, numbers, PROMPT, TOKENS)
    return {(what(n), setting): value for (n, setting), value in found.items()}


def groups(world: World) -> list[Group]:
    return [group(world, s, f, WANTED[s, f]) for s, f in world.pairs() if (s, f) in WANTED]


def group(world: World, shape: str, name: str, numbers: list[int]) -> Group:
    path = world.path(shape, name)
    figures = [figure("streams", shape, name, what(n)) for n in numbers]
    small = shape == SMALL
    sides = [Side(OURS, lambda: quire(path, world.threads, numbers), 8 if small else 12)]
    notes = []
    if peers.find("llama-batched-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path, world.threads, numbers), 30))
    else:
        notes.append(peers.missing("llama-batched-bench"))
    return Group(f"streams decoding together, {shape} {name}", figures, sides, world.turns(), notes)
