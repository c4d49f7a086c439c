"""A server on a real socket: disconnects, body limits, drain, signals, exit codes, the run file, idle cost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from quire.server import lifecycle
from tests.unit.server.fakes import MODEL, events

ROOT = Path(__file__).resolve().parents[3]
HI = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@dataclass
class Live:
    process: subprocess.Popen[str]
    url: str
    home: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def out(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def post(self, **more: Any) -> httpx.Response:
        return httpx.post(self.url + CHAT, json=HI | more, timeout=20)

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Live]]:
    started: list[subprocess.Popen[str]] = []

    def launch(drain: float = 5.0, delay: float = 0.0, load: float = 0.0, wait: bool = True) -> Live:
        command = [
            sys.executable,
            "-m",
            "tests.unit.server.live",
            str(tmp_path),
            "0",
            str(drain),
            str(delay),
            str(load),
        ]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        assert process.stdout is not None
        live = Live(process, process.stdout.readline().strip(), tmp_path)
        assert live.url.startswith("http://"), live.url + process.stdout.read()
        if wait:
            wait_for(lambda: _status(live, "/ready") == 200)
        return live

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _status(live: Live, path: str) -> int:
    with contextlib.suppress(httpx.HTTPError):
        return live.get(path).status_code
    return 0


def test_probes_while_loading_and_the_run_file(start: Callable[..., Live]):
    live = start(load=1.5, wait=False)
    wait_for(lambda: _status(live, "/live") == 200)
    health = live.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "loading")
    assert health.json()["error"]["message"] == "Loading model"  # as llama-server says it
    ready = live.get("/ready")
    assert ready.status_code == 503
    assert ready.json() == {"status": "loading", "model": MODEL, "detail": "pretending"}
    r = live.post()
    assert r.status_code == 503
    assert r.headers["retry-after"]
    assert "loading" in r.json()["error"]["message"]
    assert live.get("/v1/models").json()["data"][0]["max_model_len"] is None
    note = json.loads((live.home / "run" / f"{live.process.pid}.json").read_text())
    assert (note["pid"], note["port"], note["model"]) == (live.process.pid, live.port, MODEL)
    wait_for(lambda: _status(live, "/ready") == 200)
    assert live.get("/health").json() == {"status": "ok"}
    assert live.post().status_code == 200
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(10) == 0
    assert not list((live.home / "run").glob("*"))


def test_sigterm_while_loading_ends_at_once(start: Callable[..., Live]):
    live = start(load=60, wait=False)
    wait_for(lambda: _status(live, "/live") == 200)
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(20) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_request(start: Callable[..., Live], stream: bool):
    live = start(delay=0.05)  # a whole answer takes five seconds
    body = json.dumps(HI | {"stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port)) as s:
        s.sendall(head.encode() + body)
        if stream:
            assert s.recv(4096).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.3)
    wait_for(lambda: live.metric("quire_client_disconnects_total") == 1)
    assert live.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == 1
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(20) == 0
    assert "aborted=1 running=0" in live.out.read()


def test_drain_finishes_what_runs_and_refuses_the_rest(start: Callable[..., Live]):
    live = start(delay=0.04, drain=20)
    answers: list[httpx.Response] = []
    kept = httpx.Client(base_url=live.url, timeout=20)
    kept.get("/health")
    threads = [threading.Thread(target=lambda s=s: answers.append(live.post(stream=s))) for s in (True, False)]
    for t in threads:
        t.start()
    wait_for(lambda: live.metric("vllm:request_params_n_count") == 2)
    live.process.send_signal(signal.SIGTERM)
    wait_for(lambda: _status(live, "/ready") == 503)
    assert live.get("/ready").json()["status"] == "draining"
    assert live.get("/health").status_code == 200
    late = kept.post(CHAT, json=HI)
    assert late.status_code == 503
    assert late.headers["retry-after"]
    assert live.post().status_code == 503  # a new connection too
    for t in threads:
        t.join()
    whole = next(a for a in answers if "json" in a.headers["content-type"])
    assert whole.json()["choices"][0]["message"]["content"] == "x" * 100
    streamed = events(next(a for a in answers if a is not whole).text)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in streamed[:-1]) == "x" * 100
    assert live.process.wait(20) == 0


def test_drain_gives_up_in_time(start: Callable[..., Live]):
    live = start(delay=0.2, drain=0.5)  # a whole answer takes twenty seconds
    answers: dict[bool, httpx.Response] = {}
    threads = [threading.Thread(target=lambda s=s: answers.update({s: live.post(stream=s)})) for s in (True, False)]
    for t in threads:
        t.start()
    wait_for(lambda: live.metric("vllm:request_params_n_count") == 2)
    time.sleep(0.3)
    live.process.send_signal(signal.SIGTERM)
    assert live.process.wait(15) == 0
    for t in threads:
        t.join()
    assert answers[False].status_code == 503
    assert "shutting down" in answers[False].json()["error"]["message"]
    found = events(answers[True].text)
    assert found[-1] == "[DONE]"
    assert found[-2]["error"]["code"] == "unavailable"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(start: Callable[..., Live], number: int):
    live = start(delay=0.2, drain=60)

    def doomed() -> None:
        with contextlib.suppress(httpx.HTTPError):
            live.post()

    thread = threading.Thread(target=doomed)
    thread.start()
    wait_for(lambda: live.metric("vllm:request_params_n_count") == 1)
    live.process.send_signal(signal.SIGTERM)
    wait_for(lambda: _status(live, "/ready") == 503)
    live.process.send_signal(number)
    assert live.process.wait(20) == 128 + number
    thread.join()


def test_big_bodies_are_refused_however_they_come(start: Callable[..., Live]):
    live = start()
    for size, chunk in ((100_001, 100_001), (20_000_000, 65_536)):
        announced = httpx.post(
            live.url + CHAT, content=b"x" * size, headers={"content-type": "application/json"}, timeout=10
        )
        assert announced.status_code == 413
        assert "100000 bytes" in announced.json()["error"]["message"]
        pieces = (b"x" * chunk for _ in range(-(-size // chunk)))
        chunked = httpx.post(live.url + CHAT, content=pieces, headers={"content-type": "application/json"}, timeout=10)
        assert chunked.status_code == 413
    tiny = (b" " for _ in range(5000))  # many one-byte chunks are merely slow
    r = httpx.post(live.url + CHAT, content=tiny, headers={"content-type": "application/json"}, timeout=10)
    assert r.status_code == 400
    assert live.post().status_code == 200


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
def test_a_giant_header_closes_the_connection(start: Callable[..., Live]):
    live = start()
    with socket.create_connection(("127.0.0.1", live.port)) as s:
        with contextlib.suppress(OSError):
            s.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 4_000_000)
        with contextlib.suppress(OSError):
            assert b" 200 " not in s.recv(100)
    assert _rss(live.process.pid) < 200 << 20
    assert live.get("/health").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 500,
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_on_the_wire(start: Callable[..., Live], data: bytes):
    live = start()
    with socket.create_connection(("127.0.0.1", live.port)) as s:
        s.sendall(data)
        s.settimeout(2)
        with contextlib.suppress(OSError):
            assert b" 200 " not in s.recv(1000)
    assert live.post().status_code == 200


@needs_proc
def test_idle_costs_next_to_nothing(start: Callable[..., Live]):
    live = start()
    live.post()
    before = _cpu(live.process.pid)
    time.sleep(5)
    assert (_cpu(live.process.pid) - before) / 5 < 0.01


def test_a_taken_port_is_said_before_loading():
    with lifecycle.bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(lifecycle.PortTaken, match=f"port {port} on 127.0.0.1 is in use"):
            lifecycle.bind("127.0.0.1", port)
    with pytest.raises(lifecycle.PortTaken, match="cannot listen"):
        lifecycle.bind("no.such.host.invalid", 8000)


def test_ipv6_loopback():
    try:
        sock = lifecycle.bind("::1", 0)
    except lifecycle.PortTaken:
        pytest.skip("needs IPv6")
    with sock:
        assert lifecycle.url_of(sock).startswith("http://[::1]:")


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
