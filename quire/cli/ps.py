"""`quire ps`: the servers that run on this machine, from the notes they leave in `<home>/run`, with live numbers.

A note is one JSON file per server. Notes of processes that are gone are removed; a server that does not answer within
half a second is still listed, and said not to answer. A server of several models has a line for each of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from quire.cli.arguments.options import Option
from quire.config import Environment

TIMEOUT = 0.5
MAX_NOTE = 64 << 10  # bytes
MAX_ANSWER = 4 << 20
STAGES = ("loading", "restarting", "failed", "draining")  # what /ready says while it is not


class Note(msgspec.Struct):
    """What a server says about itself."""

    pid: int
    port: int
    model: str
    started: float | str = 0.0  # seconds since the epoch, or ISO 8601
    host: str = "127.0.0.1"
    models: list[str] = []  # all of them, where it has several


@dataclass(slots=True)
class Server:
    """One line of the list: a server, as far as one of its models goes."""

    pid: int
    host: str
    port: int
    model: str
    started: float
    state: str = "not answering"
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None  # of 1
    locked: bool = False  # it tells its numbers only to those who have its key


def find(run: Path) -> list[list[Server]]:
    """Servers whose process lives, each with its models. Removes the notes of those that are gone."""
    servers = []
    for path in sorted(run.glob("*.json")):
        try:
            if path.stat().st_size > MAX_NOTE:
                continue
            note = msgspec.json.decode(path.read_bytes(), type=Note)
        except (OSError, msgspec.DecodeError):
            continue  # being written, or not a note
        if _lives(note.pid):
            own = (note.pid, note.host, note.port)
            servers.append([Server(*own, name, _seconds(note.started)) for name in note.models or [note.model]])
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return servers


def _lives(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return pid < 1 << 31
    return True


def _seconds(started: float | str) -> float:
    if isinstance(started, str):
        try:
            return datetime.fromisoformat(started).timestamp()
        except ValueError:
            return 0.0
    return started


def ask(models: list[Server], key: str | None = None) -> list[Server]:
    """Fill in what a server tells about itself, if it does so quickly. Numbers may need its key, readiness does not."""
    from http.client import HTTPConnection, HTTPException

    server = models[0]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)

    def get(path: str) -> tuple[int, str]:
        connection = HTTPConnection(host, server.port, timeout=TIMEOUT)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER).decode(errors="replace")
        finally:
            connection.close()

    try:
        status, text = get("/ready")
        stages = _stages(text)
        for one in models:
            one.state = stages.get(one.model) or ("ready" if status == 200 else _stage(text))
        status, text = get("/metrics")
    except (OSError, HTTPException, ValueError):
        return models
    for one in models:
        label = "" if len(models) == 1 else f'model_name="{_escaped(one.model)}"'
        one.locked = status == 401
        if status == 200:
            one.running = _whole(_metric(text, "vllm:num_requests_running", label))
            one.waiting = _whole(_metric(text, "vllm:num_requests_waiting", label))
            one.kv_used = _metric(text, "vllm:kv_cache_usage_perc", label)
    return models


def _stage(text: str) -> str:
    """Why it is not ready, in the server's own word."""
    with contextlib.suppress(msgspec.DecodeError, TypeError, AttributeError):
        told = msgspec.json.decode(text).get("status")
        if told in STAGES:
            return told
    return "not ready"


def _stages(text: str) -> dict[str, str]:
    """How each of several models is, by name."""
    with contextlib.suppress(msgspec.DecodeError, TypeError, AttributeError, KeyError):
        told = msgspec.json.decode(text).get("models") or []
        return {m["model"]: m["status"] for m in told if m["status"] in ("ready", *STAGES)}
    return {}


def _escaped(name: str) -> str:
    """A name as a label of Prometheus has it."""
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _metric(text: str, name: str, label: str = "") -> float | None:
    """The sum of a metric's series in Prometheus text, of those that have the label; None when there are none."""
    total: float | None = None
    for line in text.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " ") and label in line:
            with contextlib.suppress(ValueError):
                total = (total or 0.0) + float(line.rpartition(" ")[2])
    return total


def command(json: Annotated[bool, Option("--json", help="As JSON.")] = False) -> None:
    """List the servers running on this machine."""
    from quire.cli.terminal import ui

    env = Environment.read()
    found = find(env.home / "run")
    servers: list[Server] = []
    if found:
        with ThreadPoolExecutor(min(16, len(found))) as pool:
            servers = [one for models in pool.map(lambda models: ask(models, env.api_key), found) for one in models]
    if json:
        ui.emit([asdict(s) for s in servers])
        return
    if not servers:
        ui.note("No server is running. `quire serve` starts one.")
        return
    rows = []
    for s in servers:
        address = f"[{s.host}]:{s.port}" if ":" in s.host else f"{s.host}:{s.port}"
        running, waiting = ("-" if v is None else str(v) for v in (s.running, s.waiting))
        kv = "-" if s.kv_used is None else f"{s.kv_used:.0%}"
        rows.append((str(s.pid), address, s.model, s.state, running, waiting, kv, _since(s.started)))
    ui.table(("PID", "ADDRESS", "MODEL", "STATE", "RUNNING", "WAITING", "KV", "UP"), rows)
    if any(s.locked for s in servers):
        ui.note("A server with a key tells its numbers to those who have it: set QUIRE_API_KEY to its key.")


def _since(started: float) -> str:
    if not started:
        return "-"
    seconds = max(0.0, time.time() - started)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
