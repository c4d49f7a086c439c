"""Which Python files of the package a streamed chat request enters, from the socket to the kernels and back.

Starts `quire serve` with the default model (or another) under a profiler, sends one request to warm up, and then counts the files
whose functions are called while a second one is answered: in the server's process and in the engine's.

    python -m tests.trace_request [MODEL] [--most 43]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--most", type=int, help="exit with 1 when more files than that are entered")
    args = parser.parse_args()
    by_process = trace(args.model)
    entered = sorted(set().union(*by_process))
    for name in entered:
        where = " and ".join(who for who, files in zip(("server", "engine"), by_process, strict=True) if name in files)
        print(f"{name:48} {where}")
    print(f"{len(entered)} files: {len(by_process[0])} in the server's process, {len(by_process[1])} in the engine's")
    return int(args.most is not None and len(entered) > args.most)


def trace(model: str) -> tuple[set[str], set[str]]:
    """The files that a streamed chat request enters in the server's process and in the engine's, as paths below `quire/`."""
    with tempfile.TemporaryDirectory(prefix="quire-trace-") as made, server(model, Path(made)) as (pid, url):
        folder = Path(made)
        chat(url, model)  # imports, tables, caches of a first request are not counted
        before = counts(folder, 0)
        chat(url, model)
        after = counts(folder, 1)
    entered: dict[bool, set[str]] = {True: set(), False: set()}
    for process, found in after.items():
        earlier = before.get(process, {})
        entered[process == pid] |= {name for name, n in found.items() if n > earlier.get(name, 0)}
    return entered[True], entered[False]


def chat(url: str, model: str) -> None:
    """One streamed answer, read to its end."""
    body = {"model": model, "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=SECONDS) as reply:
        lines = list(reply.iter_lines())
    if "data: [DONE]" not in lines:
        raise RuntimeError(f"the answer did not come to its end: {lines[-3:]}")


def counts(folder: Path, mark: int) -> dict[int, dict[str, int]]:
    """Calls by file, of the server and its engine, by process."""
    (folder / f"mark-{mark}").touch()
    wait(lambda: len(list(folder.glob(f"counts-{mark}-*.json"))) >= 2)
    time.sleep(0.1)  # another process, if there is one, has been asked, too
    return {
        int(path.stem.rpartition("-")[2]): json.loads(path.read_text()) for path in folder.glob(f"counts-{mark}-*.json")
    }


@contextmanager
def server(model: str, folder: Path) -> Iterator[tuple[int, str]]:
    """A traced `quire serve`: its process and its address."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "tracing"), str(ROOT)]),
        "QUIRE_TRACE": str(folder),
        "QUIRE_TRACE_PACKAGE": str(ROOT / "quire"),
    }
    log = folder / "log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "quire", "serve", model, "--port", "0"]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ, cwd=folder)
    try:
        url = address(process, log)
        wait(lambda: ready(url))
        yield process.pid, url
    finally:
        process.terminate()
        process.wait(timeout=30)


def address(process: subprocess.Popen[bytes] | subprocess.Popen[IO[str]], log: Path) -> str:
    """Where the server listens, as it says itself."""
    found: list[str] = []

    def look() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()}")
        found.extend(re.findall(r"http://127\.0\.0\.1:\d+", log.read_text()))
        return bool(found)

    wait(look)
    return found[0]


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait(there: Callable[[], bool]) -> None:
    """Until it is there; an error when that takes too long."""
    end = time.monotonic() + SECONDS
    while not there():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing came within {SECONDS:.0f} seconds")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
