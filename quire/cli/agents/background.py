"""The server that an agent talks to: one that runs already, or one of its own, in the background for as long as the agent runs.

Knows `quire serve` as its users do: its command line, its log and its HTTP answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from quire.observe.errors import BadRequest, QuireError, Unavailable

PROBE = 2.0  # seconds that a server may take to say what it has
POLL = 0.1
NEWS = 5.0  # seconds between two lines about a load
STOP = 10.0  # seconds that a server may take to end; running answers are let go
LOGS = 8  # logs that are kept
MAX_ANSWER = 1 << 20
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Running:
    """A model on a server that runs."""

    url: str
    model: str
    context: int | None  # None: it is still loading


def find(url: str, model: str | None, key: str | None) -> Running | None:
    """The model at that address, or the first one that writes texts; None where nothing answers as Quire does, or the model is another."""
    try:
        status, body = _get(url, "/v1/models", key)
    except (OSError, ValueError):
        return None
    if status == 401:
        raise BadRequest(f"the server at {url} asks for a key", cure="set QUIRE_API_KEY to its key", param="url")
    try:
        cards: Any = msgspec.json.decode(body)["data"]
        for card in cards:
            if card["owned_by"] != "quire" or (model is not None and card["id"] != model):
                continue
            if model is not None or "generate" in (card["quire"]["tasks"] or ["generate"]):
                return Running(url, str(card["id"]), card["max_model_len"])
    except (msgspec.DecodeError, KeyError, TypeError):
        pass
    return None


def wait_until_ready(url: str, model: str, key: str | None, say: Say, lives: Callable[[], bool]) -> Running:
    """Wait for a server to have loaded its model. `lives` says whether it still can; it is False when the server has ended."""
    told = time.monotonic()
    while True:
        with contextlib.suppress(OSError, ValueError):
            found = find(url, model, key)
            if found is not None and found.context is not None:
                return found
        if not lives():
            raise Unavailable(f"the server at {url} ended before its model was loaded")
        if time.monotonic() - told > NEWS:
            told = time.monotonic()
            say(f"{model} is loading")
        time.sleep(POLL)


@contextlib.contextmanager
def started(
    model: str, name: str, home: Path, environment: dict[str, str], key: str | None, say: Say
) -> Generator[Running]:
    """A server of one's own on a free port, loaded; it is stopped at the end. Its log goes to a file. `name` is what the server calls
    the model."""
    log = _log_file(home)
    say(f"starting a server for {name}; its log: {log}")
    words = ["serve", model, "--port", "0", "--drain-seconds", "0"]
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "quire.cli.main", *words],  # -P: not the modules of this folder
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is the agent's
            preexec_fn=_ends_with_parent if sys.platform == "linux" else None,
        )
    try:
        url = _address(process, log)
        found = wait_until_ready(url, name, key, say, lambda: process.poll() is None)
        say(f"{name} is ready at {url} ({time.monotonic() - began:.1f} s)")
        yield found
    except Unavailable as error:
        if process.poll() is None:
            raise
        raise QuireError(f"the server could not start: {_last_line(log)}", cure=f"its log is {log}") from error
    finally:
        _stop(process)


def _get(url: str, path: str, key: str | None) -> tuple[int, bytes]:
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=PROBE)
    try:
        connection.request(
            "GET", parts.path.rstrip("/") + path, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_ANSWER)
    except HTTPException as error:
        raise OSError(str(error)) from error
    finally:
        connection.close()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens, from its log: it says so before it loads anything."""
    while True:
        ended = process.poll() is not None
        if match := re.search(r"listening on (http://\S+?);", log.read_text(errors="replace")):
            return match[1]
        if ended:
            raise Unavailable("the server ended at once")
        time.sleep(POLL)


def _log_file(home: Path) -> Path:
    """A new file for a log. The oldest are removed."""
    folder = home / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    earlier = sorted(folder.glob("launch-*.log"), key=lambda path: path.stat().st_mtime)
    for path in earlier[: max(0, len(earlier) - LOGS + 1)]:
        path.unlink(missing_ok=True)
    return folder / f"launch-{os.getpid()}.log"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    wrong = [line for line in lines if line.startswith("error: ")]
    return (wrong or lines or ["it said nothing"])[-1].removeprefix("error: ")


def _ends_with_parent() -> None:
    """In the child: end when `quire launch` is killed, which cannot stop it then."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
