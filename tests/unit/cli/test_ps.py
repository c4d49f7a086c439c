"""`quire ps`: notes of the living and the dead, and servers that answer, do not, or answer nonsense."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli.app import app

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running_total{engine="0"} 99.0
vllm:num_requests_waiting{engine="0"} 12.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def server() -> Iterator[tuple[int, dict[str, tuple[int, str]]]]:
    answers = {"/ready": (200, "{}"), "/metrics": (200, METRICS)}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers[self.path]
            key = answers.get("key")
            if key and self.path != "/ready" and self.headers["Authorization"] != f"Bearer {key[1]}":
                status = 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd.server_address[1], answers
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def write(home: Path, name: str, **note: object) -> None:
    (home / name).write_text(json.dumps({"host": "127.0.0.1", "model": "m", "started": time.time() - 7200, **note}))


def ps(*args: str) -> Any:
    return CliRunner().invoke(app, ["ps", *args])


def test_nothing(home: Path) -> None:
    done = ps()
    assert (done.exit_code, done.stdout) == (0, "")
    assert "No server is running" in done.stderr
    assert json.loads(ps("--json").stdout) == []
    home.rmdir()
    assert ps().exit_code == 0


def test_a_server_that_answers(home: Path, server: tuple[int, Any]) -> None:
    port, answers = server
    write(home, "a.json", pid=os.getpid(), port=port)
    (one,) = json.loads(ps("--json").stdout)
    assert (one["state"], one["running"], one["waiting"], one["kv_used"]) == ("ready", 3, 12, 0.25)
    head, row = ps().stdout.splitlines()
    assert head.split() == ["PID", "ADDRESS", "MODEL", "STATE", "RUNNING", "WAITING", "KV", "UP"]
    assert row.split() == [str(os.getpid()), f"127.0.0.1:{port}", "m", "ready", "3", "12", "25%", "2", "h"]
    answers["/ready"] = (503, "{}")
    answers["/metrics"] = (200, "vllm:num_requests_running nonsense")
    (one,) = json.loads(ps("--json").stdout)
    assert (one["state"], one["running"]) == ("not ready", None)
    for body, state in (
        ('{"status": "loading"}', "loading"),
        ('{"status": "\x1b[2J"}', "not ready"),
        ("[]", "not ready"),
    ):
        answers["/ready"] = (503, body)
        assert json.loads(ps("--json").stdout)[0]["state"] == state


def test_numbers_behind_a_key(home: Path, server: tuple[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    port, answers = server
    write(home, "a.json", pid=os.getpid(), port=port)
    answers["key"] = (0, "k")
    told = ps()
    assert told.stdout.splitlines()[1].split()[3:7] == ["ready", "-", "-", "-"] and "set QUIRE_API_KEY" in told.stderr
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    told = ps()
    assert "25%" in told.stdout and told.stderr == ""


def test_one_that_does_not_answer_is_listed_quickly(home: Path) -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for i in range(16):
            write(home, f"{i}.json", pid=os.getpid(), port=silent.getsockname()[1])
        began = time.monotonic()
        listed = json.loads(ps("--json").stdout)
        assert time.monotonic() - began < 7  # one after the other they take eight
    assert [s["state"] for s in listed] == ["not answering"] * 16


def test_notes_of_the_dead_are_removed_and_nonsense_is_left_alone(home: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    write(home, "dead.json", pid=child.pid, port=1)
    write(home, "zero.json", pid=0, port=1)
    (home / "nonsense.json").write_text("{")
    (home / "other.json").write_text('{"pid": "x"}')
    assert json.loads(ps("--json").stdout) == []
    assert sorted(p.name for p in home.iterdir()) == ["nonsense.json", "other.json"]


def test_a_server_of_several_models_has_a_line_for_each(home: Path, server: tuple[int, Any]) -> None:
    port, answers = server
    write(home, "a.json", pid=os.getpid(), port=port, models=["m", 'q"x'])
    told = {
        "status": "degraded",
        "models": [{"model": "m", "status": "ready"}, {"model": 'q"x', "status": "restarting"}],
    }
    answers["/ready"] = (200, json.dumps(told))
    metrics = [
        f'vllm:num_requests_running{{engine="0",model_name="{name}"}} {n}' for n, name in ((1.0, "m"), (2.0, 'q\\"x'))
    ]
    answers["/metrics"] = (200, "\n".join(metrics))
    listed = json.loads(ps("--json").stdout)
    assert [(one["model"], one["state"], one["running"]) for one in listed] == [
        ("m", "ready", 1),
        ('q"x', "restarting", 2),
    ]
    answers["/ready"] = (200, '{"models": [{"model": 1}, 7]}')  # nonsense is no news
    assert [one["state"] for one in json.loads(ps("--json").stdout)] == ["ready", "ready"]
