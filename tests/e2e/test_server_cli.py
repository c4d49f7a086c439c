"""`quire serve` as a command: what it says, what it refuses, and what `quire ps` sees of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import ROOT, Server


def quire(*arguments: str, seconds: float = 60, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire.cli.main", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, env={**os.environ, **(env or {})}
    )


def test_it_says_what_it_decided(server: Server):
    said = "\n".join(server.lines)
    assert "KV pool:" in said
    assert "threads:" in said
    assert f"{DEFAULT_MODEL} is ready at {server.url}/v1" in said


def test_ps_lists_it(server: Server):
    listed = json.loads(quire("ps", "--json").stdout)
    mine = next(s for s in listed if s["pid"] == server.process.pid)
    assert (mine["model"], mine["port"]) == (DEFAULT_MODEL, int(server.url.rpartition(":")[2]))
    assert mine["state"] == "ready"


def test_a_taken_port_is_told_at_once(model_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = quire("serve", DEFAULT_MODEL, "--port", str(port), seconds=20)
    assert ended.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_wrong_models_and_options_are_told():
    for arguments in (["./no-such-file.gguf"], ["no:such:model:at:all"]):
        ended = quire("serve", *arguments, "--port", "0", seconds=30)
        assert ended.returncode == 1, ended.stderr
        assert ended.stderr.startswith("error: ") or "\nerror: " in ended.stderr
        assert "Traceback" not in ended.stderr
    assert quire("serve", "--kv-memory", "lots").returncode == 2
    assert quire("serve", "--port", "99999").returncode == 2


def test_a_file_that_is_no_model(tmp_path: Path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + b"\xff" * 500)
    home = tmp_path / "home"
    ended = quire("serve", str(bad), "--port", "0", seconds=60, env={"QUIRE_HOME": str(home)})
    assert ended.returncode == 1
    assert not (home / "state").exists()  # nothing was served, and nothing is left behind
    assert "Traceback" not in ended.stderr
    assert "error: " in ended.stderr


def test_a_key_and_a_name(start: Callable[..., Server]):
    server = start("--name", "mine", env={"QUIRE_API_KEY": "k"})
    assert server.get("/health").status_code == 200
    assert server.get("/v1/models").status_code == 401
    models = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer k"}, timeout=10).json()
    assert [m["id"] for m in models["data"]] == ["mine"]


def test_a_public_bind_without_a_key_is_warned_about(start: Callable[..., Server]):
    server = start("--host", "0.0.0.0")
    assert any("warning" in line and "QUIRE_API_KEY" in line for line in server.lines)


def test_only_the_api_port_listens(server: Server):
    """Nothing but the HTTP port is open, on any interface."""
    inodes = set()
    for pid in (server.process.pid, server.engine_pid()):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(fd.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    assert ports == {int(server.url.rpartition(":")[2])}
