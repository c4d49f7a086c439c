"""Resident memory on the 1B files: `quire run` and `llama-cli` with the same context, answering one prompt.

Polled from /proc. "Resident" counts the pages of the mapped model file that are in use, as the kernel does; "anonymous"
are those that no file backs (repacked weights, KV, buffers). Python is in ours.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import peers, processes
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.processes import Memory
from benchmarks.world import LARGE, World, figure, text_of

CONTEXT, PROMPT, TOKENS = 4096, 512, 64
KINDS = ("steady resident", "peak resident", "steady anonymous")


def sample(m: Memory, setting: str = "") -> Sample:
    values = (m.steady, m.peak, m.anonymous)
    return {(kind, setting): v / 2**20 for kind, v in zip(KINDS, values, strict=True)}


def quire(path: Path, threads: int) -> Sample:
    flags = ["--temperature", "0", "--max-tokens", str(TOKENS), "--threads", str(threads), "--context", str(CONTEXT)]
    flags += ["--device", "cpu"]
    return sample(processes.memory([*processes.quire_command(), "run", *flags, str(path), text_of(path, PROMPT)]))


def llama(path: Path, threads: int) -> Sample:
    program = peers.find("llama-cli")
    assert program is not None
    found: dict[tuple[str, str], float] = {}
    for setting in peers.ATTENTION:
        command = [program, "-m", str(path), "-t", str(threads), "-c", str(CONTEXT), "-n", str(TOKENS), "--temp", "0"]
        command += ["-st", "--simple-io", "--ignore-eos", "-fa", setting, "-p", text_of(path, PROMPT)]
        found.update(sample(processes.memory(command, peers.environment(program)), f"-fa {setting}"))
    return found


def groups(world: World) -> list[Group]:
    return [group(world, name) for _, name in world.pairs(shapes=(LARGE,))]


def group(world: World, name: str) -> Group:
    path = world.path(LARGE, name)
    figures = [figure("memory", LARGE, name, kind, unit="MiB", more=False) for kind in KINDS]
    sides = [Side(OURS, lambda: quire(path, world.threads), 12)]
    notes = [f"context {CONTEXT}, {PROMPT} tokens in, {TOKENS} out"]
    if path.exists():
        notes.append(f"the file has {path.stat().st_size / 2**20:.0f} MiB")
    if peers.find("llama-cli"):
        sides.append(Side(peers.NAME, lambda: llama(path, world.threads), 30))
    else:
        notes.append(peers.missing("llama-cli"))
    return Group(f"resident memory, {LARGE} {name}", figures, sides, world.turns(), notes)
