"""Run a command on a machine that is busy with others: each of its processes stands still at random, for up to a second.

python -m tests.stalled .venv/bin/python -m pytest -n 4 tests/unit/server

A test that fails here and nowhere else is decided by a clock: it waits too little, or does not wait for what it means.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

TICK = 0.01  # seconds between two looks
EVERY = 0.4  # a process runs this long on average
LONGEST = 1.0  # and then stands still for a third of this on average


def family(root: int) -> dict[int, str]:
    """The descendants of a process and their states, as the kernel writes them."""
    children: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(folder.name), state))
    found: dict[int, str] = {}
    todo = [root]
    while todo:
        for child, state in children.get(todo.pop(), []):
            found[child] = state
            todo.append(child)
    return found


def send(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except OSError:
        return False
    return True


def main(command: list[str]) -> int:
    if not command or not Path("/proc/self/stat").exists():
        print(__doc__, file=sys.stderr)
        return 2
    process = subprocess.Popen(command)
    held: dict[int, float] = {}  # until when
    try:
        while process.poll() is None:
            now = time.monotonic()
            for pid in [pid for pid, end in held.items() if end <= now]:
                del held[pid]
                send(pid, signal.SIGCONT)
            for pid, state in family(process.pid).items():
                # What stands still already was stopped by a test, which wants it so.
                if pid not in held and state != "T" and random.random() < TICK / EVERY and send(pid, signal.SIGSTOP):
                    held[pid] = now + LONGEST * random.random() ** 2
            time.sleep(TICK)
    finally:
        for pid in held:
            send(pid, signal.SIGCONT)
        if process.poll() is None:
            process.terminate()
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
