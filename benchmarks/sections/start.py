"""From starting the process to the first token on stdout: `quire run` and `llama-cli`, one short prompt, warm page cache.

Both answer one prompt through the model's chat template and stop, with the same threads and context, greedy. llama-cli
runs a warm-up pass by default; both ways are measured and the better one counts. One unmeasured start of each comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks import peers, processes
from benchmarks.figures import OURS, Group, Sample, Side
from benchmarks.world import DEFAULT_FORMAT, SMALL, World, figure

WHAT = "to the first token"
PROMPT = "Why is the sky blue?"
CONTEXT, TOKENS = 4096, 4
SETTINGS = {"default": [], "--no-warmup": ["--no-warmup"]}


def quire(path: Path, threads: int) -> Sample:
    flags = ["--temperature", "0", "--max-tokens", str(TOKENS), "--threads", str(threads), "--context", str(CONTEXT)]
    flags += ["--device", "cpu"]
    command = [*processes.quire_command(), "run", *flags, str(path), PROMPT]
    return {(WHAT, ""): processes.first_output(command, env=processes.installed())}


def llama(path: Path, threads: int) -> Sample:
    program = peers.find("llama-cli")
    assert program is not None
    found = {}
    for setting, flags in SETTINGS.items():
        command = [program, "-m", str(path), "-t", str(threads), "-c", str(CONTEXT), "-n", str(TOKENS), "--temp", "0"]
        command += ["-st", "--simple-io", "-p", PROMPT, *flags]
        # It prints its banner, then "> " and the prompt, then the answer.
        seconds = processes.first_output(command, f"> {PROMPT}".encode(), peers.environment(program))
        found[WHAT, setting] = seconds
    return found


def groups(world: World) -> list[Group]:
    pairs = world.pairs((DEFAULT_FORMAT,), (SMALL,))
    return [start_group(world, "start", world.path(SMALL, name), SMALL, name, rounds=9) for _, name in pairs]


def start_group(world: World, section: str, path: Path, shape: str, name: str, rounds: int) -> Group:
    """The figure of one file, in the section that asks."""
    warmed: set[str] = set()

    def warm(who: str, measure: Callable[[Path, int], Sample]) -> Sample:
        if who not in warmed:
            warmed.add(who)
            measure(path, world.threads)
        return measure(path, world.threads)

    sides = [Side(OURS, lambda: warm(OURS, quire), 1.5)]
    notes = []
    if peers.find("llama-cli"):
        sides.append(Side(peers.NAME, lambda: warm(peers.NAME, llama), 2))
    else:
        notes.append(peers.missing("llama-cli"))
    figures = [figure(section, shape, name, WHAT, unit="s", more=False)]
    return Group(f"{section}, {shape} {name}", figures, sides, world.turns(rounds), notes)
