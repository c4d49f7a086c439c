"""`quire doctor cache`: what a server tells is printed with its cure; what cannot be asked is an error with one."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.prefixes import NAME
from quire.cli import app
from tests.unit.server.test_prefixes import RULES, chat
from tests.unit.server.test_prefixes import server as replaying


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    return tmp_path


@pytest.fixture
def answers() -> dict[str, Any]:
    """What the server answers: the real answer of a real server, unless a test changes it."""

    async def real() -> dict[str, Any]:
        async with replaying().http() as client:
            for n in range(3):
                body = chat(f"Request number {n}.\n{RULES}")
                await client.post("/v1/chat/completions", json=body, headers={"user-agent": "coder/1.2"})
            return (await client.get("/v1/cache/breaks")).json()

    return {"status": 200, "body": json.dumps(asyncio.run(real())), "key": None, "asked": []}


@pytest.fixture
def port(answers: dict[str, Any]) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers["asked"].append(self.path)
            allowed = answers["key"] is None or self.headers["Authorization"] == f"Bearer {answers['key']}"
            self.send_response(answers["status"] if allowed else 401)
            self.end_headers()
            self.wfile.write(answers["body"].encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd.server_address[1]
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def run(*args: str) -> Result:
    return CliRunner().invoke(app.app, ["doctor", *args])


def test_breaks_are_printed_with_their_cures(home: Path, port: int, answers: dict[str, Any]):
    done = run("cache", "--url", f"http://127.0.0.1:{port}")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["AGENT", "REQUESTS", "PROMPT", "TOKENS", "FROM", "CACHE", "COMPUTED", "AGAIN"]
    told = json.loads(answers["body"])
    assert lines[1].split()[:2] == ["coder", "3"]
    (row,) = [line for line in lines if "messages[0] (system)" in line]
    assert {"coder", "2", str(told["data"][0]["lost_tokens"])} <= set(row.split())
    assert "Request number |1. -> 2." in row
    assert done.stdout.rstrip().endswith(f"cure of 1: {told['data'][0]['cure']}")


def test_json_is_what_the_server_said(home: Path, port: int, answers: dict[str, Any]):
    made = json.loads(run("cache", "--json", "--url", f"127.0.0.1:{port}/v1").stdout)
    told = json.loads(answers["body"])
    assert made["agents"] == told["agents"]
    assert made["data"][0].items() <= told["data"][0].items()
    assert answers["asked"] == ["/v1/cache/breaks"]


def test_a_model_and_a_key_are_sent(home: Path, port: int, answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    answers["key"] = "some-key-1"
    url = f"http://127.0.0.1:{port}"
    refused = run("cache", "--url", url)
    assert refused.exit_code == 1
    assert "asks for a key: give it with --api-key" in refused.stderr
    assert run("cache", "--url", url, "--api-key", "some-key-1", "--model", "a/b c").exit_code == 0
    assert answers["asked"][-1] == "/v1/cache/breaks?model=a%2Fb%20c"
    monkeypatch.setenv("QUIRE_API_KEY", "some-key-1")
    assert run("cache", "--url", url).exit_code == 0


def test_the_server_that_runs_here_is_asked(home: Path, port: int):
    import os

    note = {"pid": os.getpid(), "port": port, "model": NAME, "started": 1.0, "host": "127.0.0.1"}
    (home / "run" / "a.json").write_text(json.dumps(note))
    assert "coder" in run("cache").stdout
    (home / "run" / "b.json").write_text(json.dumps(note | {"port": port + 1, "model": "other"}))
    several = run("cache")
    assert several.exit_code == 1
    assert f"http://127.0.0.1:{port}" in several.stderr
    assert "--url" in several.stderr


def test_what_cannot_be_asked_is_said(home: Path, port: int, answers: dict[str, Any]):
    url = f"http://127.0.0.1:{port}"
    for body, status, words in (
        ("not json", 200, "not as this version of Quire does"),
        ('{"error": {"message": "that model is not served here"}}', 404, "that model is not served here"),
        ('{"model": 1}', 200, "not as this version"),
        ("[]", 500, "answered 500"),
    ):
        answers |= {"body": body, "status": status}
        done = run("cache", "--url", url)
        assert done.exit_code == 1
        assert words in done.stderr
    assert "does not answer" in run("cache", "--url", "http://127.0.0.1:1").stderr
    assert "no address" in run("cache", "--url", "ftp://x").stderr
    assert run("cash").exit_code == 2
    assert run("--url", url).exit_code == 2


def test_nothing_to_tell(home: Path, port: int, answers: dict[str, Any]):
    answers["body"] = json.dumps({"model": "m", "agents": [], "data": []})
    assert "nothing to explain" in run("cache", "--url", f"http://127.0.0.1:{port}").stdout
    agent = {"agent": "a", "requests": 1, "prompt_tokens": 0, "cached_tokens": 0, "lost_tokens": 0}
    ended = {"agent": "a\x1b[31m", "cause": "diverged", "before": "\x1b]0;title\x07"}
    answers["body"] = json.dumps({"model": "m", "agents": [agent], "data": [ended]})
    assert "\x1b" not in run("cache", "--url", f"http://127.0.0.1:{port}").stdout, (
        "no text of a client's moves the cursor"
    )
    answers["body"] = json.dumps({"model": "m", "agents": [agent], "data": []})
    assert "nothing broke" in run("cache", "--url", f"http://127.0.0.1:{port}").stdout
