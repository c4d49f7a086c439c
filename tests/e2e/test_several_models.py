"""Two models behind one `quire serve`: real engines, each in a process of its own, by all of their names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx

from tests.e2e.conftest import ROOT, Server, wait_until

SHORT = {"max_tokens": 8, "temperature": 0}


def engines(server: Server) -> list[int]:
    """The processes of its engines."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == server.process.pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def test_two_models_answer_and_one_that_dies_leaves_the_other(start: Callable[..., Server], model_path: Path):
    server = start("b,other=smollm2:135m", "--context", "256", model="a=smollm2:135m", wait=False)
    server.wait_for_line(r"^a is ready at", 120)
    server.wait_for_line(r"^b is ready at", 120)
    first, second = engines(server)
    http = httpx.Client(base_url=server.url, timeout=60)

    def said(name: str) -> httpx.Response:
        return http.post("/v1/completions", json={"model": name, "prompt": "The capital of France is", **SHORT})

    texts = {name: said(name).json()["choices"][0]["text"] for name in ("a", "b", "other")}
    assert len(set(texts.values())) == 1 and "Paris" in texts["a"]  # the same model by two names
    assert said("other").json()["model"] == "b"
    ollama = {"model": "b", "prompt": "The capital of France is", "raw": True, "stream": False}
    ollama |= {"options": {"num_predict": 8, "temperature": 0}}
    assert http.post("/api/generate", json=ollama).json()["response"] == texts["a"]
    assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["a", "b", "other"]
    assert said("c").status_code == 404
    r = http.post("/v1/completions", json={"prompt": "x"})
    assert r.status_code == 400 and "a, b" in r.json()["error"]["message"]

    listed = subprocess.run(
        [sys.executable, "-m", "quire.cli.main", "ps"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in listed.splitlines() if line.split()[0] == str(server.process.pid)]
    assert [(row[2], row[3]) for row in rows] == [("a", "ready"), ("b", "ready")]

    os.kill(first, signal.SIGKILL)
    wait_until(lambda: http.get("/ready?model=a").status_code == 503 or first not in engines(server))
    assert said("b").json()["choices"][0]["text"] == texts["b"]
    assert http.get("/ready").status_code == 200
    wait_until(lambda: http.get("/ready?model=a").status_code == 200, 120)
    assert said("a").json()["choices"][0]["text"] == texts["a"]
    assert second in engines(server) and len(engines(server)) == 2
    assert server.stop() == 0, "\n".join(server.lines)
