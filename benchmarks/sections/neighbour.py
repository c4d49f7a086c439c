"""Decode and prefill alone, and beside one process that only computes: what is kept, against a fair share.

The neighbour is not pinned. With n threads on n cores and one neighbour, n + 1 threads share n cores, so a fair share is
n / (n + 1) of the speed alone. "Kept, of a fair share" is 1 when no more is lost than that.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import ours, peers
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.processes import neighbour
from benchmarks.world import SMALL, World, figure

PROMPT, DECODE = 512, {True: 128, False: 48}
KINDS = ("decode", "prefill")


def sample(alone: dict[str, float], busy: dict[str, float], threads: int, setting: str = "") -> Sample:
    fair = threads / (threads + 1)
    found: dict[tuple[str, str], float] = {}
    for kind in KINDS:
        found[f"{kind} alone", setting] = alone[kind]
        found[f"{kind} beside a busy process", setting] = busy[kind]
        found[f"{kind} kept, of a fair share", setting] = busy[kind] / alone[kind] / fair
    return found


def quire(path: Path, threads: int, tokens: int) -> Sample:
    def once() -> dict[str, float]:
        decode, prefill = ours.measure(path, threads, [ours.decode(0, tokens), ours.prefill(PROMPT)])
        return {"decode": decode["tokens/s"], "prefill": prefill["tokens/s"]}

    alone = once()
    with neighbour():
        return sample(alone, once(), threads)


def llama(path: Path, threads: int, tokens: int) -> Sample:
    def once() -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for row in peers.bench(path, threads, prompt=PROMPT, output=tokens):
            found.setdefault(peers.attention(row), {})["prefill" if row["n_prompt"] else "decode"] = row["avg_ts"]
        return found

    alone = once()
    with neighbour():
        busy = once()
    found: dict[tuple[str, str], float] = {}
    for setting in alone:
        found.update(sample(alone[setting], busy[setting], threads, setting))
    return found


def groups(world: World) -> list[Group]:
    return [group(world, s, f) for s, f in world.pairs(("q4_0",))]


def group(world: World, shape: str, name: str) -> Group:
    path, small = world.path(shape, name), shape == SMALL
    tokens, threads = DECODE[small], world.threads
    figures = []
    for kind in KINDS:
        figures += [figure("neighbour", shape, name, f"{kind} {how}") for how in ("alone", "beside a busy process")]
        figures.append(figure("neighbour", shape, name, f"{kind} kept, of a fair share", unit=""))
    sides = [Side(OURS, lambda: quire(path, threads, tokens), 6 if small else 25)]
    notes = [f"a fair share here is {threads}/{threads + 1} of the speed alone"]
    if peers.find("llama-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path, threads, tokens), 25 if small else 120))
    else:
        notes.append(peers.missing("llama-bench"))
    return Group(f"beside a busy process, {shape} {name}", figures, sides, world.turns(), notes)
