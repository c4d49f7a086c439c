"""What every result carries (the machine, the versions, the commit, when) and where it is kept.

A record is rewritten whole after every round, through a temporary name, so that stopping a run loses nothing. `newest`
takes each figure from the latest record that has it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Figure

__all__ = ["RESULTS", "ROOT", "Record", "load", "machine", "median", "newest", "save"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """CPU, cores and versions; and the kernel set, where QUIRE_ISA asked for one."""
    from quire.config import VERSION, Environment, available_cores

    asked = Environment.read().isa
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "cores": available_cores(),
        **({"kernels": asked} if asked else {}),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "quire": VERSION,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


# ARM's numbers for its cores, where Linux gives no name.
_PARTS = {"0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2"}


def named(cpu: str) -> str:
    return _PARTS.get(cpu, cpu)


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                return named(line.split(":", 1)[1].strip())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit measured, marked when the tree has changes."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def save(name: str, body: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write a record of another shape than the CPU figures' in one go: results/<name>-<date>-<commit>.json."""
    info = machine()
    path = folder / f"{name}-{info['date'][:10]}-{info['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": info, **body}, indent=1) + "\n")
    return path


class Record:
    """One run's figures on disk. The name has the time in it: a run never overwrites another."""

    def __init__(self, folder: Path | None, settings: dict[str, Any], name: str = "cpu"):
        self._body: dict[str, Any] = {"machine": machine(), "settings": settings, "notes": [], "figures": []}
        self._figures: list[Figure] = []
        when = self._body["machine"]["date"][:19].replace(":", "").replace("-", "")
        self.path = None if folder is None else folder / f"{name}-{when}-{self._body['machine']['commit']}.json"

    def put(self, key: str, value: Any) -> None:
        self._body[key] = value

    def note(self, text: str) -> None:
        if text not in self._body["notes"]:
            self._body["notes"].append(text)

    def add(self, figures: list[Figure]) -> None:
        """Take these figures in; what they gain later is seen at the next `save`."""
        known = {id(f) for f in self._figures}
        self._figures += [f for f in figures if id(f) not in known]

    def save(self) -> None:
        """Write it, whole or not at all."""
        if self.path is None:
            return
        self._body["figures"] = [f.to_json() for f in self._figures if f.values]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self._body, indent=1) + "\n")
        part.rename(self.path)


def load(path: Path) -> tuple[dict[str, Any], list[Figure]]:
    """A record's head (machine, settings, ...) and its figures."""
    body = json.loads(path.read_text())
    return body, [Figure.from_json(f) for f in body.pop("figures")]


def newest(paths: list[Path]) -> dict[tuple[str, str, str, str], tuple[Figure, dict[str, Any]]]:
    """Each figure from the latest record that has it, with that record's head. Where one commit was measured several times, a
    run that was broken off does not replace one with more rounds."""
    found: dict[tuple[str, str, str, str], tuple[Figure, dict[str, Any]]] = {}
    for head, figures in sorted((load(p) for p in paths), key=lambda r: r[0]["machine"]["date"]):
        for figure in figures:
            before = found.get(figure.key)
            same = before and before[1]["machine"]["commit"] == head["machine"]["commit"]
            if not before or not same or figure.rounds >= before[0].rounds:
                found[figure.key] = (figure, head)
    return found
