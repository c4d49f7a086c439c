"""How much of the int8 dot-product ceiling prefill reaches on the 1B shape, for the 4-bit types.

The operations are those of the layers' matrices and of one row of the output matrix: attention, norms and quantizing the
activations are in the time but not in the count. The ceiling is measured in every round, right before our turn and right
after it, and the better of the two counts: a host that is shared does not have the speed of its best moment all day. Where
the CPU has tile instructions (AMX), their ceiling is a second figure: kernels that use them pass the first.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import floors, ours
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.targets import FOUR_BIT
from benchmarks.world import LARGE, World, figure

TOKENS = 512
SHARE = "share of the dot-product ceiling"
AMX_SHARE = "share of the AMX ceiling"
RATE = "int8 operations"


def ceiling(world: World) -> floors.Peaks:
    now = floors.measure(world.threads, int8_alone=True)
    if isinstance(now, str):
        raise RuntimeError(now)
    return now


def quire(world: World, path: Path) -> Sample:
    before = ceiling(world)
    speed = ours.measure(path, world.threads, [ours.prefill(TOKENS)])[0]["tokens/s"]
    peaks = before.or_better(ceiling(world))
    cost = world.cost(path)
    rate = speed * (cost.operations + cost.output_operations / TOKENS)
    dot, amx = peaks.dot(world.threads), peaks.amx(world.threads)
    sample = {(RATE, ""): rate * 1e-9}
    if dot is not None:
        sample[SHARE, ""] = rate / dot[1]
    if amx is not None:
        sample[AMX_SHARE, ""] = rate / amx
    return sample


def groups(world: World) -> list[Group]:
    if world.peaks is None:
        return []
    dot = world.peaks.dot(world.threads)
    return [group(world, name, dot) for _, name in world.pairs(FOUR_BIT, (LARGE,))]


def group(world: World, name: str, dot: tuple[str, float] | None) -> Group:
    path = world.path(LARGE, name)
    figures = [
        figure("ceiling", LARGE, name, RATE, unit="1e9/s"),
        figure("ceiling", LARGE, name, SHARE, unit=""),
        figure("ceiling", LARGE, name, AMX_SHARE, unit=""),
    ]
    notes = [f"the dot-product instruction here: {dot[0]}, {dot[1] * 1e-9:.0f}e9 operations/s"] if dot else []
    side = Side(OURS, lambda: quire(world, path), 25)
    return Group(f"prefill {TOKENS} against the ceiling, {LARGE} {name}", figures, [side], world.turns(), notes)
