"""What every result carries: the machine, the versions, the commit, and when."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """CPU, cores and versions."""
    from quire.config import VERSION, available_cores

    cpu = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "CPU part")):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": available_cores(),
        "python": platform.python_version(),
        "quire": VERSION,
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit measured, marked when the tree has changes."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def save(name: str, body: dict[str, Any]) -> Path:
    """Write results/<name>-<date>.json."""
    info = machine()
    path = RESULTS / f"{name}-{info['date'][:10]}-{info['commit']}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": info, **body}, indent=1) + "\n")
    return path


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def spread(values: list[float], digits: int = 1) -> str:
    """median (lowest to highest)"""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
