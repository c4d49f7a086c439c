"""Prefill with one thread and with two: what the second core gives, for us and for llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean

from benchmarks import ours, peers
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.world import SMALL, World, figure

TOKENS = 512
ONE, TWO, GAIN = "one thread, prefill", "two threads, prefill", "two threads over one, prefill"


def in_turns(measure: Callable[[int], dict[str, float]]) -> Sample:
    """Tokens per second with one thread, with two, and their ratio, for each setting that `measure(threads)` returns.

    Measured in the order 1, 2, 2, 1, so that a machine that becomes faster or slower meanwhile favours neither.
    """
    found = {n: [] for n in (1, 2)}
    for n in (1, 2, 2, 1):
        found[n].append(measure(n))
    sample: dict[tuple[str, str], float] = {}
    for setting in found[1][0]:
        one, two = (mean(run[setting] for run in found[n]) for n in (1, 2))
        sample.update({(ONE, setting): one, (TWO, setting): two, (GAIN, setting): two / one})
    return sample


def quire(path: Path) -> Sample:
    return in_turns(lambda n: {"": ours.measure(path, n, [ours.prefill(TOKENS)])[0]["tokens/s"]})


def llama(path: Path) -> Sample:
    return in_turns(lambda n: {peers.attention(r): r["avg_ts"] for r in peers.bench(path, n, prompt=TOKENS)})


def groups(world: World) -> list[Group]:
    from quire.config import available_cores

    return [group(world, s, f, available_cores()) for s, f in world.pairs(("q4_0",))]


def group(world: World, shape: str, name: str, cores: int) -> Group:
    path = world.path(shape, name)
    figures = [figure("threads", shape, name, w) for w in (ONE, TWO)]
    figures.append(figure("threads", shape, name, GAIN, unit=""))
    small = shape == SMALL
    sides = [Side(OURS, lambda: quire(path), 6 if small else 50)]
    notes = [] if cores >= 2 else ["there is one core here: a second thread can give nothing"]
    if peers.find("llama-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path), 20 if small else 120))
    else:
        notes.append(peers.missing("llama-bench"))
    return Group(f"threads, {shape} {name}", figures, sides, world.turns(), notes)
