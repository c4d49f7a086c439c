"""What happens when things go wrong: clients that leave, queues that fill, engines that die, servers told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.config import DEFAULT_MODEL
from tests.e2e.conftest import Server, wait_until

LONG = {
    "model": DEFAULT_MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 4000,
    "ignore_eos": True,
    "temperature": 0,
}
SHORT = LONG | {"max_tokens": 4}


def complete(server: Server, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as e:
            results.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def quiet(server: Server) -> bool:
    return server.metric("vllm:num_requests_running{") == 0 and server.metric("vllm:kv_cache_usage_perc{") == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server: Server, stream: bool):
    wait_until(lambda: quiet(server))
    before = server.metric("vllm:generation_tokens_total{")
    with httpx.Client(timeout=None) as http:
        if stream:
            with http.stream("POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}) as r:
                assert r.status_code == 200
                for _ in zip(range(3), r.iter_lines(), strict=False):
                    pass
        else:
            with contextlib.suppress(httpx.ReadTimeout):
                http.post(f"{server.url}/v1/completions", json=LONG, timeout=1.0)
    wait_until(lambda: quiet(server), 5)
    assert server.metric("vllm:generation_tokens_total{") - before < 1000  # it was not computed to the end
    assert complete(server, SHORT).status_code == 200


def test_a_hundred_clients_drop_and_the_next_is_served(server: Server):
    def drop() -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.5)

    threads = [threading.Thread(target=drop) for _ in range(100)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    began = time.monotonic()
    assert complete(server, SHORT).status_code == 200
    assert time.monotonic() - began < 20
    wait_until(lambda: quiet(server), 10)


def test_a_full_queue_answers_429(start: Callable[..., Server]):
    server = start("--max-seqs", "1", "--max-waiting", "2")
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(_hold(server, LONG))
        wait_until(lambda: server.metric("vllm:num_requests_waiting{") == 2)
        r = complete(server, SHORT)
        assert r.status_code == 429
        assert int(r.headers["retry-after"]) >= 1
        assert r.json()["error"]["code"] == "queue_full"
    # Closing the clients lets all three go, the waiting ones too.
    wait_until(lambda: complete(server, SHORT).status_code == 200)
    wait_until(lambda: quiet(server))
    assert server.metric("vllm:num_requests_waiting{") == 0


def _hold(server: Server, body: dict[str, Any]) -> socket.socket:
    """A client that has asked and waits; closing the socket is its going away."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return sock


def test_an_engine_killed_is_told_and_restarted(start: Callable[..., Server]):
    server = start()
    client = server.client()
    expected = complete(server, SHORT).json()["choices"][0]["text"]
    whole, whole_result = in_background(lambda: complete(server, LONG))
    events: list[Any] = []

    def stream() -> None:
        for chunk in client.completions.create(
            **{k: v for k, v in LONG.items() if k != "ignore_eos"}, stream=True, extra_body={"ignore_eos": True}
        ):
            events.append(chunk)  # noqa: PERF402, watched from another thread

    streaming, stream_result = in_background(stream)
    wait_until(lambda: len(events) > 3 and server.metric("vllm:num_requests_running{") == 2)
    os.kill(server.engine_pid(), signal.SIGKILL)
    whole.join(10)
    streaming.join(10)
    assert whole_result[0].status_code == 503
    assert whole_result[0].json()["error"]["code"] == "engine_dead"
    assert isinstance(stream_result[0], openai.APIError)
    assert server.get("/health").status_code == 200
    wait_until(server.ready, 60)
    again = complete(server, SHORT)
    assert again.status_code == 200
    assert again.json()["choices"][0]["text"] == expected
    assert server.metric("quire_engine_restarts_total{") == 1


def test_an_engine_that_hangs_is_told_and_restarted(start: Callable[..., Server]):
    server = start("--hang-seconds", "2")
    expected = complete(server, SHORT).json()["choices"][0]["text"]
    running, result = in_background(lambda: complete(server, LONG))
    wait_until(lambda: server.metric("vllm:num_requests_running{") == 1)
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    running.join(30)
    answer = result[0]
    assert answer.status_code == 503 and answer.headers["retry-after"]
    error = answer.json()["error"]
    assert error["code"] == "engine_dead"
    assert re.search(r"did not answer for [2-9][\d.]* s and did nothing", error["message"])
    assert "send it again" in error["message"]
    wait_until(lambda: not Path(f"/proc/{engine}").exists())
    wait_until(server.ready, 60)
    assert complete(server, SHORT).json()["choices"][0]["text"] == expected
    assert server.metric("quire_engine_hangs_total{") == server.metric("quire_engine_restarts_total{") == 1


def test_sigterm_drains(start: Callable[..., Server]):
    server = start("--drain-seconds", "60")
    engine = server.engine_pid()
    body = LONG | {"max_tokens": 150, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as r:
        lines = (line for line in r.iter_lines() if line)
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.ready())
        late = complete(server, SHORT)
        assert late.status_code == 503
        assert late.headers["retry-after"]
        *_, usage, done = lines
    assert done == "data: [DONE]"
    assert '"completion_tokens":150' in usage
    assert server.process.wait(20) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_sigterm_gives_up_in_time(start: Callable[..., Server]):
    server = start("--drain-seconds", "1")
    engine = server.engine_pid()
    running, result = in_background(lambda: complete(server, LONG | {"n": 8}))
    wait_until(lambda: server.metric("vllm:num_requests_running{") >= 1)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(15) == 0
    running.join(20)
    assert isinstance(result[0], httpx.Response)
    assert result[0].status_code == 503
    assert not Path(f"/proc/{engine}").exists()


def test_a_killed_server_leaves_no_engine(start: Callable[..., Server]):
    server = start()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not Path(f"/proc/{engine}").exists(), 10)


def test_probes_answer_while_it_loads(start: Callable[..., Server]):
    server = start(wait=False)
    wait_until(lambda: _health(server), 10)
    server.wait_for_line("is ready at", 60)
    assert server.ready()


def _health(server: Server) -> bool:
    try:
        return server.get("/live").status_code == 200
    except httpx.HTTPError:
        return False


def test_idle_is_under_one_percent_of_a_core(start: Callable[..., Server]):
    server = start()
    complete(server, SHORT)
    pids = [server.process.pid, server.engine_pid()]
    deadline = time.monotonic() + 60
    # First it touches memory ahead, which takes as long as the system takes to clear it.
    while _used(pids, 1) > 0.01 and time.monotonic() < deadline:
        pass
    used = _used(pids, 5)
    assert used / 5 < 0.01, f"{used / 5:.2%} of a core"


def _used(pids: list[int], seconds: float) -> float:
    before = sum(_cpu(p) for p in pids)
    time.sleep(seconds)
    return sum(_cpu(p) for p in pids) - before


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
