"""llama.cpp's programs: where they are (LLAMA_CPP names their folder, or the PATH has them), their version, their figures.

Absent ones are said so. Every program gets the same file and thread count as we do, and its best of the settings it has
for attention (`-fa off` and `on`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAME = "llama.cpp"
ATTENTION = ("off", "on")


def find(program: str) -> str | None:
    """The path of a llama.cpp program, or None."""
    folder = os.environ.get("LLAMA_CPP")
    if folder and (Path(folder) / program).exists():
        return str(Path(folder) / program)
    return shutil.which(program)


def missing(program: str) -> str:
    return f"{program} is needed: it is not on the PATH, and LLAMA_CPP does not name its folder"


def version() -> str | None:
    """What the programs say of themselves, in one line; None where llama-bench is absent."""
    if find("llama-bench") is None:
        return None
    for program in ("llama-bench", "llama-cli", "llama-server"):  # not all of them know the question
        path = find(program)
        if path is not None:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment(path))
            lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
            said = [line for line in lines if line.startswith(("version:", "built with"))]
            if said:
                return ", ".join(said)
    return "unknown"


def environment(program: str) -> dict[str, str]:
    """Ours, with the program's own folder first among those where libraries are looked for."""
    folder = str(Path(program).resolve().parent)
    old = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": f"{folder}:{old}" if old else folder}


def run(command: list[str]) -> str:
    """What a peer's program prints. Its failure ends the benchmark with its own words."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment(command[0]))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def bench(
    path: Path, threads: int, *, prompt: int | str = 0, output: int = 0, depths: str = "0"
) -> list[dict[str, Any]]:
    """llama-bench's rows: n_prompt, n_gen, n_depth, flash_attn, avg_ts. One repetition after its own warm-up."""
    program = find("llama-bench")
    assert program is not None
    command = [program, "-m", str(path), "-t", str(threads), "-p", str(prompt), "-n", str(output), "-d", depths]
    return rows(run([*command, "-fa", ",".join(ATTENTION), "-r", "1", "-o", "jsonl"]))


def attention(row: dict[str, Any]) -> str:
    """The setting of one of llama-bench's rows, as we call it."""
    return f"-fa {'on' if row['flash_attn'] else 'off'}"


def batched(path: Path, threads: int, streams: list[int], prompt: int, output: int) -> dict[tuple[int, str], float]:
    """llama-batched-bench: tokens per second of all streams decoding together, by (streams, setting)."""
    program = find("llama-batched-bench")
    assert program is not None
    found = {}
    for setting in ATTENTION:
        sizes = ["-npp", str(prompt), "-ntg", str(output), "-npl", ",".join(map(str, streams))]
        context = str(max(streams) * (prompt + output + 8))
        command = [program, "-m", str(path), "-t", str(threads), *sizes, "-c", context, "-fa", setting]
        for row in rows(run([*command, "--output-format", "jsonl"])):
            found[row["pl"], f"-fa {setting}"] = float(row["speed_tg"])
    return found
