"""Cost per token against context, 0 to 8K: milliseconds at each depth, a straight line through them, and a plot.

The slope is held against the floor (the bytes of keys and values of one token, at the rate memory is read). "Longest
against the line" is the cost at the longest context over what the line through the shorter ones says: above 1, cost grows
faster than the KV bytes. That line is drawn over the time that reading the bytes takes, as measured: where a short context
fits the last cache and a long one does not, that time is no straight line over the context.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import ours, peers, plot
from benchmarks.figures import OURS, Figure, Group, Sample, Side
from benchmarks.world import SMALL, World, figure

DEPTHS = [0, 512, 1024, 2048, 4096, 8128]  # the last leaves room for the answer in a context of 8192
TOKENS = 32
SLOPE = "per token of context"
BEND = "longest against the line"


def what(depth: int) -> str:
    return f"at {depth}"


def line(along: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """(intercept, slope) by least squares."""
    x, y = statistics.fmean(along), statistics.fmean(costs)
    slope = sum((d - x) * (c - y) for d, c in zip(along, costs, strict=True)) / sum((d - x) ** 2 for d in along)
    return y - slope * x, slope


def derive(costs: dict[int, float], floors: dict[int, float], setting: str = "") -> Sample:
    """Milliseconds by depth, with the slope (nanoseconds for each token of context) and the bend. `floors`: milliseconds to
    read the bytes; without them, the bytes are taken to cost the same at every depth."""
    depths = sorted(costs)
    along = [floors[d] for d in depths] if floors.keys() >= costs.keys() else depths
    found = {(what(d), setting): costs[d] for d in depths}
    found[SLOPE, setting] = line(depths, [costs[d] for d in depths])[1] * 1e6
    intercept, slope = line(along[:-1], [costs[d] for d in depths[:-1]])
    found[BEND, setting] = costs[depths[-1]] / (intercept + slope * along[-1])
    return found


def quire(path: Path, threads: int, floors: dict[int, float]) -> Sample:
    speeds = ours.measure(path, threads, [ours.sweep(DEPTHS, TOKENS)])[0]
    return derive({d: 1000 / speeds[str(d)] for d in DEPTHS}, floors)


def llama(path: Path, threads: int, floors: dict[int, float]) -> Sample:
    costs: dict[str, dict[int, float]] = {}
    for row in peers.bench(path, threads, output=TOKENS, depths=",".join(map(str, DEPTHS))):
        costs.setdefault(peers.attention(row), {})[row["n_depth"]] = 1000 / row["avg_ts"]
    found: dict[tuple[str, str], float] = {}
    for setting, by_depth in costs.items():
        found.update(derive(by_depth, floors, setting))
    return found


def groups(world: World) -> list[Group]:
    return [group(world, s, f) for s, f in world.pairs(("q4_0",))]


def group(world: World, shape: str, name: str) -> Group:
    path, small = world.path(shape, name), shape == SMALL
    figures = [figure("context", shape, name, what(d), unit="ms", more=False) for d in DEPTHS]
    slope = figure("context", shape, name, SLOPE, unit="ns", more=False)
    figures += [slope, figure("context", shape, name, BEND, unit="", more=False)]
    floors: dict[int, float] = {}
    if world.peaks is not None:
        cost = world.cost(path)
        whole = cost.weight_bytes + DEPTHS[-1] * cost.kv_bytes
        slope.floor = cost.kv_bytes / world.peaks.bandwidth(whole, world.threads) * 1e9
        for f, depth in zip(figures, DEPTHS, strict=False):
            f.floor = floors[depth] = 1000 / cost.decode_floor(world.peaks, world.threads, depth + TOKENS / 2)
    sides = [Side(OURS, lambda: quire(path, world.threads, floors), 20 if small else 120)]
    notes = []
    if peers.find("llama-bench"):
        sides.append(Side(peers.NAME, lambda: llama(path, world.threads, floors), 90 if small else 600))
    else:
        notes.append(peers.missing("llama-bench"))
    done = Group(f"cost per token against context, {shape} {name}", figures, sides, world.turns(), notes)
    done.finish = lambda g: draw(world, g)
    return done


def draw(world: World, done: Group) -> None:
    """The plot, from whatever was measured."""
    points = [f for f in done.figures if f.what.startswith("at ") and f.ours]
    if world.plots is None or not points:
        return
    first = points[0]
    name = f"context-{first.shape}-{first.format}.svg"
    world.plots.mkdir(parents=True, exist_ok=True)
    (world.plots / name).write_text(
        plot.lines(f"{first.shape} {first.format}: one token's cost", "tokens of context", "ms", series(points))
    )
    done.notes.append(f"plot: {name}")


def series(points: list[Figure]) -> dict[str, list[tuple[float, float]]]:
    """Medians by depth for us, each peer setting, and the floor."""
    found: dict[str, list[tuple[float, float]]] = {}
    for f in points:
        depth = float(f.what.split()[1])
        for side, settings in f.values.items():
            for setting, values in settings.items():
                label = side if side == OURS else f"{side} {setting}".strip()
                found.setdefault(label, []).append((depth, statistics.median(values)))
        if f.floor is not None:
            found.setdefault("reading the bytes", []).append((depth, f.floor))
    return found
