"""32 requests over HTTP that share a 512-token prefix, 128 tokens out, 8 and 32 at a time, beside `llama-server`.

Both servers are started afresh for every round, as a user starts them, and asked by the same client. llama-server gets a
slot and room for the whole request for each concurrent one (`-np`, `-c`), continuous batching (`-cb`), its prompt cache,
and reuse of chunks (`--cache-reuse`), with both of its attention settings. (A unified KV buffer, `-kvu`, was tried: slower.)
A figure of its own, with the same bar, is for llama-server as it starts with nothing but a model and threads.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import client, peers
from benchmarks.client import Answer, Load
from benchmarks.figures import OURS, Figure, Group, Sample, Side
from benchmarks.world import SMALL, World, figure, text_of

REQUESTS, SHARED, OUTPUT = 32, 512, 128
CONCURRENCY = (8, 32)
SLOT = SHARED + OUTPUT + 64  # tokens: the prefix, a line of its own, the answer
FORMAT = "q4_0"
SETTINGS = {f"-fa {a}": ["-fa", a] for a in peers.ATTENTION}
PLAIN = "llama-server as it starts"  # targets.py names it, too


def figures(name: str, concurrency: int) -> list[Figure]:
    first = [f"first token {p} at {concurrency}" for p in ("p50", "p99")]
    return [
        figure("served", SMALL, name, f"throughput at {concurrency}"),
        *(figure("served", SMALL, name, what, unit="s", more=False) for what in first),
        figure("served", SMALL, name, f"throughput at {concurrency}, {PLAIN}"),
    ]


def sample(answer: Answer, concurrency: int, setting: str = "") -> Sample:
    return {
        (f"throughput at {concurrency}", setting): answer.tokens_per_second,
        (f"first token p50 at {concurrency}", setting): answer.at(0.5),
        (f"first token p99 at {concurrency}", setting): answer.at(0.99),
    }


def plain_sample(answer: Answer, concurrency: int) -> Sample:
    return {(f"throughput at {concurrency}, {PLAIN}", ""): answer.tokens_per_second}


def load_of(path: Path, concurrency: int) -> Load:
    return Load(text_of(path, SHARED), REQUESTS, OUTPUT, concurrency)


def quire(path: Path, threads: int, load: Load) -> Sample:
    port = client.free_port()
    command = [sys.executable, "-m", "quire.cli.main", "serve", str(path), "--name", "bench", "--port", str(port)]
    with client.server([*command, "--threads", str(threads), "--device", "cpu"], port, "/ready"):
        answer = client.drive(port, load)
        return {**sample(answer, load.concurrency), **plain_sample(answer, load.concurrency)}


def llama(path: Path, threads: int, load: Load, settings: dict[str, list[str]]) -> Sample:
    slots = ["-np", str(load.concurrency), "-c", str(load.concurrency * SLOT), "-cb", "--cache-reuse", "64"]
    found = {**plain_sample(_llama(path, threads, load, []), load.concurrency)}
    for setting, flags in settings.items():
        found.update(sample(_llama(path, threads, load, [*slots, *flags]), load.concurrency, setting))
    return found


def _llama(path: Path, threads: int, load: Load, flags: list[str]) -> Answer:
    program, port = peers.find("llama-server"), client.free_port()
    assert program is not None
    command = [program, "-m", str(path), "-t", str(threads), "--port", str(port), *flags]
    with client.server(command, port, "/health", peers.environment(program)):
        return client.drive(port, load)


def groups(world: World) -> list[Group]:
    return [group(world, name, c) for _, name in world.pairs((FORMAT,), (SMALL,)) for c in CONCURRENCY]


def group(world: World, name: str, concurrency: int) -> Group:
    path = world.path(SMALL, name)
    sides = [Side(OURS, lambda: quire(path, world.threads, load_of(path, concurrency)), 12)]
    notes = []
    if peers.find("llama-server"):
        theirs = Side(peers.NAME, lambda: llama(path, world.threads, load_of(path, concurrency), SETTINGS), 220)
        sides.append(theirs)
        notes.append(f"llama-server with -np {concurrency} -c {concurrency * SLOT} -cb --cache-reuse 64")
    else:
        notes.append(peers.missing("llama-server"))
    return Group(
        f"served, {concurrency} at a time, {SMALL} {name}",
        figures(name, concurrency),
        sides,
        world.turns(),
        notes,
    )
