"""Prefill with one thread and with two: what the second core gives, for us and for llama.cpp."""

from __future__ import annotations

from pathlib import Path

from benchmarks import ours, peers
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.world import SMALL, World, figure

TOKENS = 512
ONE, TWO, GAIN = "one thread, prefill", "two threads, prefill", "two threads over one, prefill"


def gain(one: float, two: float, setting: str = "") -> Sample:
    return {(ONE, setting): one, (TWO, setting): two, (GAIN, setting): two / one}


def quire(path: Path) -> Sample:
    one, two = (ours.measure(path, n, [ours.prefill(TOKENS)])[0]["tokens/s"] for n in (1, 2))
    return gain(one, two)


def llama(path: Path) -> Sample:
    runs = [{peers.attention(r): r["avg_ts"] for r in peers.bench(path, n, prompt=TOKENS)} for n in (1, 2)]
    found: dict[tuple[str, str], float] = {}
    for setting in runs[0]:
        found.update(gain(runs[0][setting], runs[1][setting], setting))
    return found


def groups(world: World) -> list[Group]:
    from quire.config import available_cores

    return [group(world, s, f, available_cores()) for s, f in world.pairs(("q4_0",))]


def group(world: World, shape: str, name: str, cores: int) -> Group:
    path = world.path(shape, name)
    figures = [figure("threads", shape, name, w) for w in (ONE, TWO)]
    figures.append(figure("threads", shape, name, GAIN, unit=""))
    small = shape == SMALL
    sides = [Side(OURS, lambda: quire(path), 3 if small else 25)]
    notes = [] if cores >= 2 else ["there is one core here: a second thread can give nothing"]
    if peers.find("llama-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path), 10 if small else 60))
    else:
        notes.append(peers.missing("llama-bench"))
    return Group(f"threads, {shape} {name}", figures, sides, world.turns(), notes)
