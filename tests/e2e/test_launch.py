"""`quire launch` with a server of its own: it is there while the agent runs, and gone afterwards, however that ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from quire.config import DEFAULT_MODEL, Environment

# In the place of llm, which has no long instructions: asks the server that it was pointed at, and tells where that is and what it said.
PROGRAM = f"""#!{sys.executable}
import json, os, re, sys, time, urllib.request
told = open(os.environ["LLM_USER_PATH"] + "/extra-openai-models.yaml").read()
base, model = (re.search(name + ': "(.*)"', told)[1] for name in ("api_base", "model_name"))
body = {{"model": model, "temperature": 0, "max_tokens": 8, "messages": [{{"role": "user", "content": "Hi"}}]}}
asked = urllib.request.Request(base + "/chat/completions", json.dumps(body).encode(), {{"content-type": "application/json"}})
said = json.load(urllib.request.urlopen(asked, timeout=60))["choices"][0]["message"]["content"]
print(base, repr(said), flush=True)
time.sleep(float(sys.argv[-1]))
sys.exit(5)
"""
CLOSED = "http://127.0.0.1:9"  # nothing listens there


def start(folder: Path, model: str, seconds: str) -> subprocess.Popen[str]:
    """With the models of this user's store, logs of its own, and a project that has a file called like a module."""
    own = Environment.read().home
    home, bin = folder / "home", folder / "bin"
    for path in (home, bin):
        path.mkdir()
    for name in ("blobs", "manifests", "trees"):
        if (own / name).is_dir():
            (home / name).symlink_to(own / name)
    (bin / "llm").write_text(PROGRAM)
    (bin / "llm").chmod(0o755)
    (folder / "numpy.py").write_text("raise SystemExit('a module of the project was imported')")
    env = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "QUIRE_HOME": str(home)}
    command = [sys.executable, "-P", "-m", "quire.cli.main", "launch", "llm", "--url", CLOSED, "--model", model]
    return subprocess.Popen(
        [*command, "--", seconds], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def gone(base: str, seconds: float = 30.0) -> bool:
    """Whether nothing answers there any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            httpx.get(f"{base}/models", timeout=2)
        except httpx.TransportError:
            return True
        time.sleep(0.1)
    return False


def test_a_server_of_its_own(tmp_path: Path, model_path: Path):
    process = start(tmp_path, DEFAULT_MODEL, "0")
    out, said = process.communicate(timeout=180)
    assert process.returncode == 5, said
    base, answer = out.split(maxsplit=1)
    assert len(answer.strip()) > 2 and gone(base)
    log = re.search(r"its log: (\S+)", said)
    assert log is not None and f"listening on {base.removesuffix('/v1')}" in Path(log[1]).read_text()
    assert f"{DEFAULT_MODEL} is ready at {base.removesuffix('/v1')}" in said
    assert not list((tmp_path / "home" / "run").iterdir()), "`quire ps` lists nothing any more"


def test_a_server_does_not_outlive_a_launch_that_is_ended(tmp_path: Path, model_path: Path):
    for number, (how, code) in enumerate([(signal.SIGTERM, 143), (signal.SIGKILL, -9)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        process = start(folder, DEFAULT_MODEL, "20")  # the agent itself may outlive SIGKILL, by so many seconds
        assert process.stdout is not None
        base = process.stdout.readline().split()[0]
        process.send_signal(how)
        assert process.wait(60) == code
        if how == signal.SIGTERM or sys.platform == "linux":  # elsewhere nobody tells the server of a SIGKILL
            assert gone(base)
        process.stdout.close()


def test_a_server_that_cannot_start_is_told(tmp_path: Path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    process = start(tmp_path, str(broken), "0")
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, ""), said
    assert "the server could not start" in said and "its log is" in said and "Traceback" not in said
