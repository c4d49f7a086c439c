"""The choice of a number of threads, pinned or not: measured once on this machine, and remembered.

What is timed is the real thing, small: one row through a matrix larger than most caches (decoding, bound by memory) and
64 rows through one that fits (prefill, bound by arithmetic), with the kernels that will run. The decision is kept in the
cache folder under a key that names everything it depends on; a file that is broken or about another machine is
ignored and written anew, one that cannot be written costs nothing but the next start's time.

Where there is nothing to choose (one core, or two whole ones) nothing is measured, and the line says so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config import VERSION
from quire.machine import Cores, cpu_model

FILE = "tuning.json"
KEEP = 16  # decisions in the file: one home may serve several machines or core masks
BUDGET = 0.25  # seconds of measuring, at most; what was not reached is not chosen
TIE = 1.03  # faster by less than this is not faster
BUSY = 0.5  # load per core above which a measurement says more about the others than about the machine
STREAM = (16384, 8192)  # 72 MiB
COMPUTE = (2048, 1024)  # 1.1 MiB
ROWS = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to run. `cores`: what the threads are pinned to; none when the system places them."""

    threads: int
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.threads} thread{'s' if self.threads > 1 else ''}{' pinned' if self.cores else ''}"


@dataclass(frozen=True, slots=True)
class Speed:
    """The measured speed of a candidate."""

    candidate: Candidate
    stream: float  # bytes of weights a second, one row
    compute: float  # multiply-adds a second, 64 rows


@dataclass(frozen=True, slots=True)
class Decision:
    """The threads to run with, and the measurements behind the choice."""

    candidate: Candidate
    line: str
    speeds: tuple[Speed, ...] = ()
    measured: str = ""  # the day; empty: nothing was measured
    kept: bool = False


def decide(home: Path, cores: Cores, isa: str, *, again: bool = False) -> Decision:
    """The decision for this machine: kept, made without measuring where nothing can be gained, or measured now.

    `again` measures in any case; what it finds is kept, and wins over what seems obvious.
    """
    if not again:
        kept = _load(home / FILE, key_of(cores, isa))
        if kept is not None:
            return _decision(*kept, cores, True)
        direct = obvious(cores)
        if direct is not None:
            return direct
    speeds = tuple(measure(candidates(cores), isa))
    day = time.strftime("%Y-%m-%d")
    busy = _load_per_core() > BUSY
    if not busy:
        _save(home / FILE, key_of(cores, isa), day, speeds)
    return _decision(day, speeds, cores, not busy)


def obvious(cores: Cores) -> Decision | None:
    """The decision where there is one way to run, or one that cannot lose."""
    if cores.most == 1:
        why = "one core" if cores.quota is None or cores.threads == 1 else f"a quota of {cores.quota:g} cores"
        return Decision(Candidate(1), f"threads: 1 ({why})")
    if cores.most == 2 and len(cores.fast) == 2 and cores.threads == 2:
        return Decision(Candidate(2), "threads: 2 of 2 cores (two whole cores: nothing to choose, nothing measured)")
    return None


def candidates(cores: Cores) -> list[Candidate]:
    """The numbers of threads worth trying, the likeliest first; never more than can run at once."""
    whole, fast = len(cores.cores), len(cores.fast)
    counts = [fast, cores.threads, whole, fast // 2 if fast >= 8 else 0, 1]
    counts = list(dict.fromkeys(n for n in counts if 0 < n <= cores.most)) or [cores.most]
    if cores.most not in counts and cores.most < cores.threads:
        counts.insert(0, cores.most)  # a quota may lie between
    found: list[Candidate] = []
    for n in counts:
        found.append(Candidate(n))
        # Pinned: one thread on each fast core first, then the slow ones, then the second hardware threads.
        places = [c[0] for c in cores.fast] + [c[0] for c in cores.cores if c not in cores.fast]
        places += [cpu for c in cores.cores for cpu in c[1:]]
        if 1 < n < len(places) or (n > 1 and len(places) > 2):
            found.append(Candidate(n, tuple(places[:n])))
    return found


def best(speeds: Iterable[Speed]) -> Speed:
    """The fastest over decode and prefill alike; ties go to fewer threads, then to unpinned ones."""
    speeds = list(speeds)
    stream, compute = max(s.stream for s in speeds), max(s.compute for s in speeds)
    score = {s.candidate: 2 / (stream / s.stream + compute / s.compute) for s in speeds}
    top = max(score.values())
    near = [s for s in speeds if score[s.candidate] * TIE >= top]
    return min(near, key=lambda s: (s.candidate.threads, bool(s.candidate.cores)))


def measure(ways: Iterable[Candidate], isa: str | None = None, budget: float = BUDGET) -> Iterator[Speed]:
    """Time each, within the budget; the first is always measured."""
    import numpy as np

    from quire.backends.batch import Batch
    from quire.backends.native.backend import NativeBackend
    from quire.backends.ops import KV
    from quire.layouts import Affine, Codec, Ints, Plane, Scale

    end = time.perf_counter() + budget
    codec = Codec("q4", 32, 18, 32, 4, Ints((Plane.packed(2, 32, 16, 4),), 8), Scale(0))
    weights = [Affine.of(np.empty(n * k // 32 * 18, np.uint8), (n, k), codec) for n, k in (STREAM, COMPUTE)]
    kv = KV(1, ROWS // 16, 16, 1, 8)  # the batch must lie somewhere

    def batch(rows: int) -> Batch:
        where = np.arange(rows, dtype=np.int32)
        pages = np.arange(-(-rows // 16), dtype=np.int32)[None]
        ends = np.array([0, rows], np.int32)
        return Batch(where, where, ends, ends[1:].copy(), pages, where, np.zeros(0, np.int32))

    def seconds(program: Any, rows: int, x: Any) -> float:
        program.run(batch(rows), {"x": x})  # wakes the threads
        found: list[float] = []
        while len(found) < 8 and sum(found) < 0.02:
            begun = time.perf_counter()
            program.run(batch(rows), {"x": x})
            found.append(time.perf_counter() - begun)
        return min(found)

    matrices: list[Any] = []
    for number, way in enumerate(ways):
        if number and time.perf_counter() > end:
            return
        backend = NativeBackend(threads=way.threads, isa=isa, cores=way.cores)
        matrices = matrices or [backend.pattern(n, k) for n, k in (STREAM, COMPUTE)]
        found: list[float] = []
        for weight, matrix, rows in zip(weights, matrices, (1, ROWS), strict=True):
            backend.adopt(weight, matrix)
            program = backend.compile(
                lambda ops, _, inputs, w=weight: ops.linear(inputs["x"], w),
                kv=kv,
                max_tokens=rows,
                max_rows=0,
                inputs={"x": weight.shape[1]},
            )
            x = np.ones((rows, weight.shape[1]), np.float32)
            found.append(seconds(program, rows, x))
        n, k = COMPUTE
        yield Speed(way, matrices[0].nbytes / found[0], n * k * ROWS / found[1])


def key_of(cores: Cores, isa: str) -> str:
    """Everything that a decision depends on."""
    shape = ",".join("+".join(map(str, c)) for c in cores.cores)
    quota = "" if cores.quota is None else f"{cores.quota:g}"
    return f"quire {VERSION}; {cpu_model()}; cores {shape}; quota {quota or 'none'}; {isa}"


def _decision(day: str, speeds: tuple[Speed, ...], cores: Cores, kept: bool) -> Decision:
    chosen = best(speeds).candidate
    limit = "" if cores.quota is None else f", quota {cores.quota:g}"
    tried = ", ".join(
        f"{s.candidate} {s.stream / 1e9:.1f} GB/s" for s in sorted(speeds, key=lambda s: s.candidate.threads)
    )
    pinned = f", pinned to {','.join(map(str, chosen.cores))}" if chosen.cores else ""
    whole = f"{cores.threads} core{'s' if cores.threads > 1 else ''}{limit}{pinned}"
    note = "" if kept else "; the machine was busy, so this is not kept"
    return Decision(chosen, f"threads: {chosen.threads} of {whole} (measured {day}: {tried}{note})", speeds, day, kept)


def _load_per_core() -> float:
    """The load of each core in the last minute; what this process did itself is too short to show."""
    with suppress(OSError, AttributeError):
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    return 0.0


def _load(path: Path, key: str) -> tuple[str, tuple[Speed, ...]] | None:
    """The remembered decision under that key. A file that is not as we write it counts as empty."""
    try:
        entry = json.loads(path.read_bytes())[key]
        speeds = tuple(
            Speed(
                Candidate(_count(s["threads"]), tuple(int(c) for c in s["cores"])),
                float(s["stream"]),
                float(s["compute"]),
            )
            for s in entry["speeds"]
        )
        day = str(entry["measured"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return (day, speeds) if speeds and all(s.stream > 0 and s.compute > 0 for s in speeds) else None


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 1 <= value <= 1024:
        raise ValueError(value)
    return value


def _save(path: Path, key: str, day: str, speeds: tuple[Speed, ...]) -> None:
    """Written beside and moved into place, so that a reader never sees half of it."""
    try:
        known = json.loads(path.read_bytes())
        known = {k: v for k, v in known.items() if k != key}
    except (OSError, ValueError, AttributeError, RecursionError):
        known = {}
    rows = [
        {"threads": s.candidate.threads, "cores": list(s.candidate.cores), "stream": s.stream, "compute": s.compute}
        for s in speeds
    ]
    entries = [*list(known.items())[-(KEEP - 1) :], (key, {"measured": day, "speeds": rows})]
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_text(json.dumps(dict(entries), indent=1))
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
