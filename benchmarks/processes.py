"""Programs watched from outside: when the answer begins on stdout, what memory the kernel says they hold, a busy neighbour.

`answer` must be told how a program's output looks before its answer: llama-cli prints a banner and repeats the prompt.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import ROOT

POLL_SECONDS = 0.1  # the kernel walks every page for each look
LIMIT_SECONDS = 600.0


def quire_command() -> list[str]:
    """The installed program where there is one, as a user starts it; else the module."""
    script = Path(sys.executable).with_name("quire")
    return [str(script)] if script.exists() else [sys.executable, "-m", "quire.cli.main"]


def installed() -> dict[str, str]:
    """The environment of an installed program, whose modules are compiled once. Where Python may not keep what it compiles
    (PYTHONDONTWRITEBYTECODE, which containers like to set), every start of an editable install compiles all of them again."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def first_output(command: list[str], after: bytes = b"", env: dict[str, str] | None = None) -> float:
    """Seconds from starting a program to the first visible byte of its answer, which follows `after` in its stdout."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
    )
    assert process.stdout is not None
    seen, seconds = b"", 0.0
    try:
        while chunk := os.read(process.stdout.fileno(), 65536):
            now = time.perf_counter() - begun
            if seconds:
                continue  # drained, so that the program ends by itself
            seen += chunk
            _, found, rest = seen.partition(after) if after else (b"", b"1", seen)
            if found and rest.strip():
                seconds = now
        code = process.wait(LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    if code or not seconds:
        raise RuntimeError(f"{' '.join(command)} ended with {code} and no answer: {seen[-300:]!r}")
    return seconds


@dataclass(slots=True)
class Memory:
    """Bytes that a process held: at most, and while it was answering."""

    peak: float
    steady: float
    anonymous: float  # of the steady bytes, those that no file backs


def rollup(pid: int) -> dict[str, int]:
    """A process's memory by kind, in bytes (/proc/PID/smaps_rollup)."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    return found


def memory(command: list[str], env: dict[str, str] | None = None) -> Memory:
    """What a program held: the kernel's own high-water mark, and the median over the second half of its life."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        samples: list[dict[str, int]] = []
        try:
            while process.poll() is None:
                try:
                    samples.append({**rollup(process.pid), "Peak": high_water(process.pid)})
                except (OSError, IndexError, StopIteration):  # it ended between two looks
                    break
                time.sleep(POLL_SECONDS)
            process.wait(LIMIT_SECONDS)
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    if process.returncode or len(samples) < 4:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {said[-500:]}")
    late = samples[len(samples) // 2 :]
    steady, anonymous = (statistics.median(s[kind] for s in late) for kind in ("Rss", "Anonymous"))
    return Memory(max(s["Peak"] for s in samples), steady, anonymous)


def high_water(pid: int) -> int:
    """The most that a process has had resident so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def neighbour() -> Iterator[None]:
    """One process that does nothing but compute, wherever the kernel puts it."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        yield
    finally:
        process.kill()
        process.wait()
